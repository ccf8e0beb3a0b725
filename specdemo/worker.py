"""Device thread, background threads and termination signals. Imports no other module of specdemo.

A job is a function that returns an iterator. The worker runs both in its thread and in the submitter's `contextvars`
context, alternating between open jobs after each step. Any thread may use the job's `Stream`.
"""

from __future__ import annotations

import contextvars
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_stop_request: contextvars.ContextVar[Future[None]] = contextvars.ContextVar("stop request")  # of the current job


class WorkerBusy(RuntimeError):
    """The job queue is full."""


class Stopped(Exception):
    """A job was stopped during a blocking call."""


def run_in_thread(call: Callable[[], T]) -> Future[T]:
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # re-raised by `Future.result`
            result.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return result


def interruptible(call: Callable[[], T]) -> T:
    """Run the blocking `call()`. Raise `Stopped` if the job is stopped meanwhile; the call continues unobserved."""
    stop_request = _stop_request.get(None)
    if stop_request is None:  # not in a job
        return call()
    result = run_in_thread(call)
    wait({result, stop_request}, return_when=FIRST_COMPLETED)
    if not result.done():
        raise Stopped
    return result.result()


class Stream(Generic[T]):
    """Append-only results of a job. Read `done` before `items` to get the last items.

    `on_change` is called in the worker's thread after each item and at the end.
    """

    def __init__(self, job: Callable[[], Iterator[T]], on_change: Callable[[], object] | None = None) -> None:
        self.items: list[T] = []
        self.error: BaseException | None = None
        self.started = False
        self._job: Callable[[], Iterator[T]] | None = job
        self._steps: Iterator[T] | None = None
        self._context: contextvars.Context | None = contextvars.copy_context()
        self._stop_request: Future[None] = Future()
        self._context.run(_stop_request.set, self._stop_request)
        self._done = threading.Event()
        self._on_change = on_change

    @property
    def done(self) -> bool:
        """True after the last item and the job's `finally` blocks."""
        return self._done.is_set()

    @property
    def stopping(self) -> bool:
        return self._stop_request.done()

    def stop(self) -> None:
        """End the job before its next step. Return immediately."""
        with suppress(InvalidStateError):  # already stopped
            self._stop_request.set_result(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the job ends. Return False after `timeout` seconds."""
        return self._done.wait(timeout)


class Worker:
    """Device thread with at most `at_once` open and `waiting` queued jobs."""

    def __init__(self, at_once: int = 4, waiting: int | None = 32) -> None:
        self._max_open = at_once
        self._max_queued = waiting
        self._queued: deque[Stream] = deque()
        self._open: deque[Stream] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Iterator[T]], on_change: Callable[[], object] | None = None) -> Stream[T]:
        """Queue a job. Raise `WorkerBusy` if the queue is full, `RuntimeError` after `close`."""
        stream: Stream[T] = Stream(job, on_change)
        with self._changed:
            if self._closed:
                raise RuntimeError("The worker is closed.")
            if self._max_queued is not None and len(self._queued) >= self._max_queued:
                raise WorkerBusy(f"{len(self._queued)} runs are waiting already: try again in a minute.")
            self._queued.append(stream)
            self._changed.notify()
        return stream

    def ahead(self, stream: Stream) -> int:
        """Number of jobs that must start or end first."""
        with self._changed:
            if stream not in self._queued:
                return 0
            position = self._queued.index(stream)
            return position + 1 if len(self._open) >= self._max_open else position

    @property
    def active(self) -> int:
        with self._changed:
            return len(self._open) + len(self._queued)

    def close(self, timeout: float | None = 10.0) -> None:
        """Stop all jobs, including their `finally` blocks, and end the thread."""
        with self._changed:
            self._closed = True
            for stream in (*self._open, *self._queued):
                stream.stop()
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while (stream := self._next()) is not None:
            ended = not self._advance(stream)
            with self._changed:
                self._open.popleft()
                if not ended:
                    self._open.append(stream)
            if ended:
                stream._job = stream._steps = stream._context = None  # free memory before `done` is visible
                stream._done.set()
            if stream._on_change is not None:
                stream._on_change()

    def _next(self) -> Stream | None:
        """Block until a job can be advanced. Return None once closed and all jobs have ended."""
        with self._changed:
            while not self._open and not self._queued and not self._closed:
                self._changed.wait()
            stopped = [stream for stream in self._queued if stream.stopping]
            for stream in stopped:
                self._queued.remove(stream)
            while self._queued and len(self._open) < self._max_open:
                self._open.append(self._queued.popleft())
            self._open.extendleft(stopped)  # never started, so ending them takes no time
            return self._open[0] if self._open else None

    def _advance(self, stream: Stream) -> bool:
        try:
            if stream.stopping:
                close = getattr(stream._steps, "close", None)
                if close is not None:
                    stream._context.run(close)
                return False
            if stream._steps is None:
                stream.started = True
                stream._steps = iter(stream._context.run(stream._job))
            stream.items.append(stream._context.run(next, stream._steps))
            return True
        except (StopIteration, Stopped):
            return False
        except BaseException as error:  # the thread continues with other jobs
            stream.error = error
            return False


class WorkerGroup:
    """Workers for jobs with separate devices (ZeroGPU)."""

    def __init__(self, workers: int = 4, waiting: int | None = 32) -> None:
        each = None if waiting is None else -(-waiting // workers)
        self._workers = [Worker(at_once=1, waiting=each) for _ in range(workers)]

    def submit(self, job: Callable[[], Iterator[T]]) -> Stream[T]:
        """Queue a job at the least loaded worker. Raise `WorkerBusy` if its queue is full."""
        return min(self._workers, key=lambda worker: worker.active).submit(job)

    def ahead(self, stream: Stream) -> int:
        return max(worker.ahead(stream) for worker in self._workers)

    @property
    def active(self) -> int:
        return sum(worker.active for worker in self._workers)

    def close(self, timeout: float | None = 10.0) -> None:
        for worker in self._workers:
            worker.close(timeout)


REPORT_INTERVAL_S = 0.1


@dataclass(frozen=True)
class TaskProgress:
    """`total` is 0 if unknown."""

    text: str
    done: int = 0
    total: int = 0


ReportProgress = Callable[[TaskProgress], None]


class TaskCancelled(Exception):
    """Raised by progress reports of a cancelled task."""


def ignore_progress(progress: TaskProgress) -> None:
    pass


class BackgroundTask(Generic[T]):
    """Run `work(report)` in a background thread. `parked`: only while `progress` is being advanced.

    `text` is the progress until the first report.
    """

    def __init__(self, work: Callable[[ReportProgress], T], parked: bool = False, text: str = "") -> None:
        self._work, self._can_park = work, parked
        self._changed = threading.Condition()
        self._latest = TaskProgress(text) if text else None
        self._parked = self._cancelled = False
        self._next_report = 0.0
        self._future: Future[T] | None = None

    def progress(self) -> Iterator[TaskProgress]:
        """Start the task and yield its progress at most every `REPORT_INTERVAL_S`. Closing the iterator cancels it.

        Re-raise the exception of the task.
        """
        future = self._future = run_in_thread(partial(self._work, self._report))
        future.add_done_callback(self._wake)
        timeout = None if self._can_park else REPORT_INTERVAL_S
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._parked or future.done(), timeout)
                if future.done():
                    break
                if self._latest is not None:
                    yield self._latest
                with self._changed:
                    self._parked = False
                    self._changed.notify_all()
        finally:
            self._cancelled = True
            self._wake()
            if self._can_park:
                wait({future})  # the task uses the device until it ends
        future.result()

    @property
    def result(self) -> T:
        """Return value of the task, after `progress` is exhausted."""
        assert self._future is not None and self._future.done()
        return self._future.result()

    def _wake(self, _: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def _report(self, progress: TaskProgress) -> None:
        with self._changed:
            if not self._cancelled:
                self._latest = progress
                if self._can_park and time.monotonic() >= self._next_report:
                    self._parked = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._parked or self._cancelled)
                    self._next_report = time.monotonic() + REPORT_INTERVAL_S
            if self._cancelled:
                raise TaskCancelled


@contextmanager
def handle_signals(handler: Callable[[int, Any], Any], *signals: signal.Signals) -> Iterator[None]:
    """Call `handler` for `signals` within the block; no effect outside the main thread.

    Without it, Python ignores SIGINT if the parent process did (`trap '' INT`, background jobs of a shell).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before or signal.SIG_DFL)
