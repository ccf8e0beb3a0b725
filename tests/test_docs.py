"""Documents: links, anchors and tables, paths of functions, length, and the examples of the Python API."""

import doctest
import re
import subprocess
import sys
from collections import Counter, defaultdict
from importlib import import_module
from pathlib import Path

import pytest

import specdemo
from benchmarks.document_tables import README_ROWS
from benchmarks.tables import RUNS, WIDTHS, TableRun

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "assets/pair/README.md")
DOCUMENTS = [*(ROOT / name for name in NAMES), *sorted(ROOT.glob("docs/*.md"))]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of all headings, in GitHub's spelling."""
    found: Counter[str] = Counter()
    result = set()
    for title in re.findall(r"^#+ +(.+?) *$", without_code(text), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        result.add(f"{anchor}-{found[anchor]}" if found[anchor] else anchor)
        found[anchor] += 1
    return result


def broken_links(path: Path, text: str) -> list[str]:
    """Return the relative links of `text`, located at `path`, without a file or heading as destination."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        file = (path.parent / name).resolve() if name else path
        destination = text if file == path else file.read_text("utf-8") if anchor and file.is_file() else ""
        if not file.exists() or (anchor and anchor not in anchors(destination)):
            broken.append(link)
    return broken


def unmarked(text: str) -> list[str]:
    """Return errors in the begin and end markers of measured tables."""
    errors, current = [], None
    for kind, name in re.findall(r"<!-- (begin|end): (\S+) -->", text):
        if kind == "begin":
            errors += [f"{current} is not closed"] if current else []
            current = name
        else:
            errors += [f"{name} is not open"] if current != name else []
            current = None
    return errors + ([f"{current} is not closed"] if current else [])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_resolve_and_markers_are_balanced(path: Path) -> None:
    text = path.read_text("utf-8")
    assert broken_links(path, text) == []
    assert unmarked(text) == []


def table_names(path: Path) -> list[str]:
    """Return the names of the measured tables of a document."""
    return re.findall(r"<!-- begin: (\S+) -->", path.read_text("utf-8"))


def test_every_measured_table_has_a_registered_command_or_names_the_commit_of_its_study() -> None:
    names = [name for path in DOCUMENTS for name in table_names(path)]
    registered = [name for run in RUNS for name in run.tables]
    assert len(names) == len(set(names)) and set(registered) <= set(names)
    declared = {name for run in RUNS for name in import_module(run.module).TABLES}
    commit = re.compile(r"`(?:benchmarks|training)/\w+\.py[^`]*` of commit [0-9a-f]{7}\b.*\d{4}-\d\d-\d\d", re.S)
    for path in DOCUMENTS:
        for name in {*table_names(path)} - {*registered}:
            source = path.read_text("utf-8").partition(f"begin: {name} -->")[2].partition("\n|")[0]
            assert source.startswith("\nNot reproduced by a script any more") and name not in declared, name
            assert commit.search(source), name


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.tables[0])
def test_the_study_of_a_command_declares_its_tables(run: TableRun) -> None:
    declared = import_module(run.module).TABLES
    assert set(run.tables) <= set(declared) and "--write" in run.command.split()
    assert all(name in table_names(ROOT / document) for name, document in declared.items())


def test_every_study_in_a_command_exists() -> None:
    for path in DOCUMENTS:
        modules = set(re.findall(r"\b(benchmarks|training)\.([a-z]\w*)", path.read_text("utf-8")))
        sources = {(folder, name): ROOT / folder / name for folder, name in modules}
        assert not [key for key, at in sources.items() if not (at.with_suffix(".py").is_file() or at.is_dir())]


MODULE = re.compile(r"`([\w/]+\.(?:py|js|c|h))`(?:\s+\(([^)]*)\))?")
PATHS = (ROOT / "docs/architecture.md").read_text("utf-8").partition("\n## Five paths\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("path", PATHS.split("\n### ")[1:], ids=lambda path: path.partition("\n")[0])
def test_the_functions_of_a_documented_path_exist(path: str) -> None:
    heading, _, text = path.partition("\n")
    functions: dict[str, set[str]] = defaultdict(set)  # by module, relative to `specdemo/ui` or `specdemo`
    for module, names in MODULE.findall(text):
        functions[module] |= {*re.findall(r"`(\w+)`", names)}
    for module, names in functions.items():
        folders = (ROOT / "specdemo" / "ui", ROOT / "specdemo")
        (source,) = ((folder / module).read_text("utf-8") for folder in folders if (folder / module).is_file())
        assert all(re.search(rf"\b(?:def|class|function|int|void) {name}\b", source) for name in names), module
    numbers = len(functions), sum(map(len, functions.values()))
    counts = re.search(r"(\d+) modules, (\d+) functions", heading)
    assert counts is None or numbers == (int(counts[1]), int(counts[2]))
    assert numbers[0] <= 25 and numbers[1] <= 60


def test_the_changelog_describes_the_version_and_the_documents_stay_short() -> None:
    """Bytes without the tables that benchmarks write and the reference that the parser writes."""
    released = re.findall(r"^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert released[0] == specdemo.__version__
    assert len((ROOT / "README.md").read_bytes()) <= 7_000  # one screen
    texts = "".join(path.read_text("utf-8") for path in ROOT.glob("docs/*.md") if path.name != "cli.md")
    assert len(re.sub(r"<!-- begin: (\S+) -->.*?<!-- end: \1 -->", "", texts, flags=re.S).encode()) <= 118_000


def table_rows(path: Path, name: str) -> list[list[str]]:
    """Return the cells of a measured table by row, headings first."""
    table = path.read_text("utf-8").partition(f"begin: {name} -->")[2].partition("<!-- end")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return [rows[0], *rows[2:]]


def test_the_figures_of_the_readme_are_those_of_the_bench_tables() -> None:
    head, *rows = table_rows(ROOT / "docs/performance.md", "bench-classes")
    measured = {(kind, row[0]): row[column] for row in rows for column, kind in enumerate(head) if column}
    figures = table_rows(ROOT / "README.md", "bench-readme")[1:]
    for (kind, method, temperature), row in zip(README_ROWS, figures, strict=True):
        prompts, recipe, speedup, interval = row
        assert (prompts, recipe) == (f"{kind}, temperature {temperature}", f"`{method}`")
        assert measured[kind, f"{method} gamma=3 T={temperature}"] == f"{speedup} [{interval.replace('-', ', ')}]"
    readme = (ROOT / "README.md").read_text("utf-8").partition("begin: chat-readme -->")[2].partition("\n|")[0]
    width = next(width for width in WIDTHS if f", {width}" in readme)
    rows = table_rows(ROOT / "docs/performance.md", f"bench-chat-{width}")[1:]
    measured = {(kind, recipe): f"{speedup}, {interval}" for kind, recipe, _, speedup, interval, *_ in rows}
    figures = table_rows(ROOT / "README.md", "chat-readme")[1:]
    assert {prompts.partition(",")[0] for prompts, *_ in figures} == {kind for kind, _ in measured}
    for prompts, recipe, speedup, interval in figures:
        kind, _, temperature = prompts.partition(", temperature ")
        assert measured[kind, f"{recipe.strip('`')} path T={temperature}"] == f"{speedup}, {interval}"


# --- Python API: exported names, light imports, examples --------------------------------------------------------------


LIGHT = ("app", "specdemo", "specdemo.models.spec", "specdemo.models.zoo", "specdemo.recipe", "specdemo.cli")
HEAVY = {"torch", "transformers", "gradio", "bitsandbytes", "accelerate", "huggingface_hub", "numpy"}


def in_new_process(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


@pytest.mark.slow
def test_the_bundled_pair_loads_no_modelling_files() -> None:
    code = "import sys\nfrom specdemo import Recipe, generate\n*_, end = generate(Recipe(max_tokens=2), 'def f')\n"
    slow = {"torch._dynamo", "transformers.modeling_utils", "accelerate", "gradio", "bitsandbytes"}
    code += f"print(end.reason, sorted({slow!r} & set(sys.modules)))"
    assert in_new_process(code) == "length []"


def test_every_exported_name_exists() -> None:
    assert set(dir(specdemo)) == set(specdemo.__all__)
    assert all(getattr(specdemo, name) is not None for name in specdemo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        specdemo.absent  # noqa: B018


@pytest.mark.slow
def test_light_modules_and_help_load_no_framework() -> None:
    code = f"import sys, {', '.join(LIGHT)}\nfrom specdemo.cli.arguments import parser\nparser().format_help()\n"
    code += f"specdemo.Recipe(temperature=0)\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    assert in_new_process(code) == "[]"


KERNEL_CACHE = """
import os
names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY", "OMP_WAIT_POLICY")
for name in names:
    os.environ.pop(name, None)
import specdemo, app, specdemo.__main__
print([os.environ.get(name) for name in names])
specdemo.set_environment_defaults()
print([os.environ.get(name) for name in names])
"""


@pytest.mark.slow
def test_only_programs_limit_the_kernel_cache_and_wait_passively() -> None:
    assert in_new_process(KERNEL_CACHE).splitlines() == ["[None, None, None]", "['128', '128', 'PASSIVE']"]
    assert all("set_environment_defaults()" in (ROOT / path).read_text() for path in ("app.py", "specdemo/__main__.py"))


@pytest.mark.slow
def test_the_docstring_examples_run() -> None:
    result = doctest.testmod(specdemo)
    assert result.attempted >= 5 and result.failed == 0


@pytest.mark.slow
def test_the_examples_of_the_library_document_run() -> None:
    path = ROOT / "docs" / "library.md"
    result = doctest.testfile(str(path), module_relative=False)
    assert result.attempted >= 10 and result.failed == 0
    assert path.stat().st_size <= 7000


@pytest.mark.slow
def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    kinds = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert kinds[0] == "plain" and {"correction", "bonus"} & set(kinds)
