"""External traces: valid ones are shown and exported unchanged, others are refused in a sentence."""

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from fakes.page import figure_of
from fakes.properties import changed, holds_for
from fakes.traces import PREFILL, REJECTION, arbitrary_traces, header, jsonl
from hypothesis import strategies as st

from specdemo.core import trace
from specdemo.core.errors import UserError
from specdemo.ui.frames import read_traces
from specdemo.ui.lane import SPEC
from specdemo.ui.run_store import RunStore
from specdemo.ui.tabs import edge
from specdemo.ui.tabs.theory import (
    THEORY_PLOTS,
    Coefficients,
    call_timeline,
    describe_run,
    figures_by_gamma,
    point_of,
    slider_values,
)

pytestmark = pytest.mark.slow

LINES = (header(), PREFILL, REJECTION)


def test_trace_without_end_is_cancelled() -> None:
    run = read_traces(jsonl(*LINES))
    assert run.over and run.phase == ("done", "recorded trace, 3 tokens, truncated")
    assert json.loads(run.trace(SPEC).splitlines()[-1])["end"] == "cancelled"


def test_other_values_than_texts_are_refused() -> None:
    with pytest.raises(UserError, match="must be text"):
        read_traces(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("item", ["[],", "{},", "1,", '"",', "[[]],"])
def test_many_small_values_are_refused_before_parsing(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty lists take 28 times the memory of their text."""
    monkeypatch.setattr("json.loads", None)
    large = jsonl(header())[:-2] + f', "x": [{item * 700_000}0]}}'
    with pytest.raises(UserError, match="line 1 has (more than 500,000 values|.* characters)"):
        read_traces(large)
    with pytest.raises(UserError, match="line 1 has .* characters: at most 4,000,000"):
        read_traces('{"specdemo": 1, "prompt": "' + "x" * 4_000_000)


def test_the_first_wrong_line_ends_the_parsing() -> None:
    """A million objects take no memory."""
    lines = "{}\n" * 1_000_000
    tracemalloc.start()
    with pytest.raises(UserError, match="line 1 is not a header"):
        read_traces(lines)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# --- properties: valid traces are exported unchanged; every trace is refused or displayed -----------------------------


def events(read: trace.Trace) -> list[Any]:
    return [event for event in (read.header, *read.steps, read.end) if event is not None]


def display(given: str) -> dict[str, Any]:
    """Open a trace on the page and call every view of it; return the frame."""
    store = RunStore()
    frame: dict[str, Any] = json.loads(store.import_trace(given))
    if "refused" in frame:
        assert frame["refused"].isprintable() and len(frame["refused"]) < 600
        return frame
    assert frame["over"]
    run = store.get(frame["run"])
    for name in frame["plan"]:
        assert run.trace(name)
        if calls := call_timeline([run.lanes[name]], 0, 10):
            figure_of(calls)
    with suppress(UserError):  # no step over a link, or no verified draft
        lane = edge.edge_lane(run)
        steps = edge.lane_steps(lane)
        edge.step_measurements(steps)
        if timeline := edge.step_timeline(steps, 0, 10):  # empty without durations
            figure_of(timeline)
        edge.describe_link(lane)
        edge.describe_traffic(lane)
        link = edge.link_of(lane)
        figure_of(edge.speed_chart(link))
        edge.describe_best_gamma(link)
    with suppress(UserError):  # no draft token was tested
        point = point_of(run)
        describe_run(point)
        figures_by_gamma(Coefficients(), point)
        slider_values(point.coefficients)
        for name, plot in THEORY_PLOTS.items():
            figure_of(plot.chart(name, Coefficients(), point))
    return frame


@holds_for(15, lines=arbitrary_traces())
def test_valid_traces_are_read_and_written_unchanged(lines: list[Any]) -> None:
    first = trace.read(jsonl(*lines))
    written = "".join(trace.write(event) for read in first for event in events(read))
    again = trace.read(written)
    assert [events(read) for read in again] == [events(read) for read in first]
    assert written == "".join(trace.write(event) for read in again for event in events(read))


@holds_for(12, lines=arbitrary_traces())
def test_valid_traces_are_displayed(lines: list[Any]) -> None:
    assert "refused" not in display(jsonl(*lines))


@holds_for(15, lines=arbitrary_traces().flatmap(changed))
def test_changed_traces_are_refused_or_displayed(lines: Any) -> None:
    display(jsonl(*(json_only(lines) if isinstance(lines, list) else [json_only(lines)])))


@holds_for(20, lines=arbitrary_traces(), cut=st.integers(0, 10_000), new=st.text(max_size=3), removed=st.integers(0, 3))
def test_damaged_texts_are_refused_or_displayed(lines: list[Any], cut: int, new: str, removed: int) -> None:
    valid = jsonl(*lines)
    cut %= len(valid)
    display(valid[:cut] + new + valid[cut + removed :])


@holds_for(40, given=st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_arbitrary_texts_are_refused(given: str) -> None:
    with pytest.raises(UserError):
        trace.read(given)


def json_only(value: Any) -> Any:
    """Replace bytes, which JSON lacks."""
    return json.loads(json.dumps(value, default=lambda data: data.decode("latin-1")))
