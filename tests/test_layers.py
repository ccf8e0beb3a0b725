"""The rooms of the house: who may import whom (read from the source, nothing is imported here)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A folder or root module may import itself and every line above its own, never a neighbour on the same line.
ORDER = (
    {"core", "worker"},
    {"models", "drafters"},
    {"remote"},
    {"recipe", "prompts"},
    {"pipeline"},
    {"generate"},
    {"bench"},
    {"preflight"},
    {"cli", "ui"},
    {"__main__", "app"},
)
MAY = {room: set().union(*ORDER[:level]) for level, rooms in enumerate(ORDER) for room in rooms}
MAY["drafters"] = {"core"}

# What is heavy or fast-moving stays behind one door.
DOORS = {
    "transformers": ("specdemo/models/", "specdemo/bench/baselines.py"),
    "bitsandbytes": ("specdemo/models/", "specdemo/bench/baselines.py"),
    "tokenizers": ("specdemo/models/", "specdemo/bench/baselines.py"),
    "msgpack": ("specdemo/remote/protocol.py", "benchmarks/fuzz_hooks.py"),
    "fastapi": ("specdemo/remote/",),
    "starlette": (
        "specdemo/remote/",
        "specdemo/ui/health.py",
        "specdemo/ui/websocket.py",
        "specdemo/ui/still.py",
        "specdemo/ui/theme.py",
    ),
    "uvicorn": ("specdemo/remote/",),
    "httpcore": ("specdemo/remote/",),
    "pydantic": ("specdemo/remote/", "specdemo/core/trace.py"),
    "gradio": (
        "specdemo/ui/page.py",
        "specdemo/ui/controls.py",
        "specdemo/ui/theme.py",
        "specdemo/ui/api.py",
        "specdemo/ui/cockpit/",
        "specdemo/ui/tabs/",
    ),
}
NO_TORCH = tuple(
    f"specdemo/core/{name}.py" for name in ("decode", "step", "events", "trace", "explain", "metrics", "theory")
)

Sources = Mapping[str, str]  # path from the root -> source text


def sources() -> Sources:
    """The program's own modules."""
    paths = [*(ROOT / "specdemo").rglob("*.py"), *ROOT.glob("app.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room(module: str) -> str:
    """specdemo.core.step -> core; specdemo -> ""; app -> app."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "specdemo" else first


def imports(path: str, source: str, ours: set[str]) -> Iterator[str]:
    """Every module that this one names in an import, wherever in the file it stands."""
    package = module_name(path).split(".") if path.endswith("/__init__.py") else module_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:  # from specdemo.core import step: the module is step
                inner = f"{base}.{alias.name}"
                yield inner if inner in ours or base == "specdemo" else base


def violations(sources: Sources) -> list[str]:
    """One line per import that the table forbids, per forbidden name, and per circle."""
    found = []
    ours = set(map(module_name, sources))
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        module = module_name(path)
        home = room(module)
        if home and home not in MAY:
            found.append(f"{path}: the room '{home}' is not in the table")
            continue
        if path.endswith("utils.py"):
            found.append(f"{path}: a name that says nothing")
        graph[module] = set()
        for name in sorted(set(imports(path, source, ours))):
            top = name.partition(".")[0]
            if top in ("training", "benchmarks"):
                found.append(f"{path}: imports {name}")
            elif top in ("specdemo", "app"):
                graph[module].add(name)
                if room(name) not in {"", home, *MAY.get(home, ())}:
                    found.append(f"{path}: imports {name}")
            elif not path.startswith(DOORS.get(top, "")) or (top == "torch" and path in NO_TORCH):
                found.append(f"{path}: imports {name}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("circle: " + " <- ".join(error.args[1]))
    return found


def test_imports_run_downhill_without_circles():
    assert violations(sources()) == []


def test_the_rooms_are_really_read():
    read = sources()
    names = {path: set(imports(path, source, set(map(module_name, read)))) for path, source in read.items()}
    assert "specdemo.core.step" in names["specdemo/core/decode.py"]
    assert "torch" in names["specdemo/core/rules.py"]


GOOD = {
    "specdemo/__init__.py": "",
    "specdemo/core/__init__.py": "",
    "specdemo/core/step.py": "import json",
    "specdemo/core/decode.py": "from specdemo.core.step import Step",
    "specdemo/models/load.py": "import transformers\nfrom specdemo.core import step",
    "specdemo/drafters/ngram.py": "import specdemo.core.step",
    "specdemo/recipe.py": "from specdemo.drafters.ngram import N\nfrom specdemo.models import load",
    "specdemo/worker.py": "import threading",
    "specdemo/ui/page.py": "import gradio as gr\nfrom specdemo import worker, recipe",
    "app.py": "from specdemo.ui import page",
}


def test_a_good_house_passes():
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("specdemo/core/step.py", "import transformers", "specdemo/core/step.py: imports transformers"),
        ("specdemo/core/step.py", "import gradio", "specdemo/core/step.py: imports gradio"),
        ("specdemo/core/decode.py", "from torch import Tensor", "specdemo/core/decode.py: imports torch"),
        ("specdemo/core/step.py", "from specdemo import models", "specdemo/core/step.py: imports specdemo.models"),
        (
            "specdemo/core/step.py",
            "from ..drafters import ngram",
            "specdemo/core/step.py: imports specdemo.drafters.ngram",
        ),
        (
            "specdemo/core/decode.py",
            "def late():\n    from specdemo.models.load import load",
            "specdemo/core/decode.py: imports specdemo.models.load",
        ),
        (
            "specdemo/drafters/ngram.py",
            "from specdemo.models import load",
            "specdemo/drafters/ngram.py: imports specdemo.models.load",
        ),
        (
            "specdemo/models/load.py",
            "import specdemo.drafters.ngram",
            "specdemo/models/load.py: imports specdemo.drafters.ngram",
        ),
        (
            "specdemo/drafters/ngram.py",
            "from tokenizers import Tokenizer",
            "specdemo/drafters/ngram.py: imports tokenizers",
        ),
        ("specdemo/recipe.py", "from specdemo.ui.page import build", "specdemo/recipe.py: imports specdemo.ui.page"),
        ("specdemo/worker.py", "from specdemo.core.step import Step", "specdemo/worker.py: imports specdemo.core.step"),
        ("specdemo/ui/cockpit.py", "import gradio.components", "specdemo/ui/cockpit.py: imports gradio.components"),
        ("specdemo/ui/page.py", "import training", "specdemo/ui/page.py: imports training"),
        ("specdemo/ui/page.py", "import app", "specdemo/ui/page.py: imports app"),
        ("app.py", "import bitsandbytes", "app.py: imports bitsandbytes"),
        ("specdemo/helpers.py", "", "specdemo/helpers.py: the room 'helpers' is not in the table"),
        ("specdemo/core/utils.py", "", "specdemo/core/utils.py: a name that says nothing"),
    ],
)
def test_a_bad_import_is_caught(path, line, complaint):
    found = violations({**GOOD, path: f"{GOOD.get(path, '')}\n{line}"})
    assert [what for what in found if not what.startswith("circle")] == [complaint]


def test_a_circle_within_a_room_is_caught():
    bad = {**GOOD, "specdemo/core/step.py": "from specdemo.core.decode import decode"}
    assert [line.partition(":")[0] for line in violations(bad)] == ["circle"]
