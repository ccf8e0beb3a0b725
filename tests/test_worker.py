"""Worker and background tasks: order, fairness, cancellation, errors, completeness."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from fakes.worker_jobs import PATIENCE, finished, log_steps, submitting

from specdemo.background import BackgroundTask, TaskCancelled
from specdemo.core.events import Loading, ReportProgress
from specdemo.worker import Stream, Worker, WorkerBusy, interruptible, yield_device


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
