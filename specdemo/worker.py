"""One thread owns the device. It advances the jobs given to it one step at a time, in turn.

A job is a function that returns an iterator; both run in the worker's thread only, from the first line to the last
`finally`, in the context (`contextvars`) of whoever submitted it. That one holds a `Stream`: an append-only list that
can be read at any time from any thread. At most `at_once` jobs are open at a time; the rest wait in the order in which
they came. Imports nothing of ours and knows nothing of models, traces or pages.

A reader that must not lose the tail looks at `done` *before* it drains `items`: `done` is set after the last item. A
job that has to wait for something else than the device does so in `interruptible`, which ends when it is asked to stop.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_asked_to_stop: contextvars.ContextVar[Future[None]] = contextvars.ContextVar("asked to stop")  # in a job: it was


class WorkerBusy(RuntimeError):
    """So many jobs wait already that one more would only be a disappointment."""


class Stopped(Exception):
    """A job was asked to stop while it waited."""


def interruptible(call: Callable[[], T]) -> T:
    """The result of `call()`, which waits for something outside; in a job `Stopped` is raised when that is stopped.

    What was called goes on in a thread of its own until it ends by itself. Outside of jobs this is a plain call.
    """
    asked = _asked_to_stop.get(None)
    if asked is None:
        return call()
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # it is whoever waits who has to know
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    wait({answer, asked}, return_when=FIRST_COMPLETED)
    if not answer.done():
        raise Stopped
    return answer.result()


class Stream(Generic[T]):
    """What one job has handed out so far. The worker writes; everybody else reads, or asks it to stop."""

    def __init__(self, job: Callable[[], Iterator[T]]) -> None:
        self.items: list[T] = []
        self.error: BaseException | None = None
        self.started = False
        self._job: Callable[[], Iterator[T]] | None = job
        self._steps: Iterator[T] | None = None
        self._context: contextvars.Context | None = contextvars.copy_context()
        self._stop: Future[None] = Future()
        self._context.run(_asked_to_stop.set, self._stop)
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the job is over, its `finally` blocks included; no item follows."""
        return self._done.is_set()

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop, by anyone."""
        return self._stop.done()

    def stop(self) -> None:
        """End the job before its next step. Returns at once; harmless when it is over."""
        with suppress(InvalidStateError):  # by another one at the same time
            self._stop.set_result(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the job is over, or for `timeout` seconds; whether it is over."""
        return self._done.wait(timeout)


class Worker:
    """The daemon thread. `close()` it, or let it end with the process."""

    def __init__(self, at_once: int = 4, waiting: int | None = 32) -> None:
        self._at_once = at_once
        self._room = waiting
        self._waiting: deque[Stream] = deque()
        self._open: deque[Stream] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Iterator[T]]) -> Stream[T]:
        """Queue a job; `WorkerBusy` when too many wait, `RuntimeError` after `close`."""
        stream: Stream[T] = Stream(job)
        with self._changed:
            if self._closed:
                raise RuntimeError("The worker is closed.")
            if self._room is not None and len(self._waiting) >= self._room:
                raise WorkerBusy(f"{len(self._waiting)} runs are waiting already: try again in a minute.")
            self._waiting.append(stream)
            self._changed.notify()
        return stream

    def ahead(self, stream: Stream) -> int:
        """How many jobs must end or start before this one starts; 0 once it has started."""
        with self._changed:
            if stream not in self._waiting:
                return 0
            before = self._waiting.index(stream)
            return before + 1 if len(self._open) >= self._at_once else before

    @property
    def active(self) -> int:
        """How many jobs are open or waiting."""
        with self._changed:
            return len(self._open) + len(self._waiting)

    def close(self, timeout: float | None = 10.0) -> None:
        """Stop every job, run their `finally` blocks in the worker's thread, and end the thread."""
        with self._changed:
            self._closed = True
            for stream in (*self._open, *self._waiting):
                stream.stop()
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while (stream := self._next()) is not None:
            over = not self._advance(stream)
            with self._changed:
                self._open.popleft()
                if not over:
                    self._open.append(stream)  # back to the end of the line
            if over:
                stream._job = stream._steps = stream._context = (
                    None  # whatever they hold is free before anyone hears of the end
                )
                stream._done.set()

    def _next(self) -> Stream | None:
        """The stream whose turn it is; blocks while there is none; None when closed and all have ended."""
        with self._changed:
            while not self._open and not self._waiting and not self._closed:
                self._changed.wait()
            given_up = [stream for stream in self._waiting if stream.stopping]
            for stream in given_up:
                self._waiting.remove(stream)
            while self._waiting and len(self._open) < self._at_once:
                self._open.append(self._waiting.popleft())
            self._open.extendleft(given_up)  # they never started: ending them takes no step from anyone
            return self._open[0] if self._open else None

    def _advance(self, stream: Stream) -> bool:
        """One step of one job; whether there may be another. What the job raises stays in its own stream."""
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
        except BaseException as error:  # kept for whoever reads the stream: the thread serves the others
            stream.error = error
            return False


class WorkerGroup:
    """Workers that look like one, each with one job at a time: where every job brings a device of its own."""

    def __init__(self, workers: int = 4, waiting: int | None = 32) -> None:
        each = None if waiting is None else -(-waiting // workers)
        self._workers = [Worker(at_once=1, waiting=each) for _ in range(workers)]

    def submit(self, job: Callable[[], Iterator[T]]) -> Stream[T]:
        """Give a job to the worker with the fewest; `WorkerBusy` when too many wait."""
        return min(self._workers, key=lambda worker: worker.active).submit(job)

    def ahead(self, stream: Stream) -> int:
        """How many jobs must end before this one starts; 0 once it has started."""
        return max(worker.ahead(stream) for worker in self._workers)

    @property
    def active(self) -> int:
        """How many jobs are open or waiting."""
        return sum(worker.active for worker in self._workers)

    def close(self, timeout: float | None = 10.0) -> None:
        """Stop every job and end every thread."""
        for worker in self._workers:
            worker.close(timeout)


T = TypeVar("T")

REPORT_INTERVAL_S = (
    0.1  # between two pieces of news: soon enough for the eye, and whoever shares the thread waits no longer
)


@dataclass(frozen=True)
class TaskProgress:
    """What is being done, in words, and how far it has come; `total` 0: that cannot be said."""

    text: str
    done: int = 0
    total: int = 0


ReportProgress = Callable[[TaskProgress], None]


class TaskCancelled(Exception):
    """Raised in the work itself, at the next thing it tells, once nobody waits for it."""


def ignore_progress(news: TaskProgress) -> None:
    """Told to nobody."""


class BackgroundTask(Generic[T]):
    """`work(tell)` in a thread of its own. `parked`: it runs only while `progress` is being advanced."""

    def __init__(self, work: Callable[[ReportProgress], T], parked: bool = False) -> None:
        self._work, self._parks = work, parked
        self._changed = threading.Condition()
        self._news: TaskProgress | None = None
        self._waits = self._over = self._given_up = False
        self._due = 0.0
        self._error: BaseException | None = None
        self._result: T | None = None
        self._thread = threading.Thread(target=self._run, name="errand", daemon=True)

    def progress(self) -> Iterator[TaskProgress]:
        """Start the work; news until it is over. Raises what it raised; closing gives it up."""
        self._thread.start()
        try:
            while True:
                with self._changed:
                    self._waits = False
                    self._changed.notify_all()
                    if self._parks:
                        self._changed.wait_for(lambda: self._waits or self._over)
                    else:
                        self._changed.wait_for(lambda: self._over, REPORT_INTERVAL_S)
                    news, over = self._news, self._over
                if over:
                    break
                if news is not None:
                    yield news
        finally:
            with self._changed:
                self._given_up = True
                self._changed.notify_all()
            if self._parks:
                self._thread.join()  # it has the device until it ends
        if self._error is not None:
            raise self._error

    @property
    def result(self) -> T:
        """What the work returned, once `progress` has come to its end."""
        assert self._over and self._error is None
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._work(self._tell)
        except BaseException as error:  # raised again where the work is waited for
            self._error = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _tell(self, news: TaskProgress) -> None:
        with self._changed:
            if self._given_up:
                raise TaskCancelled
            self._news = news
            if self._parks and time.monotonic() >= self._due:
                self._waits = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._waits or self._given_up)
                self._due = time.monotonic() + REPORT_INTERVAL_S
                if self._given_up:
                    raise TaskCancelled
