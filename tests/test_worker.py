"""Worker and background tasks: order, fairness, cancellation, errors, completeness, shared passes."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from fakes.worker_jobs import PATIENCE, finished, log_steps, submitting

from specdemo.background import BackgroundTask, TaskCancelled
from specdemo.core.events import Loading, ReportProgress
from specdemo.shared_passes import PASS_ROWS, PassRequest, SharedPassRecord, choose_requests
from specdemo.worker import (
    Stream,
    Worker,
    WorkerBusy,
    interruptible,
    last_pass,
    shared_pass,
    stop_flag,
    unshared_passes,
    yield_device,
)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(at_once=3, waiting=4)
    yield worker
    worker.close()


class Gate:
    """Job that yields 0, 1, 2, ..., advanced by `open`."""

    def __init__(self) -> None:
        self.turns = threading.Semaphore(0)
        self.inside = threading.Event()
        self.ended_in: str | None = None

    def __call__(self) -> Iterator[int]:
        try:
            n = 0
            while True:
                self.inside.set()
                assert self.turns.acquire(timeout=PATIENCE)
                yield n
                n += 1
        finally:
            self.ended_in = threading.current_thread().name

    def open(self, times: int = 1) -> None:
        self.turns.release(times)


def test_stop_ends_the_job_within_one_step_and_in_the_worker_thread(worker: Worker) -> None:
    gate = Gate()
    stream = worker.submit(gate)
    assert gate.inside.wait(PATIENCE)  # inside step 0
    stream.stop()
    assert not stream.done  # a step is never interrupted
    gate.open(5)
    finished(stream)
    assert stream.items == [0]
    assert gate.ended_in == "device"
    assert stream.error is None


def test_job_stopped_in_the_queue_never_starts() -> None:
    worker = Worker(at_once=1)
    gate = Gate()
    busy, waiting, last = worker.submit(gate), worker.submit(lambda: iter("never")), worker.submit(lambda: iter("yes"))
    assert gate.inside.wait(PATIENCE)
    assert [worker.ahead(s) for s in (busy, waiting, last)] == [0, 1, 2]
    waiting.stop()
    gate.open()
    finished(waiting)  # while the job before it is still open
    assert not waiting.started and waiting.items == [] and not busy.done
    busy.stop()
    gate.open()
    assert finished(last).items == list("yes")
    worker.close()


def test_errors_stay_in_their_stream(worker: Worker) -> None:
    gate = Gate()
    other = worker.submit(gate)

    def bad() -> Iterator[int]:
        yield 1
        raise SystemExit("out of memory")

    def worse() -> Iterator[int]:
        raise KeyError("no generator at all")

    streams = [worker.submit(bad), worker.submit(worse)]
    gate.open(20)
    assert [type(finished(s).error) for s in streams] == [SystemExit, KeyError] and streams[0].items == [1]
    other.stop()
    gate.open()
    assert finished(other).error is None and finished(worker.submit(lambda: iter([7]))).items == [7]
    assert worker.active == 0


@pytest.mark.parametrize("finishes", [True, False])
def test_close_lets_submitted_jobs_end_within_the_drain_time(finishes: bool) -> None:
    worker, inside, gate = Worker(), threading.Event(), threading.Event()

    def job() -> Iterator[int]:
        yield 1
        inside.set()
        while not finishes:
            yield 2
        assert gate.wait(PATIENCE)
        yield 3

    stream = worker.submit(job)
    assert inside.wait(PATIENCE)
    closing = threading.Thread(target=worker.close, args=(PATIENCE, PATIENCE if finishes else 0.05))
    closing.start()
    with pytest.raises(RuntimeError, match="closed"):
        while True:
            with suppress(WorkerBusy):  # before `close` begins
                worker.submit(lambda: iter(()))
    gate.set()
    closing.join(PATIENCE)
    assert stream.done and stream.stopping is not finishes and (stream.items[-1] == 3) is finishes
    assert not worker._threads


# --- shares of the device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 4])
def test_other_jobs_run_while_a_job_waits(at_once: int) -> None:
    """A job that waits also leaves its place to the queue."""
    worker, response, request = Worker(at_once), threading.Event(), threading.Event()

    def call() -> bool:
        request.set()
        return response.wait(PATIENCE)

    waiting: Stream[bool] = worker.submit(lambda: iter((interruptible(call),)))
    assert request.wait(PATIENCE)
    assert finished(worker.submit(lambda: iter(range(500)))).items == list(range(500))
    assert not waiting.done
    response.set()
    assert finished(waiting).items == [True]
    worker.close()


def test_one_job_at_a_time_uses_the_device(worker: Worker) -> None:
    using: list[int] = []

    def job(number: int) -> Iterator[None]:
        for _ in range(200):
            interruptible(lambda: None)
            using.append(number)
            assert using == [number]
            using.pop()
            yield

    streams = [worker.submit(lambda number=number: job(number)) for number in range(3)]
    assert all(finished(stream).error is None and len(stream.items) == 200 for stream in streams)


def test_a_long_step_is_divided() -> None:
    worker = Worker(clock=lambda: 0.0)
    log: list[str] = []

    def long() -> Iterator[int]:
        for _ in range(50):
            log.append("part")
            yield_device()
        yield 50

    with submitting(worker):
        parts, steps = worker.submit(long), worker.submit(lambda: log_steps(log, "step"))
    assert finished(parts).items == [50] and finished(steps)
    assert log == ["part", "step"] * 50
    worker.close()


def test_jobs_share_device_time() -> None:
    """A job with long steps does not reduce others to a step for each of its own."""
    now, log = [0.0], []
    worker = Worker(clock=lambda: now[0])

    def job(name: str, seconds: float, count: int) -> Iterator[None]:
        for _ in log_steps(log, name, count):
            now[0] += seconds
            yield

    with submitting(worker):
        streams = [worker.submit(lambda: job("long", 1.0, 3)), worker.submit(lambda: job("short", 0.01, 300))]
    assert all(map(finished, streams))
    between = log[: log.index("long", log.index("long") + 1)]
    assert 80 <= between.count("short") <= 120
    worker.close()


def test_visitors_start_in_turn() -> None:
    worker = Worker(at_once=1, waiting=None)
    gate, order = Gate(), []
    busy = worker.submit(gate, owner="a")
    assert gate.inside.wait(PATIENCE)
    names = [*["a"] * 5, *["b"] * 3, "c"]
    streams = [worker.submit(lambda name=name: log_steps(order, name, 1), owner=name) for name in names]
    assert [worker.ahead(stream) for stream in streams] == [3, 5, 7, 8, 9, 1, 4, 6, 2]
    busy.stop()
    gate.open()
    assert all(map(finished, streams))
    assert order == ["b", "c", "a", "b", "a", "b", "a", "a", "a"]
    worker.close()


# --- background tasks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cooperative", [False, True])
def test_closing_the_progress_cancels_the_task(cooperative: bool) -> None:
    cancelled = threading.Event()

    def work(report: ReportProgress) -> None:
        try:
            while True:
                report(Loading("working"))
        except TaskCancelled:
            cancelled.set()
            raise

    progress = BackgroundTask(work, cooperative=cooperative).progress()
    next(progress)
    progress.close()
    assert cancelled.is_set() if cooperative else cancelled.wait(PATIENCE)


EXIT_DURING_A_TASK = """
from specdemo.background import BackgroundTask

def work(report):
    total = sum(range(10_000_000))
    print("ended", total > 0)

next(BackgroundTask(work, text="working").progress())
"""


def test_the_process_waits_for_its_tasks_at_exit() -> None:
    """A background thread in C++ would abort the process."""
    ended = subprocess.run([sys.executable, "-c", EXIT_DURING_A_TASK], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.stdout == "ended True\n", ended.stderr


def test_background_task_reports_progress_and_a_result() -> None:
    reported = threading.Event()

    def work(report: ReportProgress) -> int:
        report(Loading("half", 1, 2))
        assert reported.wait(PATIENCE)
        return 7

    task = BackgroundTask(work)
    for progress in task.progress():
        assert progress == Loading("half", 1, 2)
        reported.set()
    assert reported.is_set() and task.result == 7


@pytest.mark.parametrize("cooperative", [False, True])
def test_other_jobs_run_next_to_a_task_without_progress(worker: Worker, cooperative: bool) -> None:
    gate = threading.Event()
    task = BackgroundTask(lambda report: gate.wait(PATIENCE), cooperative=cooperative, text="working")
    stream = worker.submit(task.progress)
    assert finished(worker.submit(lambda: iter(range(100)))).items == [*range(100)] and not stream.done
    gate.set()
    assert finished(stream).items == [Loading("working")] and task.result


# --- passes that several jobs share -----------------------------------------------------------------------------------


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


def start_texts(sharing: Worker, engine: Engine, entries: Iterable[Any], count: int) -> list[Stream[Any]]:
    with submitting(sharing):
        return [sharing.submit(lambda entry=entry: texts(engine, entry, count)) for entry in entries]


@pytest.fixture
def sharing() -> Iterator[Worker]:
    sharing = Worker(waiting=None, texts=8)
    yield sharing
    sharing.close()


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


def test_jobs_share_passes_and_get_their_own_results(sharing: Worker) -> None:
    engine = Engine()
    streams = start_texts(sharing, engine, range(6), 10)
    assert [finished(stream).items for stream in streams] == [[2 * n] * 10 for n in range(6)]
    assert [len(entries) for entries in engine.passes] == [4, *[6] * 9, 2]  # four jobs are active at first
    assert sharing.texts_per_pass == {4: 1, 6: 9, 2: 1}


def test_jobs_get_the_load_of_their_last_pass(sharing: Worker) -> None:
    engine = Engine()

    def loads(number: int) -> Iterator[SharedPassRecord | None]:
        for _ in range(number):
            shared_pass(engine.run, number, number)
            yield last_pass()

    with submitting(sharing):
        streams = [sharing.submit(lambda number=number: loads(number)) for number in (2, 4, 5)]
    counts = [[(load.texts, load.rows) if load else None for load in finished(stream).items] for stream in streams]
    assert counts == [[(3, 11)] * 2, [(3, 11)] * 2 + [(2, 9)] * 2, [(3, 11)] * 2 + [(2, 9)] * 2 + [None]]
    assert all(load.seconds >= 0 and load.between_s >= 0 for load in streams[0].items)
    assert last_pass() is None  # outside jobs


@pytest.mark.parametrize("measured", [False, True])
def test_passes_are_not_shared(measured: bool) -> None:
    """Batching off, and jobs with measurements."""
    engine, sharing = Engine(), Worker(texts=8 if measured else 1)

    def job(n: int) -> Iterator[Any]:
        with unshared_passes() if measured else nullcontext():
            yield from texts(engine, n, 5)

    with submitting(sharing):
        streams = [sharing.submit(lambda n=n: job(n)) for n in range(3)]
    assert [finished(stream).items for stream in streams] == [[2 * n] * 5 for n in range(3)]
    assert all(len(entries) == 1 for entries in engine.passes)
    sharing.close()


def test_the_error_of_a_text_stays_in_its_job(sharing: Worker) -> None:
    def refuse(entries: Sequence[int]) -> None:
        if 2 in entries:
            raise MemoryError("no memory for this text")

    engine = Engine(refuse)
    streams = start_texts(sharing, engine, range(4), 4)
    assert [finished(stream).items for stream in streams] == [[0] * 4, [2] * 4, [], [6] * 4]
    assert [type(stream.error) for stream in streams] == [type(None), type(None), MemoryError, type(None)]
    assert len(engine.passes[-1]) == 3  # the others share passes again


def test_stopping_a_job_does_not_end_the_pass_of_others(sharing: Worker) -> None:
    """Stop the leader of a pass, another text of it, and a text of the next pass."""
    streams: dict[str, Stream[Any]] = {}

    def stop_others(entries: Sequence[str]) -> None:
        if len(entries) == 3:
            for name in ("a", "b", "waits"):
                streams[name].stop()
            flags.append(bool(stop_flag()))

    flags: list[bool] = []
    engine, other = Engine(stop_others), Engine()
    with submitting(sharing):
        streams |= {name: sharing.submit(lambda name=name: texts(engine, name, 3)) for name in "abc"}
        streams["waits"] = sharing.submit(lambda: texts(other, "waits", 3))
    assert finished(streams["c"]).items == ["cc"] * 3 and flags == [False]
    assert all(len(finished(streams[name]).items) <= 1 for name in "ab")
    assert finished(streams["waits"]).items == [] and other.passes == []
    assert all(stream.error is None for stream in streams.values())


def test_stop_ends_the_long_pass_of_a_job(sharing: Worker) -> None:
    """The pass of a single text observes its flag."""
    seen: list[bool] = []

    def stop(entries: Sequence[str]) -> None:
        if entries == ["long"]:
            streams[0].stop()
            seen.append(bool(stop_flag()))

    engine = Engine(stop)
    with submitting(sharing):
        streams = [
            sharing.submit(lambda: texts(engine, "long", 3, LONG)),
            sharing.submit(lambda: texts(engine, "x", 3)),
        ]
    assert len(finished(streams[0]).items) <= 1 and finished(streams[1]).items == ["xx"] * 3
    assert seen == [True]


def test_texts_advance_while_a_long_prompt_is_read() -> None:
    """Chunks of a prompt, 0.5 s each, alternate with as much time of shared passes, 0.1 s each."""
    now = [0.0]

    def spend(entries: Sequence[str]) -> None:
        now[0] += 0.5 if "prompt" in entries else 0.1

    engine, sharing = Engine(spend), Worker(clock=lambda: now[0], texts=8)
    with submitting(sharing):
        prompt = sharing.submit(lambda: texts(engine, "prompt", 4, LONG))
        others = [sharing.submit(lambda n=n: texts(engine, n, 40)) for n in "abc"]
    assert len(finished(prompt).items) == 4 and all(len(finished(stream).items) == 40 for stream in others)
    chunks = [i for i, entries in enumerate(engine.passes) if entries == ["prompt"]]
    assert [4 <= after - before - 1 <= 6 for before, after in zip(chunks, chunks[1:], strict=False)] == [True] * 3
    assert all(sorted(entries) == [*"abc"] for entries in engine.passes if "prompt" not in entries)
    sharing.close()


def test_jobs_without_passes_do_not_delay_a_pass_for_ever() -> None:
    """Short jobs arrive until two texts end."""
    engine, sharing = Engine(), Worker(at_once=8, clock=lambda: 0.0, texts=8, waiting=None)

    def short() -> Iterator[None]:
        if not all(stream.done for stream in streams):
            arrived.append(sharing.submit(short))
        yield

    arrived: list[Stream[Any]] = []
    with submitting(sharing):
        streams = [sharing.submit(lambda n=n: texts(engine, n, 3)) for n in range(2)]
        arrived.append(sharing.submit(short))
    assert all(len(finished(stream).items) == 3 for stream in streams)
    assert len(arrived) > 1 and [*map(sorted, engine.passes)] == [[0, 1]] * 3
    sharing.close()


def test_the_wait_for_a_pass_is_not_the_time_of_a_job() -> None:
    """Each of three jobs spends a second before its request; the pass takes four."""
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    engine, sharing = Engine(lambda entries: spend(4.0)), Worker(clock=lambda: now[0], texts=8)

    def job() -> Iterator[float]:
        spend(1.0)
        yield shared_pass(engine.run, 1, 1)

    with submitting(sharing):
        streams = [sharing.submit(job) for _ in range(3)]
    assert all(finished(stream).error is None for stream in streams)
    assert sorted(stream.waited_s for stream in streams) == [0.0, 1.0, 2.0]
    sharing.close()


@pytest.mark.parametrize(("has_memory", "most"), [(True, 6), (False, 2)])
def test_texts_beyond_the_active_jobs_need_memory(has_memory: bool, most: int) -> None:
    sharing = Worker(at_once=2, waiting=None, texts=6, has_memory=lambda: has_memory)
    streams = start_texts(sharing, Engine(), range(12), 5)
    assert all(len(finished(stream).items) == 5 for stream in streams)
    assert max(sharing.texts_per_pass) == most
    sharing.close()
