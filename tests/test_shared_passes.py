"""Passes that several jobs share: groups, errors, stops, shares of the device, number of active jobs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from fakes.worker_jobs import finished, submitting

from specdemo.worker import (
    PASS_ROWS,
    PassRequest,
    SharedPassRecord,
    Stream,
    Worker,
    choose_requests,
    last_pass,
    shared_pass,
    stop_flag,
    unshared_passes,
)

LONG = PASS_ROWS  # rows of a text that shares no pass


class Engine:
    """Doubles entries; records each pass and calls `during` within it."""

    def __init__(self, during: Callable[[Sequence[Any]], object] = lambda entries: None) -> None:
        self.passes: list[list[Any]] = []
        self.during = during

    def run(self, entries: list[Any]) -> list[Any]:
        self.passes.append([*entries])
        self.during(entries)
        return [entry * 2 for entry in entries]


def texts(engine: Engine, entry: Any, count: int, rows: int = 1) -> Iterator[Any]:
    for _ in range(count):
        yield shared_pass(engine.run, entry, rows)


def start_texts(worker: Worker, engine: Engine, entries: Iterable[Any], count: int) -> list[Stream[Any]]:
    with submitting(worker):
        return [worker.submit(lambda entry=entry: texts(engine, entry, count)) for entry in entries]


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(waiting=None, texts=8)
    yield worker
    worker.close()


def test_a_pass_has_texts_of_one_engine_and_a_limited_number_of_rows() -> None:
    engine, other = Engine(), Engine()
    first = PassRequest(engine.run, "first", 60)
    requests = [
        PassRequest(other.run, "other engine", 1),
        PassRequest(engine.run, "long", LONG),
        *(PassRequest(engine.run, name, 64) for name in "abcd"),
        PassRequest(engine.run, "short", 4),
    ]
    assert [request.entry for request in choose_requests(first, requests, 9)] == ["first", "a", "b", "c", "short"]
    assert [request.entry for request in choose_requests(first, requests, 2)] == ["first", "a"]
    assert choose_requests(requests[1], [first], 9) == [requests[1]]


def test_jobs_share_passes_and_get_their_own_results(worker: Worker) -> None:
    engine = Engine()
    streams = start_texts(worker, engine, range(6), 10)
    assert [finished(stream).items for stream in streams] == [[2 * n] * 10 for n in range(6)]
    assert [len(entries) for entries in engine.passes] == [4, *[6] * 9, 2]  # four jobs are active at first
    assert worker.texts_per_pass == {4: 1, 6: 9, 2: 1}


def test_jobs_get_the_load_of_their_last_pass(worker: Worker) -> None:
    engine = Engine()

    def loads(number: int) -> Iterator[SharedPassRecord | None]:
        for _ in range(number):
            shared_pass(engine.run, number, number)
            yield last_pass()

    with submitting(worker):
        streams = [worker.submit(lambda number=number: loads(number)) for number in (2, 4, 5)]
    counts = [[(load.texts, load.rows) if load else None for load in finished(stream).items] for stream in streams]
    assert counts == [[(3, 11)] * 2, [(3, 11)] * 2 + [(2, 9)] * 2, [(3, 11)] * 2 + [(2, 9)] * 2 + [None]]
    assert all(load.seconds >= 0 and load.between_s >= 0 for load in streams[0].items)
    assert last_pass() is None  # outside jobs


@pytest.mark.parametrize("measured", [False, True])
def test_passes_are_not_shared(measured: bool) -> None:
    """Batching off, and jobs with measurements."""
    engine, worker = Engine(), Worker(texts=8 if measured else 1)

    def job(n: int) -> Iterator[Any]:
        with unshared_passes() if measured else nullcontext():
            yield from texts(engine, n, 5)

    with submitting(worker):
        streams = [worker.submit(lambda n=n: job(n)) for n in range(3)]
    assert [finished(stream).items for stream in streams] == [[2 * n] * 5 for n in range(3)]
    assert all(len(entries) == 1 for entries in engine.passes)
    worker.close()


def test_the_error_of_a_text_stays_in_its_job(worker: Worker) -> None:
    def refuse(entries: Sequence[int]) -> None:
        if 2 in entries:
            raise MemoryError("no memory for this text")

    engine = Engine(refuse)
    streams = start_texts(worker, engine, range(4), 4)
    assert [finished(stream).items for stream in streams] == [[0] * 4, [2] * 4, [], [6] * 4]
    assert [type(stream.error) for stream in streams] == [type(None), type(None), MemoryError, type(None)]
    assert len(engine.passes[-1]) == 3  # the others share passes again


def test_stopping_a_job_does_not_end_the_pass_of_others(worker: Worker) -> None:
    """Stop the leader of a pass, another text of it, and a text of the next pass."""
    streams: dict[str, Stream[Any]] = {}

    def stop_others(entries: Sequence[str]) -> None:
        if len(entries) == 3:
            for name in ("a", "b", "waits"):
                streams[name].stop()
            flags.append(bool(stop_flag()))

    flags: list[bool] = []
    engine, other = Engine(stop_others), Engine()
    with submitting(worker):
        streams |= {name: worker.submit(lambda name=name: texts(engine, name, 3)) for name in "abc"}
        streams["waits"] = worker.submit(lambda: texts(other, "waits", 3))
    assert finished(streams["c"]).items == ["cc"] * 3 and flags == [False]
    assert all(len(finished(streams[name]).items) <= 1 for name in "ab")
    assert finished(streams["waits"]).items == [] and other.passes == []
    assert all(stream.error is None for stream in streams.values())


def test_stop_ends_the_long_pass_of_a_job(worker: Worker) -> None:
    """The pass of a single text observes its flag."""
    seen: list[bool] = []

    def stop(entries: Sequence[str]) -> None:
        if entries == ["long"]:
            streams[0].stop()
            seen.append(bool(stop_flag()))

    engine = Engine(stop)
    with submitting(worker):
        streams = [worker.submit(lambda: texts(engine, "long", 3, LONG)), worker.submit(lambda: texts(engine, "x", 3))]
    assert len(finished(streams[0]).items) <= 1 and finished(streams[1]).items == ["xx"] * 3
    assert seen == [True]


def test_texts_advance_while_a_long_prompt_is_read() -> None:
    """Chunks of a prompt, 0.5 s each, alternate with as much time of shared passes, 0.1 s each."""
    now = [0.0]

    def spend(entries: Sequence[str]) -> None:
        now[0] += 0.5 if "prompt" in entries else 0.1

    engine, worker = Engine(spend), Worker(clock=lambda: now[0], texts=8)
    with submitting(worker):
        prompt = worker.submit(lambda: texts(engine, "prompt", 4, LONG))
        others = [worker.submit(lambda n=n: texts(engine, n, 40)) for n in "abc"]
    assert len(finished(prompt).items) == 4 and all(len(finished(stream).items) == 40 for stream in others)
    chunks = [i for i, entries in enumerate(engine.passes) if entries == ["prompt"]]
    assert [4 <= after - before - 1 <= 6 for before, after in zip(chunks, chunks[1:], strict=False)] == [True] * 3
    assert all(sorted(entries) == [*"abc"] for entries in engine.passes if "prompt" not in entries)
    worker.close()


def test_jobs_without_passes_do_not_delay_a_pass_for_ever() -> None:
    """Short jobs arrive until two texts end."""
    engine, worker = Engine(), Worker(at_once=8, clock=lambda: 0.0, texts=8, waiting=None)

    def short() -> Iterator[None]:
        if not all(stream.done for stream in streams):
            arrived.append(worker.submit(short))
        yield

    arrived: list[Stream[Any]] = []
    with submitting(worker):
        streams = [worker.submit(lambda n=n: texts(engine, n, 3)) for n in range(2)]
        arrived.append(worker.submit(short))
    assert all(len(finished(stream).items) == 3 for stream in streams)
    assert len(arrived) > 1 and [*map(sorted, engine.passes)] == [[0, 1]] * 3
    worker.close()


def test_the_wait_for_a_pass_is_not_the_time_of_a_job() -> None:
    """Each of three jobs spends a second before its request; the pass takes four."""
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    engine, worker = Engine(lambda entries: spend(4.0)), Worker(clock=lambda: now[0], texts=8)

    def job() -> Iterator[float]:
        spend(1.0)
        yield shared_pass(engine.run, 1, 1)

    with submitting(worker):
        streams = [worker.submit(job) for _ in range(3)]
    assert all(finished(stream).error is None for stream in streams)
    assert sorted(stream.waited_s for stream in streams) == [0.0, 1.0, 2.0]
    worker.close()


@pytest.mark.parametrize(("has_memory", "most"), [(True, 6), (False, 2)])
def test_texts_beyond_the_active_jobs_need_memory(has_memory: bool, most: int) -> None:
    worker = Worker(at_once=2, waiting=None, texts=6, has_memory=lambda: has_memory)
    streams = start_texts(worker, Engine(), range(12), 5)
    assert all(len(finished(stream).items) == 5 for stream in streams)
    assert max(worker.texts_per_pass) == most
    worker.close()
