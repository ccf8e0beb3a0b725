"""Runs of the page: ends, results of repetitions, comparison of texts, the store."""

import asyncio
import errno
import gc
import json
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.page import last_frame
from fakes.traces import ALL_KEPT, PREFILL, REJECTION, absorb, end, events_of, header, step, whole
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from specdemo.core.events import Event
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.ui import frames
from specdemo.ui import runs as runs_module
from specdemo.ui.frames import Run, read_traces
from specdemo.ui.lane import BASELINE, SPEC
from specdemo.ui.limits import HostLimits, RunRates
from specdemo.ui.run_store import RunStore
from specdemo.ui.runs import Runs, advance
from specdemo.ui.service import Service
from specdemo.ui.text_comparison import compare_texts
from specdemo.ui.visitors import Visitor
from specdemo.worker import Worker

pytestmark = pytest.mark.slow

LINES = [header(), step(0, pieces=["a"]), step(1, pieces=["b", "c"], draft=("b", "x"), accepted=(0,), tested=2), end()]


def test_a_run_that_nobody_follows_ends_after_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the server passes the grace period when the run has records."""
    run, worker = Run((SPEC,)), Worker()
    run.last_seen = 0.0
    clock = SimpleNamespace(monotonic=lambda: 1.0 if len(run.records) > 2 else 0.0)
    monkeypatch.setattr(runs_module, "time", clock)
    monkeypatch.setattr(runs_module, "GRACE_S", 0.01)

    def job() -> Iterator[tuple[str, Event]]:
        first, following, *_ = events_of(LINES)
        yield SPEC, first
        while True:
            yield SPEC, following

    stream = worker.submit(job)
    run.stop = stream.stop
    try:
        asyncio.run(advance(run, stream))
    finally:
        worker.close()
    assert stream.done and run.over and run.phase[0] == "stopped"


@pytest.mark.parametrize("run_id", ["no-such-run", "%2e%2e"])
def test_unknown_runs_are_rejected(run_id: str) -> None:
    service = Service(ModelPool(), lambda *_: iter(()))
    with TestClient(Starlette(routes=Runs(service, "cpu", {}).routes)) as client:
        with pytest.raises(WebSocketDisconnect), client.websocket_connect(f"/frames/{run_id}"):
            pass
        assert client.get(f"/frames/{run_id}").status_code == client.post(f"/frames/{run_id}").status_code == 404
    service.worker.close()


def test_finished_runs_retain_no_events() -> None:
    """Their traces are text; neither the runs nor the limits of the visitor retain the stream."""
    worker, runs, rates = Worker(), RunStore(), RunRates(HostLimits(at_once=1))
    run = runs.new("one", (SPEC,))
    job = lambda: ((SPEC, event) for event in events_of(LINES))  # noqa: E731
    stream = rates.start("192.0.2.1", lambda: worker.submit(job))
    run.stop = stream.stop
    asyncio.run(advance(run, stream))
    worker.close()
    retained = weakref.ref(stream)
    del stream
    gc.collect()
    assert retained() is None and runs.get(run.id) is run and run.over
    rates.count("192.0.2.1")


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "choose a writable directory")]
)
def test_a_disk_that_cannot_be_written_is_named_on_the_page(code: int, remedy: str) -> None:
    worker, run = Worker(), Run()

    def job() -> Iterator[tuple[str, Event]]:
        raise OSError(code, os.strerror(code))
        yield

    asyncio.run(advance(run, worker.submit(job)))
    assert run.phase == ("failed", f"cannot write to the disk of this host: {os.strerror(code)}: {remedy}")
    worker.close()


# --- frames equal the trace -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "phase", "reason"), [("", "stopped", "cancelled"), ("no memory", "failed", "error")])
def test_an_interrupted_run_ends_its_trace(error: str, phase: str, reason: str) -> None:
    run = Run((SPEC, BASELINE))
    absorb(run, SPEC, header(), PREFILL, REJECTION)
    run.finish(error)
    before = run.trace(SPEC)
    last = json.loads(before.splitlines()[-1])
    assert (last["end"], last["error"], last["metrics"]["tokens"]) == (reason, error or "interrupted", 3)
    assert run.phase == (phase, error or "3 tokens") and run.trace(BASELINE) is None
    run.finish("too late")
    assert run.trace(SPEC) == before and run.phase[0] == phase
    empty = Run()
    empty.finish(error)
    assert empty.phase[0] == phase and json.loads(empty.frame(0))["over"]


def test_a_frame_during_the_end_of_a_run_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary is computed by another thread, which may end the run while a frame is written."""
    run = whole(Run((SPEC,)))
    monkeypatch.setattr(frames, "tiles", lambda lanes, speeds: run.finish() or {})
    for over, phase in ((False, "decoding"), (True, "done")):
        frame = json.loads(run.frame(0))
        assert frame["over"] == over and frame["phase"][0] == phase


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
    run = Run((SPEC, BASELINE))
    distributions = {"laws": [probs((100, p), (999, q))] + [probs((1, 1.0))] * 3, "texts": {100: "b", 999: "z"}}
    for lane, line in ((SPEC, REJECTION | distributions), (BASELINE, step(1, pieces=["z"], tokens=[999]))):
        absorb(run, lane, header(bit_equal=False), PREFILL, line, end())
    compared = compare_texts(run.lanes[SPEC], run.lanes[BASELINE])
    assert compared.tone == tone and words in compared.why


def repeated(*ar_seconds: float) -> Run:
    """Comparison of a pair per AR step time; the speculative lane always takes 0.03 s per step."""
    run = Run((SPEC, BASELINE), pairs=len(ar_seconds))
    for seconds in ar_seconds:
        for lane, lines in ((SPEC, (PREFILL, REJECTION, ALL_KEPT)), (BASELINE, plain_steps(seconds))):
            for event in events_of((header("ar" if lane == BASELINE else "draft"), *lines, end())):
                run.add_event(lane, event)
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
    assert run.phase == ("done", f"6 tokens, token limit reached, first of {len(seconds)} pairs")
    run.finish()
    frame = json.loads(run.frame(0))
    assert len(frame["r"]) == 4 + 7, "only the first pair is shown"
    assert frame["verdict"].startswith(outcome)
    suggestion = {"label": "Turn speculation off", "set": {"method": "ar"}}
    assert (frame["headline"]["suggestions"] == [suggestion]) == ("slower" in outcome)
    for cell in (frame["tiles"]["speedup"][1], frame["table"][1][2]):
        assert f"median of {len(seconds)} pairs" in cell


def test_a_saved_trace_of_pairs_opens_with_the_result_of_all_pairs() -> None:
    run = repeated(0.024, 0.018, 0.03)
    run.finish()
    opened = read_traces("".join(run.trace(name) or "" for name in run.plan))
    assert opened.speeds == run.speeds and opened.pairs == 3
    before, after = (json.loads(each.frame(0)) for each in (run, opened))
    for name in ("headline", "verdict", "tiles", "table"):
        assert after[name] == before[name]


def test_a_chat_that_is_stopped_in_a_later_pair_is_remembered() -> None:
    visitor = Visitor()
    run = Run((SPEC, BASELINE), pairs=3, history=visitor.begin_turn("question", "new"))
    for lane, method in ((SPEC, "draft"), (BASELINE, "ar"), (SPEC, "draft")):
        stopped = end() | {"end": "cancelled"} if run.lanes[SPEC].ended and lane == SPEC else end()
        absorb(run, lane, header(method, {"chat": True}), PREFILL, step(1, pieces=["x"]), stopped)
    run.finish()
    visitor.remember("question", run)
    assert run.phase[0] == "stopped" and [message["role"] for message in visitor.messages] == ["user", "assistant"]
    assert json.loads(run.frame(0))["turn"] == 1


def test_impossible_pairs_are_left_out() -> None:
    """A pass gives 2.5 tokens, so a pair that is 4.6 times as fast was disturbed."""
    run = repeated(0.024, 0.018, 0.055, 0.013, 0.024, 0.024)
    run.finish()
    verdict = json.loads(run.frame(0))["verdict"]
    assert "5 of 6 alternating pairs" in verdict and "contradict the number of passes" in verdict


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_a_stopped_text_that_begins_the_other_does_not_differ(reason: str) -> None:
    run = whole(Run((SPEC, BASELINE)))
    absorb(run, BASELINE, header("ar"), *plain_steps(0.01)[:3], end(reason))
    run.finish()
    assert compare_texts(run.lanes[SPEC], run.lanes[BASELINE]).badge == "same so far"
    other = whole(Run((SPEC, BASELINE)))
    absorb(other, BASELINE, header("ar"), *plain_steps(0.01)[1:3], end(reason))
    assert compare_texts(other.lanes[SPEC], other.lanes[BASELINE]).badge == "differs at token 1"


def finished() -> Run:
    run = whole(Run())
    run.finish()
    return run


def test_run_store_evicts_the_least_recently_used_finished_run() -> None:
    runs = RunStore(per_network=3)
    first, second, third = (runs.new(f"session {i}", (SPEC,)) for i in range(3))
    for run in (second, third):
        run.finish()
    assert runs.get(first.id) is first and runs.get(second.id) is second
    fourth = runs.new("session 3", (SPEC,))
    assert len(runs) == 3 and runs.get(third.id) is None
    assert all(runs.get(run.id) is run for run in (first, second, fourth))
    large = finished()
    assert large.size >= len(large.trace(SPEC)) + sum(map(len, large.records))
    bounded = RunStore(max_characters=2 * large.size + 8_000)
    for run in (large, finished()):
        bounded.keep(run)
    assert bounded.get(large.id) is None and bounded.get(run.id) is run


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
    runs.get(active.id).stop()
    assert stopped


# --- repeated comparisons ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_s", "settings", "pairs"),
    [
        (0.001, {}, 3),  # 40 tokens
        (0.1, {}, 1),  # 8 s for both lanes: repetitions would keep the visitor waiting
        (0.001, {"ngram_keep": True}, 1),  # the second run would know the text
        (0.001, {"compare": False}, 0),
    ],
)
def test_comparisons_of_short_texts_are_repeated(step_s: float, settings: dict[str, Any], pairs: int) -> None:
    """Comparisons of 40 tokens with steps of this duration."""

    def engine(recipe: Recipe, *_: Any) -> Iterator[Event]:
        times = {"draft_s": 0.0, "verify_s": step_s, "host_s": 0.0}
        steps = [step(i, pieces=["b"]) | times | {"t": step_s * (i + 1)} for i in range(40)]
        yield from events_of([header(recipe.method), *steps, end()])

    service = Service(ModelPool(), engine)
    defaults = {"prompt": "x", "compare": True, "pair": "bundled", "method": "nasd", "ngram_keep": False}
    with TestClient(Starlette(routes=Runs(service, "cpu", defaults).routes)) as client:
        words = last_frame(client, {"id": "run-of-this-test", "settings": settings})["phase"][1]
    service.worker.close()
    assert words.startswith("40 tokens, token limit reached") and ("3 pairs" in words) == (pairs == 3)
    counts = {name: len(speeds) for name, speeds in service.runs.get("run-of-this-test").speeds.items()}
    assert counts == ({"spec": pairs, "ar": pairs} if pairs else {"spec": 1})
