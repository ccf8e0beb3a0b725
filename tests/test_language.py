"""Rules on language and structure: prose rates, docstrings, vocabulary, public names, assignments."""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = (ROOT / "specdemo", ROOT / "app.py")
DOCUMENTS = (ROOT / "docs", ROOT / "README.md")

# Noun clauses, personification and quaint words; largest number per 1,000 words.
RATES = {
    "clauses": (
        10.0,
        "what,whatever,whoever,whether,whose,nothing,nobody,none,anything,everything,one,ones,those,itself",
    ),
    "persons": (
        3.5,
        "knows,know,says,say,asks,ask,asked,tells,tell,told,looks,look,holds,held,stands,stand,goes,go,comes,come,came,"
        "sees,reads,waits,gives,lends,keeps,kept",
    ),
    "quaint": (
        2.5,
        "beside,behind,anew,elsewhere,else,whole,likeliest,yet,far,humane,dear,own,law,laws,errand,shelf,foretold,"
        "priced,news",
    ),
}
RELATIVE = re.compile(r"(what|whatever|whether|who|whoever|whose|where|wherever|which|that|how|why|the ones?)\b", re.I)

FORBIDDEN = frozenset(
    "law,laws,errand,errands,shelf,whereabouts,foretold,judge,judges,judged,judging,unjudged,told,likeliest,humane,"
    "anew,dear,priced,door,doors,heard,household,leash,peer,peers,room,talks,tell,tells,usual".split(",")
)
FORBIDDEN_NAMES = frozenset({"found", "kept", "one", "said"})  # complete names, which describe no value
# External names, defined by traces, messages, links and element ids: constants and attribute names stay as they are.
FROZEN = frozenset({"law", "laws", "peers", "unjudged"})

MAY_REPEAT = frozenset({"main", "build"})
MOST_TARGETS = 2  # of an assignment from a tuple

WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
CODE = re.compile(r"`[^`]*`|\S*[_/(]\S*|--\S+")

# Comments and identifiers of C, JavaScript and CSS; string literals are skipped.
SOURCES = (".c", ".h", ".js", ".ts", ".css")
TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<identifier>[A-Za-z_$][\w$-]*)""",
    re.DOTALL,
)

Texts = list[tuple[str, int, str]]  # kind ("docstrings", "comments", "texts", "markdown"), line number, text


def files(paths: Iterable[Path], suffixes: tuple[str, ...] = (".py", ".md")) -> list[Path]:
    below = (file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]))
    return sorted(file for file in below if file.suffix in suffixes)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


@cache
def texts(path: Path) -> Texts:
    """Return docstrings, comments, other strings with at least five words, and Markdown without code blocks."""
    source = path.read_text("utf-8")
    if path.suffix in SOURCES:
        return [("comments", line, text) for kind, line, text in source_tokens(path) if kind == "comment"]
    if path.suffix == ".md":
        return [("markdown", 1, re.sub(r"```.*?```", " ", source, flags=re.DOTALL))]
    docstrings, strings = {}, []
    for node in nodes(path):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if docstring := ast.get_docstring(node, clean=False):
                docstrings[docstring] = node.body[0].lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 3:
            strings.append(("texts", node.lineno, node.value))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return [
        *(("docstrings", line, text) for text, line in docstrings.items()),
        *(("comments", token.start[0], token.string.lstrip("# ")) for token in comments),
        *(string for string in strings if string[2] not in docstrings),
    ]


def words(text: str) -> list[str]:
    return WORD.findall(CODE.sub(" ", text).lower())


def rates(paths: Iterable[Path]) -> dict[str, dict[str, float]]:
    """Return the number of words and the rates per 1,000 words for each kind of text; comments are docstrings."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path in files(paths):
        for kind, _, text in texts(path):
            counts["docstrings" if kind == "comments" else kind].update(words(text))
    result = {}
    for kind, counter in counts.items():
        total = max(counter.total(), 1)
        listed = {name: sum(counter[word] for word in group.split(",")) for name, (_, group) in RATES.items()}
        result[kind] = {"words": counter.total()} | {name: 1000 * n / total for name, n in listed.items()}
    return result


def exceeded(paths: Iterable[Path]) -> list[str]:
    """Return the rates above their limits."""
    return [
        f"{kind}: {row[name]:.1f} {name} per 1,000 words, at most {limit}"
        for kind, row in rates(paths).items()
        for name, (limit, _) in RATES.items()
        if row[name] > limit
    ]


def relative_docstrings(paths: Iterable[Path]) -> list[str]:
    """Return docstrings that start with a relative clause."""
    listed = [(path, *text) for path in files(paths) for text in texts(path)]
    return [
        f"{name_of(path)}:{line}: {text.strip().splitlines()[0]}"
        for path, kind, line, text in listed
        if kind == "docstrings" and RELATIVE.match(text.strip())
    ]


def crowded_assignments(paths: Iterable[Path]) -> list[str]:
    """Return assignments of the form `a, b, c = x, y, z`; results of functions and iterables may be unpacked."""
    return [
        f"{name_of(path)}:{node.lineno}: {len(target.elts)} targets"
        for path in files(paths)
        if path.suffix == ".py"
        for node in nodes(path)
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Tuple, ast.List))
        for target in node.targets
        if isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) > MOST_TARGETS
    ]


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix in SOURCES:
        yield from ((line, text) for kind, line, text in source_tokens(path) if kind == "identifier")
        return
    for node in nodes(path):
        line = getattr(node, "lineno", 1)
        for field in ("id", "name", "attr", "arg", "asname"):
            if isinstance(value := getattr(node, field, None), str):
                yield line, value


@cache
def parts(identifier: str) -> set[str]:
    """Split snake_case and CamelCase into lower-case words."""
    return set(re.findall(r"[a-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", identifier).lower()))


def source_tokens(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the kind ("comment" or "identifier"), the line number and the text of tokens of a file in `SOURCES`."""
    source = path.read_text("utf-8")
    for match in TOKEN.finditer(source):
        if match.lastgroup:
            yield match.lastgroup, source.count("\n", 0, match.start()) + 1, match[0]


def forbidden_words(paths: Iterable[Path]) -> list[str]:
    """Return uses of forbidden words in identifiers, prose and messages; names in backticks and URLs are code."""
    problems = []
    for path in files(paths, (".py", ".md", *SOURCES)):
        for kind, line, text in texts(path):
            used = set(words(text)) & FORBIDDEN
            problems += [f"{name_of(path)}:{line}: {word!r} in {kind}" for word in sorted(used)]
        if path.suffix != ".md":
            names = FORBIDDEN_NAMES if path.suffix != ".css" else frozenset()
            for line, name in identifiers(path):
                if name not in FROZEN and (used := parts(name) & FORBIDDEN | {name} & names):
                    problems.append(f"{name_of(path)}:{line}: {sorted(used)[0]!r} in the identifier {name}")
    return sorted(set(problems))


def definitions(tree: ast.Module) -> Iterator[str]:
    """Yield public names defined at module level, except type variables."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") in ("TypeVar", "ParamSpec"):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def repeated_names(paths: Iterable[Path]) -> list[str]:
    """Return public names defined in several modules."""
    modules: dict[str, set[str]] = defaultdict(set)
    for path in files(paths):
        if path.suffix == ".py":
            for name in definitions(parsed(path)):
                if not name.startswith("_") and name not in MAY_REPEAT:
                    modules[name].add(name_of(path))
    return [f"{name}: {', '.join(sorted(where))}" for name, where in sorted(modules.items()) if len(where) > 1]


CHECKS: dict[str, tuple[Callable[[Iterable[Path]], list[str]], tuple[Path, ...]]] = {
    "rates of the program": (exceeded, PROGRAM),
    "rates of the tests": (exceeded, (ROOT / "tests",)),
    "rates of the documents": (exceeded, DOCUMENTS),
    "docstrings": (relative_docstrings, PROGRAM),
    "words": (forbidden_words, (*PROGRAM, *DOCUMENTS)),
    "assignments": (crowded_assignments, PROGRAM),
    "public names": (repeated_names, (ROOT / "specdemo",)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (CHECKS[name][0] is exceeded)) for name in CHECKS]
)
def test_language_follows_the_rules(name: str) -> None:
    check, paths = CHECKS[name]
    problems = check(paths)
    assert not problems, "\n" + "\n".join(problems)


BAD = '''"""What the module knows."""


def judge(law):
    # nobody told it
    return "nobody tells it what anything is"


RENAMED_LAW = {"laws": 1}
kept = options.peers
a, b, c = 1, 2, 3
'''


def test_violations_are_detected(tmp_path: Path) -> None:
    for name in ("first.py", "second.py"):
        (tmp_path / name).write_text(BAD, "utf-8")
    paths = [tmp_path]
    assert len(exceeded(paths)) >= 4
    assert relative_docstrings(paths)[0] == "first.py:1: What the module knows."
    assert [line.partition(": ")[2] for line in forbidden_words(paths) if line.startswith("first")] == [
        "'kept' in the identifier kept",
        "'judge' in the identifier judge",
        "'told' in comments",
        "'tells' in texts",
        "'law' in the identifier RENAMED_LAW",
    ]
    assert repeated_names(paths) == [f"{name}: first.py, second.py" for name in ("RENAMED_LAW", "judge", "kept")]
    assert crowded_assignments(paths)[0] == "first.py:11: 3 targets"
    for suffix in SOURCES:
        folder = tmp_path / suffix
        folder.mkdir()
        (folder / f"bad{suffix}").write_text('/* priced */\n.judge-row { "told";\nlaw: tokenShelf; }', "utf-8")
        problems = re.findall(r"'(.*?)' in (?:the )?(\w+)", "\n".join(forbidden_words([folder])))
        assert problems == [("priced", "comments"), ("judge", "identifier"), ("shelf", "identifier")]
