"""Background tasks with progress, for downloads and loading."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Generic, TypeVar

from specdemo.core.events import Loading, ReportProgress
from specdemo.worker import device_released, run_in_thread, wait_for

T = TypeVar("T")

REPORT_INTERVAL_S = 0.1
_EXIT_S = 5.0
_running: set[Future[Any]] = set()


@atexit.register
def _await_tasks() -> None:
    """Wait for tasks at exit: a thread that returns from C++ after the end of the interpreter aborts the process."""
    wait(set(_running), _EXIT_S)


class TaskCancelled(Exception):
    """Exception raised by the reports of a cancelled task."""


class BackgroundTask(Generic[T]):
    """Run `work(report)` in a background thread. `cooperative`: use the device in slices, which end with a report."""

    def __init__(self, work: Callable[[ReportProgress], T], cooperative: bool = False, text: str = "") -> None:
        self._work, self._cooperative = work, cooperative
        self._changed = threading.Condition()
        self._latest = Loading(text) if text else None
        self._paused = self._cancelled = False
        self._may_run = True
        self._next_report = 0.0
        self._future: Future[T] | None = None

    def progress(self) -> Iterator[Loading]:
        """Start the task and yield new progress, initially `text`. Closing the iterator cancels the task."""
        future = self._future = run_in_thread(partial(self._work, self._report))
        _running.add(future)
        future.add_done_callback(_running.discard)
        future.add_done_callback(self._wake)
        shown = None
        try:
            while not future.done():
                if (latest := self._latest) is not None and latest is not shown:
                    shown = latest
                    yield shown
                if not (self._cooperative and self._run_slice(future)):
                    wait_for(future, REPORT_INTERVAL_S)
        finally:
            self._cancelled = True
            self._wake()
            if self._cooperative:
                with device_released():
                    wait({future})  # wait until the memory of the task is free
        future.result()

    @property
    def result(self) -> T:
        """Return value of the task, available when `progress` is exhausted."""
        assert self._future is not None and self._future.done()
        return self._future.result()

    def _run_slice(self, future: Future[T]) -> bool:
        with self._changed:
            self._may_run, self._paused = self._may_run or self._paused, False
            self._changed.notify_all()
            timeout = REPORT_INTERVAL_S if self._may_run else 0.0
            self._may_run = self._changed.wait_for(lambda: self._paused or future.done(), timeout)
            return self._may_run

    def _wake(self, _: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def _report(self, progress: Loading) -> None:
        with self._changed:
            if not self._cancelled:
                self._latest = progress
                if self._cooperative and time.monotonic() >= self._next_report:
                    self._paused = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._paused or self._cancelled)
                    self._next_report = time.monotonic() + REPORT_INTERVAL_S
            if self._cancelled:
                raise TaskCancelled
