"""TCP relay between a client and a service, with faults: cut, dropped, delayed, repeated, damaged and withheld data.

A reverse proxy that serves a page below a path is a relay that changes requests.
"""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

DELAY_S = 0.2
Fault = Callable[[str, int, bytes], bytes]  # direction, number and data of a message; data to forward instead


class Cut(Exception):
    """All connections end and new ones are refused, as after the end of a service."""


class Dropped(Exception):
    """The connection ends after the data of this exception."""


class Relay:
    """Relay to `url`. Messages count while `counting` is set; the direction is "request" or "response"."""

    def __init__(self, url: str, fault: Fault) -> None:
        self._target = urlsplit(url).hostname, urlsplit(url).port
        self._fault = fault
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.counts = {"request": 0, "response": 0}
        self.is_cut = self.counting = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            for connection in (self._listener, *self._sockets):
                _end(connection)
                connection.close()

    def redirect(self, url: str) -> None:
        """End all connections; relay new ones to `url`."""
        with self._lock:
            self._target = urlsplit(url).hostname, urlsplit(url).port
            for connection in self._sockets:
                _end(connection)
            self._sockets.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self.is_cut:
                    client.close()
                    return
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for connection in (client, server):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pair in ((client, server, "request"), (server, client, "response")):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                self.counts[direction] += self.counting
                try:
                    sink.sendall(self._fault(direction, self.counts[direction], data) if self.counting else data)
                except Cut:
                    self.cut()
                    return
                except Dropped as dropped:
                    sink.sendall(b"".join(dropped.args))
                    for connection in (source, sink):
                        _end(connection)
            sink.shutdown(socket.SHUT_WR)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(url: str, fault: Fault = lambda direction, number, data: data) -> Iterator[Relay]:
    opened = Relay(url, fault)
    try:
        yield opened
    finally:
        opened.cut()


def cut_at(direction: str, number: int) -> Fault:

    def fault(at: str, count: int, data: bytes) -> bytes:
        if (at, count) == (direction, number):
            raise Cut
        return data

    return fault


class Faults:
    """Fault in a `share` of the messages after the first `spared` ones; `count`: injected faults."""

    def __init__(self, name: str, seed: int, share: float = 0.15, spared: int = 6) -> None:
        self._change, self._rng = getattr(self, name), random.Random(seed)
        self._share, self._spared, self._seen, self.count = share, spared, 0, 0
        self._lock = threading.Lock()

    def __call__(self, direction: str, number: int, data: bytes) -> bytes:
        with self._lock:
            self._seen += 1
            hit = self._seen > self._spared and self._rng.random() < self._share
            self.count += hit
        return self._change(data) if hit else data

    def drop(self, data: bytes) -> bytes:
        raise Dropped

    def truncate(self, data: bytes) -> bytes:
        raise Dropped(data[: self._rng.randrange(len(data))])

    def delay(self, data: bytes) -> bytes:
        threading.Event().wait(DELAY_S)
        return data

    def duplicate(self, data: bytes) -> bytes:
        return data + data

    def corrupt(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def withhold(self, data: bytes) -> bytes:
        """Forward no data and keep both connections open, like a host that lost its network."""
        return b""


@dataclass(frozen=True)
class Proxy:
    """Configuration of a proxy. Requests outside `path` reach a page that does not exist."""

    path: str = "/demo"
    strips: bool = True
    passes_host: bool = True
    forwards: bool = False  # sends the headers X-Forwarded

    def request(self, data: bytes, own: str, upstream: str) -> bytes:
        """Return the data of a client as sent to the page; only the head of a request is changed."""
        head, blank, body = data.decode("latin-1").partition("\r\n\r\n")
        line, *headers = head.split("\r\n")
        if not line.endswith(" HTTP/1.1"):
            return data
        method, target, version = line.split(" ")
        if not f"{target}/".startswith(f"{self.path}/"):
            target = "/outside"
        elif self.strips:
            target = target.removeprefix(self.path) or "/"
        if not self.passes_host:
            headers = [header for header in headers if not header.lower().startswith("host:")]
            headers.append(f"Host: {upstream}")
        if self.forwards:
            values = {"Host": own, "Proto": "http", "Prefix": self.path, "For": "192.0.2.7"}
            headers += [f"X-Forwarded-{name}: {value}" for name, value in values.items()]
        return ("\r\n".join([f"{method} {target} {version}", *headers]) + blank + body).encode("latin-1")


@contextmanager
def proxied(url: str, proxy: Proxy) -> Iterator[str]:
    """Yield the address of the page `url` behind the proxy, with a final slash."""

    def change(direction: str, _: int, data: bytes) -> bytes:
        own = urlsplit(opened.url).netloc
        return proxy.request(data, own, urlsplit(url).netloc) if direction == "request" else data

    with relay(url, change) as opened:
        opened.counting = True
        yield f"{opened.url}{proxy.path}/"
