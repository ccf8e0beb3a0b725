"""Timeline of model calls: order, scale, and tokens of each call."""

from typing import Any

import pytest
from fakes.figures import figure_of
from fakes.trace_records import ALL_KEPT, PREFILL, REJECTION, absorb, end, header, step

from specdemo.ui.call_timeline import call_timeline, calls
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC, Lane


def lane(*lines: dict[str, Any], **head: Any) -> Lane:
    run = Run((SPEC,))
    absorb(run, SPEC, header(**head), *lines, end())
    return run.lanes[SPEC]


def test_a_step_is_gamma_drafter_calls_and_a_target_pass() -> None:
    """In order, without overlap, and with the durations of the trace."""
    found = calls(lane(PREFILL, REJECTION, ALL_KEPT))
    assert [call.kind for call in found] == ["prompt", *["draft"] * 3, "target", *["draft"] * 2, "target"]
    for earlier, later in zip(found, found[1:], strict=False):
        assert earlier.start + earlier.duration <= later.start + 1e-6
    for line, drafted in ((REJECTION, found[1:4]), (ALL_KEPT, found[5:7])):
        assert sum(call.duration for call in drafted) == pytest.approx(1000 * line["draft_s"])
        assert len({round(call.duration, 6) for call in drafted}) == 1
    assert found[4].duration == pytest.approx(1000 * REJECTION["verify_s"])
    assert found[4].start + found[4].duration == pytest.approx(1000 * REJECTION["t"])


def test_a_level_of_a_tree_is_a_call_and_drafts_of_a_text_are_none() -> None:
    tree = step(1, pieces=["b", "X"], draft=("a", "b", "c"), accepted=(1,), tested=2) | {"parents": [-1, -1, 1]}
    _, first, second, target = calls(lane(PREFILL, tree))
    assert (first.kind, second.kind, target.kind) == ("draft", "draft", "target")
    assert "'a' rejected, 'b' accepted" in first.words and "'c'" in second.words
    line = step(1, pieces=["b", "X"], draft=("b",), accepted=(0,), q=None, origin=[{"source": "n-gram"}])
    assert [call.kind for call in calls(lane(PREFILL, line))] == ["prompt", "search", "target"]
    assert "encoder and first pass" in calls(lane(PREFILL, encoder=True))[0].words


def test_the_timeline_contains_the_calls_up_to_its_end() -> None:
    line = step(1, pieces=['<b>"', "X"], draft=('<b>"',), accepted=(0,))
    text = call_timeline([lane(PREFILL, line)], 0, 16)
    blocks = figure_of(text)["blocks"]
    assert [block["kind"] for block in blocks] == ["prompt", "draft", "target"] and "<b>" not in text
    assert "'<b>\"' accepted" in blocks[1]["words"]
    (only,) = figure_of(call_timeline([lane(PREFILL, line)], 0, 1))["blocks"]
    assert only["kind"] == "prompt" and only["start"] == 0
