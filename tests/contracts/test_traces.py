"""Traces of each method, compared key by key and value by value; recorded traces can still be imported."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from . import traces
from .dom import golden
from .interfaces import OLD_TRACES

pytestmark = pytest.mark.slow


def lines(text: str) -> list[dict[str, Any]]:
    return list(map(json.loads, text.splitlines()))


@pytest.mark.parametrize("name", traces.RUNS)
def test_a_trace_is_as_recorded(name: str, programs: Any) -> None:
    models, _, _ = programs
    found = traces.differences(lines(golden(name)), traces.record(models, traces.RUNS[name]))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", [*traces.RUNS, *(path.stem for path in sorted(OLD_TRACES.glob("*.jsonl")))])
def test_a_recorded_trace_can_be_imported(name: str, programs: Any) -> None:
    _, _, page = programs
    text = golden(name) if name in traces.RUNS else (OLD_TRACES / f"{name}.jsonl").read_text("utf-8")
    frame = json.loads(page.call("import_trace", text))
    assert "refused" not in frame, frame
    assert frame["over"] and sum("i" in record for record in frame["r"]) == sum("i" in line for line in lines(text))


def test_a_changed_trace_is_found() -> None:
    recorded = lines(golden("draft"))
    changed = copy.deepcopy(recorded)
    changed[1]["new"] = 1
    changed[2]["p"] = [value * (1 + 1e-6) for value in changed[2]["p"]]
    assert not traces.differences(recorded, changed)
    changed[2]["p"][0] += 0.01
    changed[3]["drawn"] = changed[3].pop("draw")
    found = traces.differences(recorded, changed)
    assert len(found) == 2 and "[2].p[0]" in found[0] and found[1] == "[3].draw is missing"
