"""Rules are described by their registry entry only: no other module contains a rule's name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdemo.core.rules import RULES

PROGRAM = Path(__file__).parents[2] / "specdemo"
REGISTRY = "core/rules.py"
ALLOWED = {
    ("core/trace.py", "rejection"),  # frozen default of the format
    ("remote/protocol.py", "rejection"),  # frozen default of the format
    ("ui/lessons/__init__.py", "ratio"),  # a figure of a lesson
    ("ui/step_views.py", "block"),  # a kind of decision in the step player
    *((f"{path}.py", "block") for path in ("drafters/heads/block", "models/engines/torch_dflash")),  # a method
    ("drafters/heads/medusa.py", "typical"),  # the rule of the paper
    ("models/engines/llama_weights.py", "threshold"),  # attribute of a quantised layer
}
ORDINARY = re.compile(rf"\brules?:? `?({'|'.join(RULES)})\b")  # in a sentence, names are recognised after "rule"


def rule_names(path: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield path and name for strings that are or mention a rule, and for functions imported from the registry."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = [node.value] if node.value in RULES else [match[1] for match in ORDINARY.finditer(node.value)]
        elif isinstance(node, ast.ImportFrom) and node.module == "specdemo.core.rules":
            named = [alias.name for alias in node.names if alias.name in RULES]
        else:
            continue
        yield from ((path, name) for name in named)


def test_no_rule_is_named_outside_the_registry() -> None:
    named = set()
    for path in PROGRAM.rglob("*.py"):
        if (name := path.relative_to(PROGRAM).as_posix()) != REGISTRY:
            named.update(rule_names(name, path.read_text("utf-8")))
    assert named == ALLOWED


@pytest.mark.parametrize(
    "line",
    ['recipe.get("rule") == "coupled"', 'error = "choose rule rejection"', "from specdemo.core.rules import top1"],
)
def test_a_rule_name_is_detected(line: str) -> None:
    assert len(list(rule_names("ui/lane.py", line))) == 1
