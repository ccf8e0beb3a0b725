"""Frames sent to the page equal the trace. No browser, gradio or model."""

import json

import pytest
from fakes.trace_lines import events_of
from fakes.trace_records import ALL_KEPT, PREFILL, REJECTION, absorb, end, header, step, whole

from specdemo.ui import frames
from specdemo.ui.frames import Run
from specdemo.ui.lane import PLAIN, SPEC
from specdemo.ui.run_store import RunStore
from specdemo.ui.text_comparison import compare_texts


def test_stopped_run_ends_its_trace_as_cancelled() -> None:
    run = Run((SPEC, PLAIN))
    absorb(run, SPEC, header(), PREFILL, REJECTION)
    run.finish()
    last = json.loads(run.trace(SPEC).splitlines()[-1])
    assert last["end"] == "cancelled" and last["metrics"]["tokens"] == 3
    assert run.phase == ("stopped", "3 tokens") and run.trace(PLAIN) is None
    before = run.trace(SPEC)
    run.finish("too late")
    assert run.trace(SPEC) == before and run.phase[0] == "stopped"


def test_a_run_is_done_when_its_summary_is() -> None:
    run = Run()
    absorb(run, SPEC, header(), PREFILL, end())
    assert run.phase[0] == "done" and json.loads(run.frame(0))["phase"][0] == "decoding"
    run.finish()
    assert json.loads(run.frame(0))["phase"] == [*run.phase] and run.phase[0] == "done"


def test_a_frame_during_the_end_of_a_run_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary is computed by another thread, which may end the run while a frame is written."""
    run = whole(Run((SPEC,)))
    monkeypatch.setattr(frames, "tiles", lambda lanes, speeds: run.finish() or {})
    for over, phase in ((False, "decoding"), (True, "done")):
        frame = json.loads(run.frame(0))
        assert frame["over"] == over and frame["phase"][0] == phase


@pytest.mark.parametrize("events", [(), (header(), PREFILL)])
def test_failure_is_shown_and_closes_the_trace(events: tuple) -> None:
    run = Run()
    absorb(run, SPEC, *events)
    run.finish("out of memory")
    assert run.phase == ("failed", "out of memory") and json.loads(run.frame(0))["over"]
    if events:
        assert json.loads(run.trace(SPEC).splitlines()[-1])["error"] == "out of memory"


def plain_steps(seconds: float) -> tuple:
    tokens = [0, 100, 101, 200, 201, 202]
    return tuple(
        step(i, pieces=["x"], tokens=[token], token=token, draft_s=0.0, verify_s=seconds)
        for i, token in enumerate(tokens)
    )


def probs(*top: tuple[int, float]) -> dict:
    return {"entropy": 0.5, "top": [list(pair) for pair in top]}


@pytest.mark.parametrize(
    ("p", "q", "tone", "words"),
    [
        (0.4001, 0.4, "even", "'b' 0.4001 and 'z' 0.4000: rounding decided a near-tie"),
        (0.8, 0.1, "bad", "this is an error, not a near-tie"),
        (1.0, 0.0, "bad", "this is an error, not a near-tie"),
    ],
)
def test_near_tie_at_the_first_difference_is_reported(p: float, q: float, tone: str, words: str) -> None:
    run = Run((SPEC, PLAIN))
    distributions = {"laws": [probs((100, p), (999, q))] + [probs((1, 1.0))] * 3, "texts": {100: "b", 999: "z"}}
    for lane, line in ((SPEC, REJECTION | distributions), (PLAIN, step(1, pieces=["z"], tokens=[999]))):
        absorb(run, lane, header(bit_equal=False), PREFILL, line, end())
    compared = compare_texts(run.lanes[SPEC], run.lanes[PLAIN])
    assert compared.tone == tone and words in compared.why


def repeated(*ar_seconds: float) -> Run:
    """Comparison of a pair per AR step time; the speculative lane always takes 0.03 s per step."""
    run = Run((SPEC, PLAIN), pairs=len(ar_seconds))
    for seconds in ar_seconds:
        for lane, lines in ((SPEC, (PREFILL, REJECTION, ALL_KEPT)), (PLAIN, plain_steps(seconds))):
            for event in events_of((header("ar" if lane == PLAIN else "draft"), *lines, end())):
                run.absorb(lane, event)
    return run


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [
        ((0.024, 0.018, 0.03), "2.0× faster with drafts, 1.50 to 2.50 in 3 pairs: 3 alternating pairs."),
        ((0.024, 0.018, 0.013, 0.024, 0.03), "2.0× faster with drafts, 1.08 to 2.50 in all 5 pairs"),
        ((0.010, 0.007, 0.008, 0.011, 0.0115), "0.8× the speed, slower with drafts, 0.58 to 0.96 in all 5 pairs"),
        ((0.013, 0.011, 0.0125, 0.02, 0.03), "No clear difference: 1.1×, 0.92 to 2.50 in all 5 pairs"),
        ((0.013, 0.011, 0.02), "No clear difference: 1.1×, 0.92 to 1.67 in 3 pairs"),
    ],
)
def test_the_result_of_repetitions_follows_from_the_paired_ratios(seconds: tuple[float, ...], outcome: str) -> None:
    run = repeated(*seconds)
    assert run.phase == ("done", f"6 tokens, token limit reached, {len(seconds)} pairs")
    run.finish()
    frame = json.loads(run.frame(0))
    assert len(frame["r"]) == 4 + 7, "only the first pair is shown"
    assert frame["verdict"].startswith(outcome)
    suggestion = {"label": "Turn speculation off", "set": {"method": "ar"}}
    assert (frame["headline"]["suggestions"] == [suggestion]) == ("slower" in outcome)
    for cell in (frame["tiles"]["speedup"][1], frame["table"][1][2]):
        assert f"median of {len(seconds)} pairs" in cell


def test_impossible_pairs_are_left_out() -> None:
    """A pass gives 2.5 tokens, so a pair that is 4.6 times as fast was disturbed."""
    run = repeated(0.024, 0.018, 0.055, 0.013, 0.024, 0.024)
    run.finish()
    verdict = json.loads(run.frame(0))["verdict"]
    assert "5 of 6 alternating pairs" in verdict and "contradict the number of passes" in verdict


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_a_stopped_text_that_begins_the_other_does_not_differ(reason: str) -> None:
    run = whole(Run((SPEC, PLAIN)))
    absorb(run, PLAIN, header("ar"), *plain_steps(0.01)[:3], end(reason))
    run.finish()
    assert compare_texts(run.lanes[SPEC], run.lanes[PLAIN]).badge == "same so far"
    other = whole(Run((SPEC, PLAIN)))
    absorb(other, PLAIN, header("ar"), *plain_steps(0.01)[1:3], end(reason))
    assert compare_texts(other.lanes[SPEC], other.lanes[PLAIN]).badge == "differs at token 1"


def test_run_store_evicts_the_least_recently_used_finished_run() -> None:
    runs = RunStore(per_network=3)
    first, second, third = (runs.new(f"session {i}", (SPEC,)) for i in range(3))
    for run in (second, third):
        run.finish()
    assert runs.get(first.id) is first and runs.get(second.id) is second
    fourth = runs.new("session 3", (SPEC,))
    assert len(runs) == 3 and runs.get(third.id) is None
    assert all(runs.get(run.id) is run for run in (first, second, fourth))


def finished() -> Run:
    run = whole(Run())
    run.finish()
    return run


def test_run_store_is_bounded_in_characters() -> None:
    first, second = finished(), finished()
    runs = RunStore(max_characters=first.size + second.size + 8_000)
    assert first.size >= len(first.trace(SPEC)) + sum(len(record.text) - len(record.line) for record in first.records)
    runs.keep(first)
    runs.keep(second)
    assert runs.get(first.id) is None and runs.get(second.id) is second


def test_other_visitors_evict_neither_active_runs_nor_finished_ones_of_modest_visitors() -> None:
    size = finished().size + 4_000
    runs, stopped = RunStore(max_characters=20 * size), []
    active = runs.new("victim", (SPEC,), "192.0.2.1")
    active.stop = lambda: stopped.append(True)
    kept = finished()
    runs.keep(kept, "192.0.2.1")
    for i in range(70):
        runs.keep(finished(), "192.0.2.2")
        runs.keep(finished(), f"198.51.100.{i % 2}")
    assert runs.get(kept.id) is kept and len(runs) <= 20
    runs.stop_run(active.id)
    assert stopped
