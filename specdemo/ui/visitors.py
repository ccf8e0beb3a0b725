"""Who may start a run now, and how long it may go on.

Knows addresses, runs that are over or not, and events of a trace; knows nothing of gradio or of the worker.
"""

from __future__ import annotations

import ipaddress
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from specdemo.core.errors import UserError
from specdemo.core.metrics import Metrics
from specdemo.generate import Record, ending
from specdemo.ui.limits import HostLimits


class TimeBudget:
    """The seconds that one request may decode, its lanes together, counted from its first header."""

    def __init__(self, seconds: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._deadline: float | None = None

    def spend(self, events: Generator[Record]) -> Iterator[Record]:
        """The events as they come; when the time is up, what there is so far and a last line that says so."""
        if self._seconds is None:
            yield from events
            return
        metrics = Metrics()
        for event in events:
            yield event
            if "phase" in event or "end" in event:
                continue
            if self._deadline is None:
                self._deadline = self._clock() + self._seconds
            if "i" in event:
                metrics.add_record(event)
            if self._clock() >= self._deadline:
                events.close()
                yield ending("cancelled", metrics, f"a run may take {self._seconds} seconds here, and they are over")


class Ends(Protocol):
    """What is known of a run that somebody started."""

    @property
    def done(self) -> bool:
        """Whether it is over."""


class Visitors:
    """Who started what in the last minute. A visitor is an address; of IPv6 a whole /64, which is one household."""

    def __init__(self, limits: HostLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._runs: dict[str, deque[tuple[float, Ends]]] = {}

    def admit(self, address: str) -> None:
        """`UserError` if this visitor has to wait before starting one more."""
        now, limits = self._clock(), self._limits
        self._forget(now)
        runs = self._runs.get(_household(address), ())
        going = sum(not run.done for _, run in runs)
        if limits.at_once is not None and going >= limits.at_once:
            runs_of = "1 run" if going == 1 else f"{going} runs"
            raise UserError(f"you have {runs_of} going already: stop one, or wait for its end")
        late = [start for start, _ in runs if start > now - 60]
        if limits.per_minute is not None and len(late) >= limits.per_minute:
            wait = late[-limits.per_minute] + 60 - now
            raise UserError(f"{limits.per_minute} runs a minute are allowed here: try again in {wait:.0f} s")

    def entered(self, address: str, run: Ends) -> None:
        """This visitor started one."""
        self._runs.setdefault(_household(address), deque()).append((self._clock(), run))

    def _forget(self, now: float) -> None:
        """Drop runs that are over and a minute old, and visitors without any."""
        for who, runs in list(self._runs.items()):
            kept = deque((start, run) for start, run in runs if start > now - 60 or not run.done)
            if kept:
                self._runs[who] = kept
            else:
                del self._runs[who]

    def __len__(self) -> int:
        return len(self._runs)


def _household(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 6 and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found if found.version == 4 else found.ipv4_mapped)
