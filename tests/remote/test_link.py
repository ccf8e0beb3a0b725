"""Byte counts and emulated links; closed forms with a round trip."""

from __future__ import annotations

from typing import Any

import httpcore
import pytest

from specdemo.core.errors import UserError
from specdemo.remote.link import HttpClient, LinkEmulation, MeteredNetwork, ServiceDown
from specdemo.remote.protocol import ReadyResponse


class Echo(httpcore.NetworkStream):
    """Count written bytes; return 10 bytes per read."""

    def __init__(self) -> None:
        self.received = 0

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.received += len(buffer)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return b"x" * 10

    def close(self) -> None: ...


class Backend(httpcore.NetworkBackend):
    def connect_tcp(self, *args: Any, **options: Any) -> Echo:
        self.stream = Echo()
        return self.stream


def emulated(**link: Any) -> tuple[MeteredNetwork, httpcore.NetworkStream, Echo, list[float]]:
    now, inner = [0.0], Backend()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    network = MeteredNetwork(LinkEmulation(**link), sleep, lambda: now[0], inner)
    return network, network.connect_tcp("cloud", 1), inner.stream, now


def test_bytes_and_round_trips_are_counted() -> None:
    network, stream, _, now = emulated(rtt_s=0.1)
    assert now[0] == pytest.approx(0.1)  # the handshake
    stream.write(b"a" * 30)
    stream.write(b"b" * 5)
    assert stream.read(100) + stream.read(100) == b"x" * 20
    assert (network.counts.up, network.counts.down) == (35, 20) and now[0] == pytest.approx(0.2)


def test_lost_messages_time_out() -> None:
    """With 30 % loss each way, 51 % of the exchanges time out."""
    failed = reached = 0
    for seed in range(400):
        _, stream, inner, now = emulated(loss=0.3, seed=seed)
        stream.write(b"a" * 7)
        try:
            stream.read(10, timeout=0.4)
        except httpcore.ReadTimeout:
            failed += 1
            assert now[0] == pytest.approx(0.4)
        reached += inner.received > 0
    assert 0.41 < failed / 400 < 0.61 and 0.6 < reached / 400 < 0.8  # four standard deviations


def test_late_responses_time_out() -> None:
    _, stream, inner, now = emulated(rtt_s=1.0)
    stream.write(b"a")
    with pytest.raises(httpcore.ReadTimeout):
        stream.read(10, timeout=0.4)
    assert now[0] == pytest.approx(1.0 + 0.5 + 0.4) and inner.received == 1


class Scripted(httpcore.NetworkBackend):
    """Service with prepared responses, one per request."""

    def __init__(self, *responses: tuple[int, bytes]) -> None:
        self.responses, self.connections = [*responses], 0

    def connect_tcp(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        self.connections += 1
        scripted = self

        class Stream(Echo):
            def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
                status, body = scripted.responses.pop(0)
                return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)

        return Stream()


DAMAGED = ((200, b"{"), (400, b"Invalid HTTP request received."), (422, b'{"error": "no JSON", "code": "unreadable"}'))


def test_damaged_messages_are_repeated_on_a_new_connection() -> None:
    """After the first response, and at most four times in succession."""
    valid = (200, b"{}")
    http = HttpClient("http://cloud:1")
    http.network.inner = service = Scripted(DAMAGED[0], valid, *DAMAGED, valid, valid, *(DAMAGED * 2)[:5])

    def call() -> ReadyResponse:
        return http.call("GET", "/v1/ready", None, ReadyResponse, 1.0)

    with pytest.raises(UserError, match="is not a specdemo service of this version"):
        call()
    call()
    for _ in DAMAGED:
        with pytest.raises(ServiceDown):
            call()
    call()
    call()
    assert service.connections == 5
    for _ in range(4):
        with pytest.raises(ServiceDown):
            call()
    with pytest.raises(UserError, match="rejected the request: status 400"):
        call()
    assert not service.responses
