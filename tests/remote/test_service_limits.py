"""Service against clients: contexts per client, memory budget, wrong tokens, other sites, incomplete headers."""

from __future__ import annotations

import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.remote import DRAFTED, INFO, OPEN, contexts
from fastapi.testclient import TestClient

from specdemo.cli import main
from specdemo.remote import serve
from specdemo.remote.admission import ServiceLimits
from specdemo.remote.listener import bind
from specdemo.remote.protocol import CODECS, VerifyRequest, digest
from specdemo.remote.server import SERVICE_ROUTES, create_app
from specdemo.worker import Worker

pytestmark = pytest.mark.slow


def application(**options: Any) -> Any:
    return create_app(INFO, contexts(), Worker(), **options)


def test_contexts_belong_to_the_client_that_opened_them() -> None:
    app = application()
    first, second = (TestClient(app, client=(address, 1)) for address in ("192.0.2.1", "192.0.2.2"))
    assert first.post("/v1/rounds", json=OPEN).status_code == 200
    assert not second.delete("/v1/contexts/a").json().get("forgotten", False)
    later = {"ctx_id": "a", "round": 1, "base": 4, "digest": "0" * 16, "k": 0}
    assert second.post("/v1/rounds", json=later).json()["error"].startswith("this context does not exist")
    assert second.post("/v1/rounds", json={**OPEN, "epoch": 5}).status_code == 200
    assert first.post("/v1/rounds", json=DRAFTED | {"round": 1}).status_code == 200  # not superseded by epoch 5
    assert first.delete("/v1/contexts/a").json()["forgotten"]


def test_bad_words_count_as_memory() -> None:
    codec, store = CODECS["application/json"], contexts()
    words = [[0, 1, 2, 1000 + i][:3] * 21 for i in range(1000)]

    def opened(name: str, bad_words: list[list[int]]) -> VerifyRequest:
        body = {**OPEN, "ctx_id": name, "sampling_cfg": {"temp": 1.0, "bad_words": bad_words}}
        return codec.load(VerifyRequest, json.dumps(body).encode())

    store.verify(opened("warm", []))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0], store.reserved_bytes
    for name in "abc":
        store.verify(opened(name, words))
    used, reserved = tracemalloc.get_traced_memory()[0] - before[0], store.reserved_bytes - before[1]
    tracemalloc.stop()
    assert reserved >= used > 1_000_000
    small = contexts(budget_bytes=reserved // 3 + 1)
    for name in "abc":
        small.verify(opened(name, words))
    assert len(small) == 1


def test_only_wrong_tokens_are_limited() -> None:
    """Attempts per address: 20 at once and one more per second. Clients behind a balancer share an address."""
    now = [0.0]
    app = application(token="secret", clock=lambda: now[0])
    guessing, other = (TestClient(app, client=(address, 1)) for address in ("192.0.2.1", "192.0.2.2"))

    def status(client: TestClient, token: str) -> int:
        return client.get("/v1/target", headers=bearer(token)).status_code

    assert [status(guessing, f"{i}") for i in range(40)] == [401] * 20 + [429] * 20
    assert status(guessing, "secret") == 200 and status(other, "a") == 401
    now[0] = 2.0
    assert [status(guessing, token) for token in ("secret", "a", "b", "secret", "c")] == [200, 401, 401, 200, 429]


@pytest.mark.parametrize(
    ("limits", "expected"), [({}, 401), ({"limits": ServiceLimits(requests_per_second=1e-6, burst=20)}, 200)]
)
def test_addresses_of_an_ipv6_network_share_their_limits(limits: dict[str, Any], expected: int) -> None:
    app = application(token="secret", clock=lambda: 0.0, **limits)

    def status(address: str) -> int:
        token = "secret" if limits else "wrong"
        return TestClient(app, client=(address, 1)).get("/v1/target", headers=bearer(token)).status_code

    statuses = [status(f"2001:db8:0:1::{i:x}") for i in range(22)]
    assert statuses == [expected] * 20 + [429] * 2 and status("2001:db8:0:2::1") == expected


def bearer(token: str, session: str = "") -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **({"X-Session-Id": session} if session else {})}


def test_rates_are_limited_per_token_if_there_are_several() -> None:
    app = application(token="first second", limits=ServiceLimits(requests_per_second=1e-6, burst=1))
    one, other = (TestClient(app, client=(address, 1)) for address in ("192.0.2.1", "192.0.2.2"))
    sent = [(one, "first"), (other, "first"), (other, "second"), (one, "second"), (one, "first second")]
    assert [client.get("/v1/target", headers=bearer(token)).status_code for client, token in sent] == [
        200, 429, 200, 429, 401,
    ]  # fmt: skip


SESSION, OTHER = "s" * 32, "t" * 32


@pytest.mark.parametrize(
    ("opener", "reader", "same"),
    [
        (("first", SESSION, "192.0.2.1"), ("first", SESSION, "192.0.2.2"), True),  # a balancer, or another network
        (("first", SESSION, "192.0.2.1"), ("first", OTHER, "192.0.2.1"), False),
        (("first", SESSION, "192.0.2.1"), ("second", SESSION, "192.0.2.1"), False),  # a stolen header
        (("first", SESSION, "192.0.2.1"), ("first", "", "192.0.2.1"), False),
        (("first", "", "192.0.2.1"), ("first", "", "192.0.2.2"), True),
        (("first", "", "192.0.2.1"), ("second", "", "192.0.2.1"), False),
    ],
)
def test_contexts_belong_to_token_and_session(
    opener: tuple[str, str, str], reader: tuple[str, str, str], same: bool
) -> None:
    app = application(token="first second")

    def post(who: tuple[str, str, str], body: dict[str, Any]) -> int:
        token, session, address = who
        client = TestClient(app, client=(address, 1))
        return client.post("/v1/rounds", json=body, headers=bearer(token, session)).status_code

    onward = {"ctx_id": "a", "round": 1, "base": 4, "digest": digest([2, 0, 2, 0]), "k": 0}
    assert post(opener, OPEN) == 200
    assert post(reader, onward) == (200 if same else 404)


@pytest.mark.parametrize("session", ["s" * 31, "s" * 129, "s" * 100_000, "s" * 31 + ";", "../" * 20])
def test_other_session_headers_are_refused(session: str) -> None:
    client = TestClient(application())
    for response in (
        client.post("/v1/rounds", json=OPEN, headers={"X-Session-Id": session}),
        client.delete("/v1/contexts/a", headers={"X-Session-Id": session}),
    ):
        assert response.status_code == 422 and "32 to 128" in response.json()["error"]


def test_readiness_needs_no_token_and_no_worker() -> None:
    worker, started, release = Worker(at_once=1), threading.Event(), threading.Event()

    def blocking() -> Iterator[None]:
        started.set()
        release.wait()
        yield

    worker.submit(blocking)
    assert started.wait(60)
    client = TestClient(create_app(INFO, contexts(), worker, token="secret"))
    assert client.get("/v1/ready").status_code == 200
    release.set()


def test_documentation_requires_the_token() -> None:
    guarded, open_service = (TestClient(application(token=token)) for token in ("secret", None))
    for path in ("/docs", "/openapi.json"):
        assert guarded.get(path).status_code == 401 and open_service.get(path).status_code == 200
        assert guarded.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert guarded.get("/redoc").status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:8300"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:8300"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:8000"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "evil.example:8300", "Origin": "http://evil.example:8300"}, 403),
        ({"Host": "evil.example:80@127.0.0.1"}, 403),
        ({"Sec-Fetch-Site": "none", "Origin": "http://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "", "Accept": "application/json"}, 415),
    ],
)
def test_pages_of_other_sites_cannot_use_a_local_service(headers: dict[str, str], status: int) -> None:
    client = TestClient(application(local=True), base_url="http://127.0.0.1:8300")
    sent = {"Content-Type": "application/json", **headers}
    response = client.post("/v1/rounds", content=json.dumps(OPEN), headers={k: v for k, v in sent.items() if v})
    assert response.status_code == status, response.text


def test_every_route_of_the_service_is_listed() -> None:
    served = {(method, route.path) for route in application().routes for method in route.methods - {"HEAD"}}
    assert served == {(route.methods, route.path) for route in SERVICE_ROUTES}
    assert all(route.purpose and route.limits for route in SERVICE_ROUTES)


def test_empty_token_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SPECDEMO_TOKEN", " ")
    assert main(["serve", "--target", "/nowhere"]) == 2
    assert "SPECDEMO_TOKEN is empty" in capsys.readouterr().err


def test_no_connection_is_accepted_while_jobs_are_stopped() -> None:
    """Otherwise a client whose stream was cut off could be served once more."""

    class Probe(Worker):
        refused: ConnectionRefusedError | None = None

        def close(self, timeout: float | None = None, drain_s: float = 0.0) -> None:
            try:
                socket.create_connection(address).close()
            except ConnectionRefusedError as error:
                self.refused = error
            super().close(timeout, drain_s)

    worker, listener, (stdin, end) = Probe(), bind("127.0.0.1", 0), socket.socketpair()
    address = listener.getsockname()
    options = {"stdin": stdin.makefile("rb"), "announce": end.close}
    serve.listen(create_app(INFO, contexts(), worker), listener, **options)
    assert worker.refused
