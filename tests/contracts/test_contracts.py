"""Golden names and traces of the running program.

External names may be added, never removed: flags, keys, fields, routes, elements. Traces are compared key by key and
value by value, and recorded traces can still be imported. One file, because its tests share a page and a service.
After an intended addition: `python tests/contracts/interfaces.py --write`.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from . import names, traces
from .interfaces import NAMES, OLD_TRACES, Page, Service, started

pytestmark = pytest.mark.slow

GOLDEN = json.loads(NAMES.read_text("utf-8"))


@pytest.fixture(scope="module")
def programs() -> Iterator[tuple[tuple[str, str], Service, Page]]:
    with started() as running:
        yield running


def test_every_section_is_compared() -> None:
    assert GOLDEN.keys() == names.SECTIONS.keys()


@pytest.mark.parametrize("section", names.SECTIONS)
def test_no_external_name_is_lost(section: str, programs: Any) -> None:
    lost = names.missing(GOLDEN[section], names.SECTIONS[section](*programs))
    assert not lost, "\n".join(lost)


def test_a_lost_name_is_found() -> None:
    golden = {"a": ["x", "y"], "b": {"c": {}, "d": "value"}}
    assert not names.missing(golden, {"a": ["y", "x", "z"], "b": {"c": {}, "d": "value", "e": 1}, "f": 1})
    assert names.missing(golden, {"a": ["x"], "b": {"d": "switch"}}) == [
        "/a/y",
        "/b/c",
        "/b/d is 'switch', not 'value'",
    ]


def lines(text: str) -> list[dict[str, Any]]:
    return list(map(json.loads, text.splitlines()))


@pytest.mark.parametrize("name", traces.RUNS)
def test_a_trace_is_as_recorded(name: str, programs: Any) -> None:
    models, _, _ = programs
    found = traces.differences(lines(traces.golden_traces()[name]), traces.record(models, traces.RUNS[name]))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", [*traces.RUNS, *(path.stem for path in sorted(OLD_TRACES.glob("*.jsonl")))])
def test_a_recorded_trace_can_be_imported(name: str, programs: Any) -> None:
    _, _, page = programs
    text = traces.golden_traces()[name] if name in traces.RUNS else (OLD_TRACES / f"{name}.jsonl").read_text("utf-8")
    frame = page.open_trace(text)
    assert "refused" not in frame, frame
    assert frame["over"] and sum("step" in record for record in frame["r"]) == sum("i" in line for line in lines(text))


def test_a_changed_trace_is_found() -> None:
    recorded = lines(traces.golden_traces()["draft"])
    changed = copy.deepcopy(recorded)
    changed[1]["new"] = 1
    changed[2]["p"] = [value * (1 + 1e-6) for value in changed[2]["p"]]
    assert not traces.differences(recorded, changed)
    changed[2]["p"][0] += 0.01
    changed[3]["drawn"] = changed[3].pop("draw")
    found = traces.differences(recorded, changed)
    assert len(found) == 2 and "[2].p[0]" in found[0] and found[1] == "[3].draw is missing"
