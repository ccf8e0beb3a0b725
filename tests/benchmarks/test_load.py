"""Load test: figures of known frames."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from benchmarks.batching import Measured, TimedText, alternated, compared, visitor_figures
from benchmarks.load import Streamed, Visit, endpoint_figures, jain_index, visit

pytestmark = pytest.mark.slow


def frame(at: int, phase: tuple[str, str], *records: dict[str, Any], over: bool = False) -> str:
    return json.dumps({"at": at, "phase": phase, "r": records, "over": over})


def cells(*tokens: int, rejected: int | None = None) -> dict[str, Any]:
    kinds = [["accepted", "x", token] for token in tokens]
    return {"l": "spec", "c": [*kinds, *([["rejected", "y", rejected]] if rejected is not None else [])]}


FRAMES = [
    frame(0, ("queued", "2 ahead")),
    frame(0, ("queued", "1 ahead, about 3 s")),
    frame(0, ("prefill", ""), {"l": "spec", "head": {}}),
    frame(1, ("decoding", ""), cells(1, 2, rejected=9)),
    frame(2, ("done", "3 tokens"), cells(3), over=True),
]


def test_a_visit_contains_tokens_phases_and_times() -> None:
    seen = visit(FRAMES, count(0.0, 1.0))
    assert seen.tokens == [1, 2, 3] and seen.first_token_s == 3.0 and seen.gaps == 0
    assert seen.done


def test_lost_frames_and_failures_are_found() -> None:
    assert visit([FRAMES[0], FRAMES[3], FRAMES[4]], count(0.0, 1.0)).gaps == 1
    assert not visit(FRAMES[:-1], count(0.0, 1.0)).over
    failed = visit([frame(0, ("failed", "busy"), over=True)], count(0.0, 1.0))
    assert failed.over and not failed.done and failed.first_token_s is None


def test_the_fairness_of_shares() -> None:
    assert jain_index([3, 3, 3]) == 1 and jain_index([6, 0, 0]) == pytest.approx(1 / 3) and jain_index([0, 0]) == 1


def test_the_record_counts_lost_mixed_and_failed_runs() -> None:
    good, lost = visit(FRAMES, count(0.0, 1.0)), visit(FRAMES[:-1], count(0.0, 1.0))
    failed = Visit(phases=[("failed", "busy")], over=True)
    record = visitor_figures([[(good, 0), (good, 1)], [(lost, 0), (failed, 0)]], [[1, 2, 3], [1, 2, 4]])
    assert (record["runs"], record["lost"], record["wrong"], record["failed"]) == (4, 1, 1, 1)
    assert record["fairness"] == pytest.approx(0.5) and record["p95_s"] == 3.0


STREAM = [
    'data: {"choices": [{"token_ids": [1]}]}',
    "",
    'data: {"choices": [{"token_ids": [2, 3]}]}',
    'data: {"choices": [{}]}',
    'data: {"choices": []}',
    "data: [DONE]",
]


def test_the_time_of_a_chunk_is_shared_by_its_tokens() -> None:
    text = Streamed.of(STREAM, count(1.0, 1.0))
    assert (text.tokens, text.first_s, text.token_s) == ([1, 2, 3], 1.0, [0.5, 0.5])
    record = endpoint_figures([(text, 0), (text, 1)], [[1, 2, 3], [1, 2]], clients=2, seconds=3.0)
    assert (record["texts"], record["wrong"], record["tokens_per_second"]) == (2, 1, 2.0)
    assert (record["first_p50_s"], record["token_p95_ms"]) == (1.0, 500.0)


def test_tokens_of_a_text_count_within_the_measured_time() -> None:
    text = TimedText([1, 2, 3, 4], prompt=0, start=10.0, first_s=1.0, end=14.0, client=0)
    assert [text.tokens_between(*bounds) for bounds in ((0, 20), (12, 20), (11, 12), (20, 30))] == [4, 2, 1, 0]
    other = TimedText([1, 2], prompt=1, start=0.0, first_s=3.0, end=4.0, client=1)
    measured = Measured.of([text, other], 7.0, [[1, 2, 3, 4], [1, 5]])
    assert measured == Measured(7.0, 3.0, 3.0, fairness=0.9, texts=2, wrong=1)


def test_modes_of_batching_alternate_and_are_compared_by_window() -> None:
    speeds = {"off": [10.0, 20.0, 40.0], "on": [20.0, 30.0, 40.0]}
    order = []

    def measure(mode: str) -> Measured:
        speed = speeds[mode][order.count(mode)]
        order.append(mode)
        return Measured(speed, 0.1, 0.2, fairness=1.0, texts=2, wrong=mode == "on")

    row = compared(alternated(measure, 3))
    assert order == ["off", "on", "on", "off", "off", "on"]
    assert (row["ratio"], row["range"]) == (1.5, (1.0, 2.0))  # 2, 1.5 and 1
    assert row["off"]["tokens_per_second"] == 20 and row["on"]["p95_s"] == 0.2
    assert (row["texts"], row["wrong"]) == (12, 3)
