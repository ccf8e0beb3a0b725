"""Handlers of termination signals."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from specdemo.worker import stop_flag


@contextmanager
def handle_signals(handler: Callable[[int, Any], Any], *signals: signal.Signals) -> Iterator[None]:
    """Call `handler` for the first of `signals`, even if ignored by the parent. The second ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: Any) -> None:
        for other in signals:
            signal.signal(other, signal.SIG_DFL)
        handler(number, frame)

    previous = {number: signal.signal(number, first) for number in signals}
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before or signal.SIG_DFL)


@contextmanager
def signals_end_passes() -> Iterator[None]:
    """End a pass of the main thread when SIGINT or SIGTERM arrives: Python's handlers wait for the end of C code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    flag, (reader, writer) = stop_flag(), socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while numbers := reader.recv(64):
            if {signal.SIGINT, signal.SIGTERM} & set(numbers):
                flag.set()

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        writer.close()
        watcher.join()
        reader.close()
        flag.clear()
