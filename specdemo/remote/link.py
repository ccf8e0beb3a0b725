"""Byte counts and link emulation below HTTP."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpcore


@dataclass(frozen=True)
class LinkEmulation:
    """Delay, loss and bandwidth added to the real link; lost messages time out."""

    rtt_s: float = 0.0
    jitter_s: float = 0.0  # each way, uniform maximum
    loss: float = 0.0  # share, each way
    up_bps: float = 0.0  # bits per second; 0: unlimited
    down_bps: float = 0.0
    seed: int = 0


@dataclass
class ByteCounts:
    """Traffic of HTTP messages with headers, without TCP and TLS."""

    up: int = 0
    down: int = 0
    up_s: float = 0.0  # includes emulated delay
    down_s: float = 0.0  # first to last byte of responses


class MeteredNetwork(httpcore.NetworkBackend):
    def __init__(
        self,
        link: LinkEmulation | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
        inner: httpcore.NetworkBackend | None = None,
    ) -> None:
        self.counts = ByteCounts()
        self.link = link or LinkEmulation()
        self.sleep, self.clock = sleep, clock
        self._rng = random.Random(self.link.seed)
        self._inner = inner or httpcore.SyncBackend()

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, **options: Any) -> httpcore.NetworkStream:
        """Connect, delayed by a round trip."""
        stream = self._inner.connect_tcp(host, port, timeout, **options)
        self.sleep(self.link.rtt_s)
        return MeteredStream(self, stream)

    def one_way_delay(self) -> float:
        return self.link.rtt_s / 2 + self.link.jitter_s * self._rng.random()

    def is_lost(self) -> bool:
        return self._rng.random() < self.link.loss


class MeteredStream(httpcore.NetworkStream):
    """Connection; consecutive writes or consecutive reads form a message."""

    def __init__(self, network: MeteredNetwork, inner: httpcore.NetworkStream) -> None:
        self._network, self._inner = network, inner
        self._sending = self._dead = False

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        network, link = self._network, self._network.link
        start = network.clock()
        network.counts.up += len(buffer)
        seconds = 8 * len(buffer) / link.up_bps if link.up_bps else 0.0
        if not self._sending:
            self._sending, self._dead = True, network.is_lost()
            seconds += network.one_way_delay()
        if seconds:
            network.sleep(seconds)
        if not self._dead:
            self._inner.write(buffer, timeout)
        network.counts.up_s += network.clock() - start

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Receive; raise `ReadTimeout` for lost and late messages."""
        network, link = self._network, self._network.link
        start = network.clock()
        first, self._sending = self._sending, False
        data = b"" if self._dead else self._inner.read(max_bytes, timeout)
        arrived = network.clock() if first else start
        seconds = 8 * len(data) / link.down_bps if link.down_bps else 0.0
        if first and not self._dead:
            self._dead = network.is_lost()
            seconds += network.one_way_delay()
        left = None if timeout is None else max(0.0, timeout - (network.clock() - start))
        if left is not None and (self._dead or seconds > left):
            network.sleep(left)
            raise httpcore.ReadTimeout("timed out")
        if seconds:
            network.sleep(seconds)
        network.counts.down += len(data)
        network.counts.down_s += network.clock() - arrived
        return data

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> MeteredStream:
        """Count bytes before encryption."""
        return MeteredStream(self._network, self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
