"""Termination signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handle_signals(handler: Callable[[int, Any], Any], *signals: signal.Signals) -> Iterator[None]:
    """Call `handler` for `signals`, even if ignored by the parent; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before or signal.SIG_DFL)
