"""Import layers, checked in the source without importing it."""

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A folder or root module may import itself and all lines above, but not others on the same line.
ORDER = (
    {"native", "shared_passes"},
    {"worker"},
    {"core"},
    {"background", "signals"},
    {"models", "drafters"},
    {"remote"},
    {"external"},
    {"option_rules"},
    {"recipe", "prompts"},
    {"pipeline"},
    {"generate"},
    {"bench", "completions"},
    {"preflight"},
    {"fit"},
    {"cli", "ui"},
    {"__main__", "app"},
)
ALLOWED = {layer: set().union(*ORDER[:level]) for level, layers in enumerate(ORDER) for layer in layers}
ALLOWED["drafters"] = {"core"}

# Heavy or fast-changing packages are imported in few places.
PACKAGES = {
    "transformers": ("specdemo/models/", "specdemo/bench/measure.py", "specdemo/generate.py"),
    "bitsandbytes": ("specdemo/models/", "specdemo/bench/measure.py"),
    "gguf": ("specdemo/models/",),
    "tokenizers": ("specdemo/models/", "specdemo/bench/measure.py"),
    "msgpack": ("specdemo/remote/protocol.py",),
    "fastapi": ("specdemo/remote/", "specdemo/completions/routes.py", "specdemo/cli/serve.py"),
    "ray": ("specdemo/cli/ray_serve.py",),
    "starlette": (
        "specdemo/remote/",
        "specdemo/ui/documents/",
        "specdemo/ui/gateway.py",
        "specdemo/ui/page_files.py",
        "specdemo/ui/runs.py",
        "specdemo/ui/service.py",
    ),
    "markdown_it": ("specdemo/ui/documents/",),
    "uvicorn": ("specdemo/remote/",),
    "httpcore": ("specdemo/remote/", "specdemo/external/client.py"),
    "pydantic": (
        "specdemo/core/errors.py",
        "specdemo/core/options.py",
        "specdemo/remote/",
        "specdemo/completions/",
        "specdemo/external/",
        "specdemo/core/trace.py",
        "specdemo/core/step_record.py",
        "specdemo/ui/runs.py",
    ),
    "gradio": (
        "specdemo/ui/page.py",
        "specdemo/ui/settings_form.py",
        "specdemo/ui/theme.py",
        "specdemo/ui/api.py",
        "specdemo/ui/runs.py",
        "specdemo/ui/documents/",
        "specdemo/ui/lessons/",
        "specdemo/ui/tabs/",
    ),
}
NO_TORCH = tuple(
    f"specdemo/core/{name}.py"
    for name in (
        *("decode", "step", "events", "trace", "step_record"),
        *("explain", "metrics", "theory"),
    )
)

Sources = Mapping[str, str]  # path from the root -> source text


def sources() -> Sources:
    """Source text of app.py and specdemo/."""
    paths = [*(ROOT / "specdemo").rglob("*.py"), *ROOT.glob("app.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def layer_of(module: str) -> str:
    """specdemo.core.step -> core; specdemo -> ""; app -> app."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "specdemo" else first


def imports(path: str, source: str, known: set[str]) -> Iterator[str]:
    """All modules imported by this file, at any level."""
    package = module_name(path).split(".") if path.endswith("/__init__.py") else module_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:  # from specdemo.core import step: the module is step
                inner = f"{base}.{alias.name}"
                yield inner if inner in known else base


def violations(sources: Sources) -> list[str]:
    """List forbidden imports, forbidden file names and cycles, one per line."""
    problems = []
    known = {name for path in sources for name in accumulate(module_name(path).split("."), "{}.{}".format)}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        module = module_name(path)
        layer = layer_of(module)
        if layer and layer not in ALLOWED:
            problems.append(f"{path}: the layer '{layer}' is not in the table")
            continue
        if path.endswith("utils.py"):
            problems.append(f"{path}: an uninformative name")
        graph[module] = set()
        for name in sorted(set(imports(path, source, known))):
            top = name.partition(".")[0]
            if top in ("training", "benchmarks"):
                problems.append(f"{path}: imports {name}")
            elif top in ("specdemo", "app"):
                graph[module].add(name)
                if layer_of(name) not in {"", layer, *ALLOWED.get(layer, ())}:
                    problems.append(f"{path}: imports {name}")
            elif not path.startswith(PACKAGES.get(top, "")) or (top == "torch" and path in NO_TORCH):
                problems.append(f"{path}: imports {name}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        problems.append("cycle: " + " <- ".join(error.args[1]))
    return problems


def test_imports_follow_the_layers_without_cycles():
    assert violations(sources()) == []


def test_violations_are_found():
    files = {
        "specdemo/core/step.py": "from .decode import decode\nfrom ..drafters import ngram",
        "specdemo/core/decode.py": "import specdemo.core.step, torch",
        "specdemo/drafters/ngram.py": "def late():\n    from specdemo.models.load import load",
        "specdemo/models/load.py": "import transformers",
        "specdemo/helpers.py": "",
    }
    *problems, cycle = violations(files)
    assert cycle.startswith("cycle: specdemo.core")
    assert problems == [
        "specdemo/core/step.py: imports specdemo.drafters.ngram",
        "specdemo/core/decode.py: imports torch",
        "specdemo/drafters/ngram.py: imports specdemo.models.load",
        "specdemo/helpers.py: the layer 'helpers' is not in the table",
    ]


C_COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|"[^"\n]*"', re.DOTALL)
C_FUNCTION = re.compile(r"^(?!static\b)[a-z][\w *]*\b(\w+)\([^;{}]*\) *\{", re.MULTILINE)


def calls_between_c_files(sources: Sources) -> dict[str, set[str]]:
    """Return the files that define the functions each file calls; static functions are not followed."""
    texts = {name: C_COMMENT.sub("", source) for name, source in sources.items()}
    owners = {function: name for name, text in texts.items() for function in C_FUNCTION.findall(text)}
    return {
        name: {owners[word] for word in re.findall(r"\b(\w+)\(", text) if owners.get(word, name) != name}
        for name, text in texts.items()
    }


def test_calls_between_c_files_have_no_cycles():
    paths = (ROOT / "specdemo" / "native").glob("*.c")
    calls = calls_between_c_files({path.name: path.read_text("utf-8") for path in paths})
    assert "state.c" in calls["pass.c"]
    TopologicalSorter(calls).prepare()
    cycle = {
        "check.c": "int check_pass(const pass *p) {\n    return lay_out(p).rows;\n}",
        "state.c": "state lay_out(const pass *p) {\n    check_pass(p);\n}\nstatic int held(void) {\n}",
        "rows.c": "/* check_pass(p) */ void enter(state *s) {\n    held();\n}",
    }
    assert calls_between_c_files(cycle) == {"check.c": {"state.c"}, "state.c": {"check.c"}, "rows.c": set()}


def test_no_test_imports_another_test_file():
    """Shared helpers belong in `tests/fakes` or a conftest."""
    importing = re.compile(r"^\s*(?:from|import) .*\btest_\w+", re.MULTILINE)
    paths = [path for path in (ROOT / "tests").rglob("*.py") if importing.search(path.read_text("utf-8"))]
    assert paths == [] and importing.search("from core.test_step import step_of")
