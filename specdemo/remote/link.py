"""The wire as an edge sees it: every byte counted, and if asked for, a worse link than there is, to study.

Works below HTTP, on the bytes that are written and read. Knows no messages.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpcore


@dataclass(frozen=True)
class LinkEmulation:
    """What is added to the link that there is. A lost message is one that never comes: its sender waits in vain."""

    rtt_s: float = 0.0
    jitter_s: float = 0.0  # added to each way, uniformly from 0 to this
    loss: float = 0.0  # of messages, each way
    up_bps: float = 0.0  # bits per second; 0: no limit of its own
    down_bps: float = 0.0
    seed: int = 0


@dataclass
class ByteCounts:
    """Bytes that went each way: HTTP with its headers, without what TCP and TLS put around it."""

    up: int = 0
    down: int = 0
    up_s: float = 0.0  # seconds until all was written, the emulated way included
    down_s: float = 0.0  # from the first byte of an answer to its last, likewise


class MeteredNetwork(httpcore.NetworkBackend):
    """Connections over TCP whose bytes are counted in `tally` and delayed, slowed down and lost as `link` says."""

    def __init__(
        self,
        link: LinkEmulation | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
        inner: httpcore.NetworkBackend | None = None,
    ) -> None:
        self.tally = ByteCounts()
        self.link = link or LinkEmulation()
        self.pause, self.clock = sleep, clock
        self.rng = random.Random(self.link.seed)
        self._inner = inner or httpcore.SyncBackend()

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, **options: Any) -> httpcore.NetworkStream:
        """A connection; its handshake takes a round trip."""
        stream = self._inner.connect_tcp(host, port, timeout, **options)
        self.pause(self.link.rtt_s)
        return MeteredStream(self, stream)

    def delay(self) -> float:
        """Seconds that a message takes one way."""
        return self.link.rtt_s / 2 + self.link.jitter_s * self.rng.random()

    def lost(self) -> bool:
        """Whether the next message is."""
        return self.rng.random() < self.link.loss


class MeteredStream(httpcore.NetworkStream):
    """One connection. A message is all that is written, or read, before the direction turns."""

    def __init__(self, wire: MeteredNetwork, inner: httpcore.NetworkStream) -> None:
        self._wire, self._inner = wire, inner
        self._sending = self._dead = False

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send, after what the way up takes."""
        wire, link = self._wire, self._wire.link
        began = wire.clock()
        wire.tally.up += len(buffer)
        seconds = 8 * len(buffer) / link.up_bps if link.up_bps else 0.0
        if not self._sending:
            self._sending, self._dead = True, wire.lost()
            seconds += wire.delay()
        if seconds:
            wire.pause(seconds)
        if not self._dead:
            self._inner.write(buffer, timeout)
        wire.tally.up_s += wire.clock() - began

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Receive, after what the way down takes. What is lost, or comes too late, raises as a silent peer would."""
        wire, link = self._wire, self._wire.link
        began = wire.clock()
        first, self._sending = self._sending, False
        data = b"" if self._dead else self._inner.read(max_bytes, timeout)
        arrived = wire.clock() if first else began
        seconds = 8 * len(data) / link.down_bps if link.down_bps else 0.0
        if first and not self._dead:
            self._dead = wire.lost()
            seconds += wire.delay()
        left = None if timeout is None else max(0.0, timeout - (wire.clock() - began))
        if left is not None and (self._dead or seconds > left):
            wire.pause(left)
            raise httpcore.ReadTimeout("timed out")
        if seconds:
            wire.pause(seconds)
        wire.tally.down += len(data)
        wire.tally.down_s += wire.clock() - arrived
        return data

    def close(self) -> None:
        """Hang up."""
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> MeteredStream:
        """The same connection under TLS: what is counted is what is inside."""
        return MeteredStream(self._wire, self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        """What the connection itself knows."""
        return self._inner.get_extra_info(info)
