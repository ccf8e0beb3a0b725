"""Rate limits per visitor, and the time budget of a request."""

from __future__ import annotations

import ipaddress
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from specdemo.core.errors import UserError
from specdemo.core.events import End, Event, Header, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.ui.limits import HostLimits


class TimeBudget:
    """Decoding seconds of a request, shared by its lanes, from the first header on."""

    def __init__(self, seconds: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._deadline: float | None = None

    def spend(self, events: Generator[Event]) -> Iterator[Event]:
        """Pass the events on; when the time is over, close them and yield an `End`."""
        if self._seconds is None:
            yield from events
            return
        metrics = Metrics()
        for event in events:
            yield event
            if not isinstance(event, (Header, StepEvent)):
                continue
            if self._deadline is None:
                self._deadline = self._clock() + self._seconds
            if isinstance(event, StepEvent):
                metrics = event.metrics
            if self._clock() >= self._deadline:
                events.close()
                yield End("cancelled", f"the time limit of {self._seconds} seconds per run is reached", metrics)


class Finishing(Protocol):
    @property
    def done(self) -> bool: ...


class Visitors:
    """Runs of the last minute by visitor: an IPv4 address, or an IPv6 /64 network."""

    def __init__(self, limits: HostLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._runs: dict[str, deque[tuple[float, Finishing]]] = {}

    def admit(self, address: str) -> None:
        now, limits = self._clock(), self._limits
        self._forget(now)
        runs = self._runs.get(_household(address), ())
        active = sum(not run.done for _, run in runs)
        if limits.at_once is not None and active >= limits.at_once:
            count = "1 run" if active == 1 else f"{active} runs"
            raise UserError(f"you already have {count} in progress: stop one, or wait until it ends")
        recent = [start for start, _ in runs if start > now - 60]
        if limits.per_minute is not None and len(recent) >= limits.per_minute:
            wait = recent[-limits.per_minute] + 60 - now
            raise UserError(f"this host allows {limits.per_minute} runs per minute: try again in {wait:.0f} s")

    def entered(self, address: str, run: Finishing) -> None:
        self._runs.setdefault(_household(address), deque()).append((self._clock(), run))

    def _forget(self, now: float) -> None:
        for visitor, runs in list(self._runs.items()):
            recent = deque((start, run) for start, run in runs if start > now - 60 or not run.done)
            if recent:
                self._runs[visitor] = recent
            else:
                del self._runs[visitor]

    def __len__(self) -> int:
        return len(self._runs)


def _household(address: str) -> str:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 6 and ip.ipv4_mapped is None:
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip if ip.version == 4 else ip.ipv4_mapped)
