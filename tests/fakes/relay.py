"""TCP relay that ends the connection at a chosen message, as a killed service does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class Relay:
    """Relay to `url`. After `cut`, all connections are ended and new ones are refused."""

    def __init__(self, url: str, is_last: Callable[[str, int], bool]) -> None:
        """`is_last(direction, number)`: cut at this message; `direction` is "request" or "response".

        Messages count once `counting` is set.
        """
        self._target = urlsplit(url).hostname, urlsplit(url).port
        self._is_last = is_last
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
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()

    def redirect(self, url: str) -> None:
        """End all connections; relay new ones to `url`."""
        with self._lock:
            self._target = urlsplit(url).hostname, urlsplit(url).port
            for connection in self._sockets:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
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
                if self.counting and self._is_last(direction, self.counts[direction]):
                    self.cut()
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def relay(url: str, is_last: Callable[[str, int], bool] = lambda direction, number: False) -> Iterator[Relay]:
    opened = Relay(url, is_last)
    try:
        yield opened
    finally:
        opened.cut()
