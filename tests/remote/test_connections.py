"""Open connections: their number, incomplete requests, silent readers and services, and their ends."""

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from fakes.enumeration import TARGET
from fakes.remote import INFO, DirectClient, contexts, hostile_service, remote_verifier
from fakes.services import listening
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote import admission, target
from specdemo.remote.admission import ConnectionLimits, VisitorConnections
from specdemo.remote.config import CloudConfig
from specdemo.remote.connection import Deadlines
from specdemo.remote.contexts import Contexts
from specdemo.remote.protocol import VerifyConfig
from specdemo.remote.server import create_app
from specdemo.worker import Stream, Worker

PATIENCE = 60
CHUNK = b"x" * 1_000_000
GET = b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
UPGRADE = (
    b"GET /socket HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Application:
    """Routes that respond at once, read their body, block, or send without end; `ended` counts the latter."""

    def __init__(self) -> None:
        self.app, self.ended = FastAPI(), threading.Semaphore(0)
        self.app.state.worker = Worker()
        self.app.get("/quick")(self.quick)
        self.app.post("/slow")(self.slow)
        self.blocked, self.released = threading.Event(), threading.Event()
        self.app.get("/blocking")(self.blocking)
        self.app.get("/endless")(self.endless)
        self.app.websocket("/socket")(self.socket)

    async def quick(self) -> str:
        return "ok"

    async def slow(self, request: Request) -> int:
        return len(await request.body())

    async def blocking(self) -> None:
        self.blocked.set()
        self.released.wait(PATIENCE)

    async def endless(self) -> StreamingResponse:
        return StreamingResponse(self._chunks())

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield CHUNK
                await asyncio.sleep(0)  # after a disconnect, sending does not suspend the task
        finally:
            self.ended.release()

    async def socket(self, socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                await socket.send_bytes(CHUNK)
        finally:
            self.ended.release()


def served(
    limits: ConnectionLimits, application: Application | None = None, **files: Path
) -> AbstractContextManager[tuple[str, int]]:
    """Serve with these limits; `files`: certificate and key."""
    return listening((application or Application()).app, connections=limits, **files)


def connect(address: tuple[str, int], sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(address, timeout=PATIENCE)
    client.sendall(sent)
    return client


def rest(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    try:
        while part := client.recv(1 << 20):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_connections_with_incomplete_requests_are_closed() -> None:
    """Also after a response, and where no route reads the body: without a limit, such a connection counts as idle."""
    unread = GET.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n")
    requests = (b"", GET[:30], POST, POST + b"x", UPGRADE[:-2], GET + GET[:30], unread)
    with served(ConnectionLimits(seconds=0.2)) as address, ExitStack() as opened:
        clients = [opened.enter_context(connect(address, sent)) for sent in requests]
        *silent, answered, read = map(rest, clients)
    assert not any(silent) and answered.startswith(b"HTTP/1.1 200") and read.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("request_", [GET.replace(b"quick", b"endless"), UPGRADE])
def test_clients_that_read_nothing_are_disconnected(request_: bytes) -> None:
    application = Application()
    with served(ConnectionLimits(seconds=0.2), application) as address, connect(address, request_):
        assert application.ended.acquire(timeout=PATIENCE)


def received(client: socket.socket) -> bool:
    """Read the response of the route `quick`; return False if the connection ends before."""
    response = b""
    while not response.endswith(b'"ok"'):
        part = client.recv(65536)
        if not part:
            return False
        response += part
    return response.startswith(b"HTTP/1.1 200")


def test_readers_and_idle_connections_stay() -> None:
    """A reader that pauses between parts, and a connection between requests, outlive the limit."""
    application = Application()
    with served(ConnectionLimits(seconds=0.2), application) as address:
        with connect(address, GET) as idle, connect(address, GET.replace(b"quick", b"endless")) as reader:
            assert received(idle)
            closed = threading.Thread(target=rest, args=(connect(address),))
            closed.start()  # the limit has passed when this connection is closed
            while closed.is_alive():
                assert reader.recv(1 << 16)
            idle.sendall(GET)
            assert received(idle) and reader.recv(1 << 16)
        assert application.ended.acquire(timeout=PATIENCE)


def responses(address: tuple[str, int], count: int) -> list[bytes]:
    """Open connections, then send a request on each, in order."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in range(count)]
        first = []
        for client in clients:
            try:
                client.sendall(GET)
                first.append(client.recv(65536)[9:12])
            except (ConnectionResetError, BrokenPipeError):
                first.append(b"")
        return first


def test_open_connections_are_limited_in_total() -> None:
    with served(ConnectionLimits(total=3)) as address:
        answers = responses(address, 6)
        assert answers[:3] == [b"200"] * 3 and set(answers[3:]) <= {b"503", b""}
        while responses(address, 1) != [b"200"]:  # places are free again
            pass
    with served(ConnectionLimits(total=0)) as address, connect(address) as client:
        response = HTTPResponse(client)
        response.begin()
        assert response.status == 503 and response.read() == b"too many connections: retry"


def test_open_connections_are_limited_per_visitor(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(ConnectionLimits(per_visitor=2)) as address:
        assert responses(address, 4) == [b"200"] * 4  # this machine
        monkeypatch.setattr(admission, "is_loopback", lambda name: False)
        assert responses(address, 4) == [b"200"] * 4  # a trusted proxy
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "192.0.2.1")
    with served(ConnectionLimits(per_visitor=2)) as address:
        answers = responses(address, 4)
    assert answers[:2] == [b"200"] * 2 and set(answers[2:]) <= {b"503", b""}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("certificate")
    files = {"certificate": folder / "cert.pem", "key": folder / "key.pem"}
    command = ("openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    where = ("-subj", "/CN=localhost", "-keyout", files["key"], "-out", files["certificate"])
    subprocess.run([*command, *where], check=True, capture_output=True)
    return files


@pytest.mark.skipif(not shutil.which("openssl"), reason="creates a certificate with openssl")
def test_connections_are_limited_before_their_tls_handshakes(certificate: dict[str, Path]) -> None:
    context = ssl.create_default_context(cafile=certificate["certificate"])
    with served(ConnectionLimits(total=2), **certificate) as address, connect(address), connect(address) as second:
        with connect(address) as third:
            assert not rest(third)
        second.close()
        while True:  # until its place is free
            with connect(address) as client, suppress(ConnectionError, ssl.SSLError):
                with context.wrap_socket(client, server_hostname="localhost") as tls:
                    tls.sendall(GET)
                    assert received(tls)
                    break


@pytest.mark.skipif(sys.platform != "linux", reason="connects from 127.0.0.2")
def test_refused_connections_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that arrive together are accepted before connections above a limit are closed."""
    monkeypatch.setattr(admission, "is_loopback", lambda name: False)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "192.0.2.1")
    application = Application()
    with served(ConnectionLimits(total=4, per_visitor=2), application) as address, ExitStack() as stack:
        stack.enter_context(connect(address, GET.replace(b"quick", b"blocking")))
        assert application.blocked.wait(PATIENCE)
        for _ in range(8):
            stack.enter_context(connect(address))
        other = socket.create_connection(address, timeout=PATIENCE, source_address=("127.0.0.2", 0))
        stack.enter_context(other).sendall(GET)
        application.released.set()
        assert received(other)


def test_requests_of_a_visitor_are_counted_behind_a_proxy() -> None:
    """Requests and WebSockets count together; other visitors and this machine are served."""

    async def check() -> None:
        gate, inside = asyncio.Event(), asyncio.Semaphore(0)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            inside.release()
            await gate.wait()

        limited, statuses = VisitorConnections(app, ConnectionLimits(per_visitor=2)), []

        async def send(message: Any) -> None:
            statuses.append(message.get("status", message.get("code")))

        def request(address: str, kind: str = "http") -> Any:
            scope = {"type": kind, "client": (address, 0), "headers": [], "method": "GET", "path": "/"}
            return asyncio.create_task(limited(scope, None, send))

        tasks = [request(address) for address in ("2001:db8::1", "127.0.0.1", "127.0.0.1", "127.0.0.1", "192.0.2.9")]
        tasks.append(request("2001:db8::2", "websocket"))
        for _ in tasks:
            await asyncio.wait_for(inside.acquire(), PATIENCE)
        await request("2001:db8::3")
        assert statuses[0] == 429
        await request("2001:db8::3", "websocket")
        assert statuses[-1] == 1013
        gate.set()
        await asyncio.gather(*tasks)
        await request("2001:db8::1")
        assert len(statuses) == 3 and not limited._open  # one refusal has a body

    asyncio.run(check())


# --- clients that disconnect, and services that do not respond --------------------------------------------------------

TEXT_REQUEST = {"tokens": [2, 0, 2, 0], "sampling_cfg": {"temp": 1.0}, "max_tokens": 50}
SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},  # of uvicorn
    "method": "POST",
    "path": "/v1/texts",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "client": ("edge", 1),
}


def counting_contexts() -> tuple[Contexts, list[int], threading.Semaphore]:
    """Return contexts, the lengths of scored texts, and a semaphore that each pass acquires."""
    gate, passes = threading.Semaphore(0), []

    def score(tokens: Any, draft: Draft) -> Any:
        assert gate.acquire(timeout=PATIENCE)
        passes.append(len(tokens))
        return TARGET.score(tokens, draft)

    return contexts(score), passes, gate


async def request_text(worker: Worker, cloud: Contexts, gone: asyncio.Event, sent: list[Any]) -> None:
    """Request a text as a client that disconnects when `gone` is set."""
    messages = [{"type": "http.request", "body": json.dumps(TEXT_REQUEST).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body"):
            gone.set()

    await create_app(INFO, cloud, worker)(SCOPE, receive, send)


def test_a_stream_ends_when_its_client_disconnects_in_the_queue() -> None:
    """It computes no token afterwards."""
    worker, gate, sent = Worker(at_once=1), threading.Event(), []
    cloud, passes, _ = counting_contexts()
    inside = threading.Event()

    def blocking() -> Iterator[None]:
        inside.set()
        assert gate.wait(PATIENCE)
        yield

    busy = worker.submit(blocking)
    assert inside.wait(PATIENCE)

    async def scenario() -> None:
        gone = asyncio.Event()
        gone.set()
        await asyncio.wait_for(request_text(worker, cloud, gone, sent), PATIENCE)

    asyncio.run(scenario())
    assert sent[0]["status"] == 400
    gate.set()
    assert busy.wait(PATIENCE)
    worker.close()
    assert not passes


def test_a_stream_ends_when_its_client_disconnects() -> None:
    """The job ends before the response does."""
    worker = Worker()
    cloud, passes, gate = counting_contexts()
    gate.release(1)

    async def scenario() -> int:
        await asyncio.wait_for(request_text(worker, cloud, asyncio.Event(), []), PATIENCE)
        jobs = list(worker._open)
        gate.release(100)
        for job in jobs:
            assert job.stopping
            await asyncio.to_thread(job.wait, PATIENCE)
        return len(passes)

    assert asyncio.run(scenario()) <= 2  # the pass under way
    worker.close()


# --- edge ----------------------------------------------------------------------------------------------------------


class SilentService(DirectClient):
    """Service that does not respond to requests of `method` until `over` is set."""

    def __init__(self, method: str) -> None:
        super().__init__(contexts())
        self.method, self.asked, self.over = method, threading.Event(), threading.Event()

    def call(self, method: str, *rest: Any) -> Any:
        if method == self.method:
            self.asked.set()
            assert self.over.wait(PATIENCE)
        return super().call(method, *rest)


def verify_and_close(http: SilentService, strict: bool = True) -> Iterator[Any]:
    verifier = remote_verifier(http, VerifyConfig(temp=0.0), deadlines=Deadlines(600.0, 600.0, strict))
    try:
        yield verifier.verify([2, 0], Draft((1,), (-1,)))
    finally:
        verifier.close()


@pytest.mark.parametrize(("method", "strict"), [("POST", True), ("POST", False), ("DELETE", True)])
def test_other_runs_continue_while_a_service_does_not_respond(method: str, strict: bool) -> None:
    http, worker = SilentService(method), Worker()
    waiting: Stream[Any] = worker.submit(lambda: verify_and_close(http, strict))
    assert http.asked.wait(PATIENCE)
    other = worker.submit(lambda: iter(range(500)))
    assert other.wait(PATIENCE) and len(other.items) == 500 and not http.over.is_set()
    http.over.set()
    assert waiting.wait(PATIENCE) and len(waiting.items) == 1
    worker.close()


@pytest.mark.parametrize("strict", [True, False])
def test_a_stopped_run_does_not_wait_for_its_service(strict: bool) -> None:
    http, worker = SilentService("POST"), Worker()
    stream: Stream[Any] = worker.submit(lambda: verify_and_close(http, strict))
    assert http.asked.wait(PATIENCE)
    stream.stop()
    assert stream.wait(PATIENCE) and not stream.items and not http.over.is_set()
    http.over.set()
    worker.close()


def test_a_run_ends_although_its_context_cannot_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline may be ten minutes."""
    monkeypatch.setattr(target, "CLOSE_S", 0.01)
    http, worker = SilentService("DELETE"), Worker()
    stream: Stream[Any] = worker.submit(lambda: verify_and_close(http))
    assert stream.wait(PATIENCE) and stream.error is None and http.asked.wait(PATIENCE)
    http.over.set()
    worker.close()


def test_forests_are_refused_before_the_first_request_if_the_service_cannot_verify_them() -> None:
    sent: list[Any] = []

    def respond(request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        sent.append(request)
        return 500, {}

    with hostile_service(respond, chains_only="its positions are fixed") as url:
        recipe = Recipe(pair="bundled", method="tree", cloud=CloudConfig(url), device="cpu")
        with pytest.raises(UserError, match="several continuations in one pass, and table its positions are fixed"):
            list(generate(recipe, "def f():", ModelPool()))
    assert not sent
