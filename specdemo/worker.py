"""Scheduling of jobs on a device.

Jobs are functions that return iterators. They alternate after each step, release the device to wait, and share passes.
Any thread may use a job's `Stream`.
"""

from __future__ import annotations

import contextvars
import math
import threading
import time
import traceback
from bisect import insort
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from specdemo.native.interface import StopFlag
from specdemo.shared_passes import PassRequest, RunEntries, SharedPassRecord, choose_requests

T = TypeVar("T")

MOST_TEXTS = 64
_LEAD_S = 0.05  # device time that a job may be ahead of others
_OPEN_PER_ACTIVE = 4  # open jobs per active job, including jobs that wait
_SIGNAL_CHECK_S = 0.5
_current: contextvars.ContextVar[Stream[Any] | None] = contextvars.ContextVar("current job", default=None)


class WorkerBusy(RuntimeError):
    """The job queue is full."""


class Stopped(Exception):
    """A job was stopped during a blocking call."""


def run_in_thread(call: Callable[[], T]) -> Future[T]:
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # `Future.result` raises it again
            result.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return result


@contextmanager
def device_released() -> Iterator[None]:
    """Let other jobs use the device within the block, which is not part of the job. Call without locks."""
    stream = _current.get()
    if stream is None:  # the caller is not in a job
        yield
        return
    stream.worker.release(stream, waiting=True)
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)
        stream.worker.acquire(stream)


def wait_for(future: Future[Any], timeout: float | None = None) -> bool:
    """Wait without the device; return False after `timeout`. Raise `Stopped` if the job is stopped."""
    stream = _current.get()
    if stream is None:  # wait in parts: a signal that arrives just before a wait does not end it
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not future.done() and (rest := deadline - time.monotonic()) > 0:
            wait({future}, min(rest, _SIGNAL_CHECK_S))
        return future.done()
    with device_released():
        wait({future, stream.stop_request}, timeout, return_when=FIRST_COMPLETED)
    if not future.done() and stream.stopping:
        raise Stopped
    return future.done()


def interruptible(call: Callable[[], T]) -> T:
    """Run the blocking `call()` without the device. Raise `Stopped` if the job is stopped meanwhile."""
    if _current.get() is None:
        return call()
    result = run_in_thread(call)
    wait_for(result)
    return result.result()


def yield_device() -> None:
    """Let other jobs advance. Raise `Stopped` if stopped."""
    stream = _current.get()
    if stream is None:
        return
    if stream.stopping:
        raise Stopped
    stream.worker.release(stream, waiting=False)
    stream.worker.acquire(stream)


def stop_flag() -> StopFlag | None:
    """Return the flag that ends the passes of the current job, None outside jobs."""
    stream = _current.get()
    return None if stream is None else stream.stop_flag


def shared_pass(run: RunEntries, entry: Any, rows: int) -> Any:
    """Return `run([entry])[0]`; `run` may get the entries of other jobs as well. Raise `Stopped` if stopped."""
    stream = _current.get()
    if stream is None or not stream.shares_passes:
        return run([entry])[0]
    request = PassRequest(run, entry, rows)
    while group := stream.worker.next_group(stream, request):
        _current.set(stream if len(group) == 1 else None)  # other texts ignore the stop flag of this job
        start = stream.worker.clock()
        try:
            for member, result in zip(group, run([member.entry for member in group]), strict=True):
                member.result = result
                member.done = True
        except Exception:
            if len(group) == 1:
                raise
            for member in group:  # its own pass raises the error of a text
                member.alone = True
        finally:
            _current.set(stream)
            stream.worker.end_pass(stream, group, start)
    return request.result


def last_pass() -> SharedPassRecord | None:
    """Return the last pass of the current job, None if it was not shared."""
    stream = _current.get()
    return None if stream is None else stream.last_pass


@contextmanager
def unshared_passes() -> Iterator[None]:
    """Run the passes of the current job alone."""
    stream = _current.get()
    if stream is None:
        yield
        return
    before, stream.shares_passes = stream.shares_passes, False
    try:
        yield
    finally:
        stream.shares_passes = before


def job_clock() -> float:
    """Return the time in seconds, without waits of the current job for shared passes."""
    stream = _current.get()
    return time.perf_counter() - (0.0 if stream is None else stream.waited_s)


class Stream(Generic[T]):
    """Append-only results of a job. Read `done` before `items` to get the last items."""

    def __init__(self, worker: Worker, job: Callable[[], Iterator[T]], owner: str = "") -> None:
        self.items: list[T] = []
        self.error: BaseException | None = None
        self.started = False
        self.owner = owner
        self.worker = worker
        self._job: Callable[[], Iterator[T]] | None = job
        self._steps: Iterator[T] | None = None
        self._context: contextvars.Context | None = contextvars.copy_context()
        self._context.run(_current.set, self)
        self.stop_request: Future[None] = Future()
        self.stop_flag = StopFlag()
        self.shares_passes = True
        self.waited_s = 0.0
        self.last_pass: SharedPassRecord | None = None  # last pass, if shared
        self._done = threading.Event()
        self._on_change: Callable[[], object] = lambda: None
        # State of the schedule, guarded by the lock of the worker.
        self.device_turn = threading.Condition(worker.lock)
        self.round = 0
        self.used_s = 0.0  # device time in seconds
        self.waiting = False
        self.shares = False
        self.request: PassRequest | None = None

    @property
    def done(self) -> bool:
        """True after the job's `finally` blocks."""
        return self._done.is_set()

    @property
    def stopping(self) -> bool:
        return self.stop_request.done()

    def stop(self) -> None:
        """End the pass under way, and the job before its next step."""
        self.stop_flag.set()
        with suppress(InvalidStateError):  # the job is already stopped
            self.stop_request.set_result(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the job ends. Return False after `timeout` seconds."""
        return self._done.wait(timeout)

    def listen(self, on_change: Callable[[], object]) -> None:
        """Call `on_change` after each item, at the end, and when the queue changes."""
        self._on_change = on_change

    # --- called by the worker ----------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if the job can advance without a pass."""
        return self.request is None or self.request.done or self.stopping

    def advance(self) -> bool:
        """Run a step; return False at the end of the job."""
        assert self._job is not None and self._context is not None
        try:
            if not self.stopping:
                if self._steps is None:
                    self.started = True
                    self._steps = iter(self._context.run(self._job))
                self.items.append(self._context.run(next, self._steps))
                return True
            close = getattr(self._steps, "close", None)
            if close is not None:
                self._context.run(close)
        except (StopIteration, Stopped):
            pass
        except BaseException as error:
            _release_locals(error)
            self.error = error
        self._job = self._steps = self._context = None  # free memory before `done` is visible
        return False

    def finish(self) -> None:
        self._done.set()
        self.notify()

    def notify(self) -> None:
        self._on_change()


def _release_locals(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


async def read_batches(stream: Stream[T], interval_s: float = 0.0) -> AsyncGenerator[list[T]]:
    """Yield new items of a job, at most every `interval_s` seconds; none if its place in the queue changed.

    Closing the iterator stops the job.
    """
    import asyncio  # slow, and not needed by the commands

    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(changed.set)

    count = 0
    stream.listen(notify)
    try:
        while True:
            changed.clear()
            done = stream.done  # read first: items are appended before a stream is done
            items = stream.items[count:]
            count += len(items)
            yield items
            if done:
                return
            await asyncio.sleep(interval_s)
            await changed.wait()
    finally:
        if not stream.done:
            stream.stop()


class Worker:
    """Device with at most `at_once` active and `waiting` queued jobs. Jobs have threads and use the device in turns.

    A job that waits within a step leaves the device to others. Up to `texts` jobs are active if they share passes and
    `has_memory`.
    """

    def __init__(
        self,
        at_once: int = 4,
        waiting: int | None = 32,
        clock: Callable[[], float] = time.monotonic,
        prepare: Callable[[], object] = lambda: None,
        texts: int = 1,
        has_memory: Callable[[], bool] = lambda: True,
    ) -> None:
        """`prepare` starts the thread of each job."""
        self.lock = threading.RLock()
        self._prepare = prepare
        self._max_active, self._max_queued = at_once, waiting
        self._has_memory = has_memory
        self.clock = clock
        self.texts_per_pass: Counter[int] = Counter()  # number of passes by texts
        self._most_texts = texts
        self._pass_ended = 0.0  # end of the last pass
        self._queued: list[Stream[Any]] = []  # queued jobs in starting order
        self._round = 0  # round of the last opened job
        self._rounds: dict[str, int] = {}  # round of the last job by owner
        self._open: deque[Stream[Any]] = deque()  # open jobs, least recently advanced first
        self._active_job: Stream[Any] | None = None
        self._held_since = self._least_used_s = self._advanced_at = 0.0
        self._ended = threading.Condition(self.lock)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, job: Callable[[], Iterator[T]], owner: str = "") -> Stream[T]:
        """Queue a job; owners start jobs in turn. Raise `WorkerBusy`, or `RuntimeError` after `close`."""
        stream: Stream[T] = Stream(self, job, owner)
        with self.lock:
            if self._closed:
                raise RuntimeError("The worker is closed.")
            if self._max_queued is not None and len(self._queued) >= self._max_queued:
                raise WorkerBusy(f"{len(self._queued)} runs are waiting already: try again in a minute.")
            if not self.active:
                self._advanced_at = self.clock()
            self._enqueue(stream)
            self._assign_device()
        stream.stop_request.add_done_callback(lambda _: self._stopped(stream))
        return stream

    def ahead(self, stream: Stream[Any]) -> int:
        """Number of jobs that start or end first."""
        with self.lock:
            return self._queued.index(stream) + (not self._has_slot) if stream in self._queued else 0

    @property
    def active(self) -> int:
        with self.lock:
            return len(self._open) + len(self._queued)

    @property
    def stalled_s(self) -> float:
        """Seconds since a job advanced, or since the first one was submitted; 0 without jobs."""
        with self.lock:
            return self.clock() - self._advanced_at if self.active else 0.0

    def close(self, timeout: float | None = 10.0, drain_s: float = 0.0) -> None:
        """Refuse jobs, wait `drain_s` for submitted jobs, stop the others, and wait for their ends."""
        with self.lock:
            self._closed = True
            if drain_s:
                self._ended.wait_for(lambda: not self._threads, drain_s)
            for job in (*self._open, *self._queued):
                job.stop()
            threads = list(self._threads)
            if threading.current_thread() in threads:
                return
            if not self._ended.wait_for(lambda: not self._threads, timeout):
                return
        for thread in threads:
            thread.join()

    def release(self, stream: Stream[Any], waiting: bool) -> None:
        """Give the device to other jobs, within a step of `stream`."""
        with self.lock:
            stream.waiting = waiting
            self._yield_device()

    def acquire(self, stream: Stream[Any]) -> None:
        """Block until `stream` has the device again."""
        with self.lock:
            if stream.waiting:
                stream.waiting = False
                stream.used_s = max(stream.used_s, self._least_used_s)
                self._assign_device()
            self._await_turn(stream)

    def next_group(self, stream: Stream[Any], request: PassRequest) -> list[PassRequest]:
        """Return the requests that `stream` runs in a pass with its `request`; none if `request` is done.

        With other jobs, it waits for its next turn; another job may run `request` meanwhile.
        """
        if request.done:
            return []
        stream.last_pass = None
        with self.lock:
            if not any(other.shares for other in self._open):
                self._pass_ended = self.clock()
            stream.shares = self._most_texts > 1
            if not stream.shares or (len(self._open) == 1 and not self._queued):
                return [request]
            began, charged_s = self.clock(), request.seconds
            stream.request = request
            self._yield_device()
            self._await_turn(stream)
            stream.waited_s += self.clock() - began - (request.seconds - charged_s)
            if request.done:
                return []
            if stream.stopping:
                raise Stopped
            waiting = (job.request for job in self._open if job.request is not None and not job.ready)
            others = (other for other in waiting if other is not request)
            return choose_requests(request, others, self._most_texts)

    def end_pass(self, stream: Stream[Any], group: Sequence[PassRequest], start: float) -> None:
        """Charge each text of `group` the duration of the pass that `stream` ran since `start`."""
        stream.request = None
        between_s = start - self._pass_ended
        self._pass_ended = self.clock()
        seconds = self._pass_ended - start
        for request in group:
            request.seconds += seconds
        self.texts_per_pass[len(group)] += 1
        if len(group) == 1:
            return
        rows = sum(request.rows for request in group)
        load = stream.last_pass = SharedPassRecord(len(group), rows, seconds, between_s)
        with self.lock:
            for job in self._open:
                if job.request in group:
                    job.last_pass = load
                    job.used_s += load.seconds

    def _run(self, stream: Stream[Any]) -> None:
        """Thread of a job."""
        self._prepare()
        has_next = True
        with self.lock:
            self._await_turn(stream)
        while has_next:
            has_next = stream.advance()
            if has_next:
                stream.notify()
            with self.lock:
                self._advanced_at = self.clock()
                if not has_next:
                    self._open.remove(stream)
                self._yield_device()
                if has_next:
                    self._await_turn(stream)
        stream.finish()
        with self.lock:
            self._threads.remove(threading.current_thread())
            self._ended.notify_all()

    def _stopped(self, stream: Stream[Any]) -> None:
        """End a queued job. A job that waits for a pass can advance."""
        with self.lock:
            is_queued = stream in self._queued
            if is_queued:
                self._leave_queue(stream)
            self._assign_device()
        if is_queued:
            stream.advance()
            stream.finish()

    # --- methods called with the lock ---------------------------------------------------------------------------------

    @property
    def _has_slot(self) -> bool:
        active = sum(not job.waiting for job in self._open)
        alone = [job for job in self._open if job.waiting or not job.shares]
        if len(alone) >= _OPEN_PER_ACTIVE * self._max_active:
            return False
        if sum(not job.waiting for job in alone) >= self._max_active:
            return False
        return active < self._max_active or (active < self._most_texts and self._has_memory())

    def _enqueue(self, stream: Stream[Any]) -> None:
        """Insert a job into the queue (start-time fair queueing)."""
        stream.round = self._round
        if stream.owner:
            self._rounds = {owner: n for owner, n in self._rounds.items() if n >= self._round}
            self._rounds[stream.owner] = stream.round = self._rounds.get(stream.owner, self._round - 1) + 1
        insort(self._queued, stream, key=lambda queued: queued.round)

    def _leave_queue(self, stream: Stream[Any]) -> None:
        self._queued.remove(stream)
        for queued in self._queued:
            queued.notify()

    def _open_next(self) -> None:
        stream = self._queued[0]
        self._leave_queue(stream)
        self._round = max(self._round, stream.round)
        stream.used_s = self._least_used_s
        self._open.append(stream)
        thread = threading.Thread(target=self._run, args=(stream,), name="device", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _assign_device(self) -> None:
        """Give a free device to a job."""
        if self._active_job is not None:
            return
        self._least_used_s = min((job.used_s for job in self._open if not job.waiting), default=self._least_used_s)
        while self._queued and self._has_slot:
            self._open_next()
        usable = [job for job in self._open if not job.waiting]
        if not usable:
            return
        fair = [job for job in usable if job.used_s - self._least_used_s <= _LEAD_S]
        last = fair[-1]
        chosen = last if last.shares and last.ready else fair[0]  # a job that shares passes continues up to the next
        self._open.remove(chosen)
        self._open.append(chosen)
        self._active_job, self._held_since = chosen, self.clock()
        chosen.device_turn.notify()

    def _await_turn(self, stream: Stream[Any]) -> None:
        stream.device_turn.wait_for(lambda: self._active_job is stream)

    def _yield_device(self) -> None:
        if self._active_job is not None:
            self._active_job.used_s += self.clock() - self._held_since
            self._active_job = None
        self._assign_device()
