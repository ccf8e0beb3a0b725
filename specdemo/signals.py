"""Handlers of termination signals."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from specdemo.native.build import compiler_processes


class Terminated(KeyboardInterrupt):
    """SIGTERM was received."""


def interrupt(number: int, frame: Any) -> None:
    """Raise `KeyboardInterrupt`, for SIGTERM its subclass `Terminated`."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def exit_at_once(number: int, frame: Any) -> NoReturn:
    """End the process before any part needs closing."""
    os._exit(130)


@contextmanager
def handle_signals(handler: Callable[[int, Any], Any], *signals: signal.Signals) -> Iterator[None]:
    """Call `handler` for the first of `signals`, even if ignored by the parent. The second ends the process.

    The first also ends a compilation.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: Any) -> None:
        for other in signals:
            signal.signal(other, signal.SIG_DFL)
        compiler_processes.stop()
        handler(number, frame)

    previous = {number: signal.signal(number, first) for number in signals}
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before or signal.SIG_DFL)
        compiler_processes.resume()


def exit_process(code: int) -> NoReturn:
    """Exit without waiting for threads of libraries, for example of a download, which may block for minutes."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader closed the pipe
            stream.flush()
    os._exit(code)
