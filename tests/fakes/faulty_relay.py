"""TCP relay between a client and a service that drops, delays, duplicates, cuts off, corrupts or withholds data.

The server of toxiproxy is in none of the package registries of this project, so a relay in Python takes its place.
"""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

CHUNK = 1 << 16
DELAY_S = 0.2


class Dropped(Exception):
    """The relay resets the connection."""


Fault = Callable[[random.Random, bytes], bytes]  # data that the relay forwards instead


def drop(rng: random.Random, data: bytes) -> bytes:
    raise Dropped


def truncate(rng: random.Random, data: bytes) -> bytes:
    raise Dropped(data[: rng.randrange(len(data))])


def delay(rng: random.Random, data: bytes) -> bytes:
    threading.Event().wait(DELAY_S)
    return data


def duplicate(rng: random.Random, data: bytes) -> bytes:
    return data + data


def corrupt(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def withhold(rng: random.Random, data: bytes) -> bytes:
    """Forward no data and keep both connections open, like a host that lost its network."""
    return b""


FAULTS: dict[str, Fault] = {f.__name__: f for f in (drop, truncate, delay, duplicate, corrupt, withhold)}


@dataclass
class Relay:
    """Relay to a `service` address, with a fault in a `share` of the data after the first `spared` chunks."""

    service: tuple[str, int]
    fault: Fault
    share: float = 0.15
    spared: int = 6
    seed: int = 1
    count: int = 0  # injected faults
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    def __post_init__(self) -> None:
        self._rng, self._lock, self._chunks = random.Random(self.seed), threading.Lock(), 0

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def accept(self) -> None:
        """Relay connections until the listener is closed."""
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self.service) as server:
            other = {client: server, server: client}
            while True:
                for source in select.select([client, server], (), ())[0]:
                    data = source.recv(CHUNK)
                    if not data:
                        return
                    try:
                        other[source].sendall(self._faulty(data))
                    except Dropped as dropped:
                        other[source].sendall(b"".join(dropped.args))
                        return

    def _faulty(self, data: bytes) -> bytes:
        with self._lock:
            self._chunks += 1
            hit = self._chunks > self.spared and self._rng.random() < self.share
            self.count += hit
        return self.fault(self._rng, data) if hit else data


@contextmanager
def relayed(service: tuple[str, int], fault: Fault, **options: float) -> Iterator[Relay]:
    relay = Relay(service, fault, **options)
    thread = threading.Thread(target=relay.accept)
    thread.start()
    try:
        yield relay
    finally:
        relay.listener.shutdown(socket.SHUT_RDWR)
        relay.listener.close()
        thread.join()
