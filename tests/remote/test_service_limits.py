"""Service against clients: contexts per client, memory, wrong tokens, other sites, and its health."""

import itertools
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from fakes.enumeration import PROMPT, SMALL, VOCAB
from fakes.remote import DRAFTED, INFO, OPEN, DirectClient, contexts, remote_verifier, response_of, verify_config
from fakes.tiny_models import run
from fastapi.testclient import TestClient

from specdemo.cli import main
from specdemo.core.policies import Fixed
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.drafters.model import ModelDrafter
from specdemo.remote import serve
from specdemo.remote.admission import ServiceOptions
from specdemo.remote.health import STALLED_S, Unhealthy, service_health
from specdemo.remote.listener import bind
from specdemo.remote.protocol import CODECS, VerifyRequest, digest
from specdemo.remote.server import SERVICE_ROUTES, create_app
from specdemo.worker import Worker

pytestmark = pytest.mark.slow


def application(clock: Callable[[], float] = time.monotonic, **options: Any) -> Any:
    return create_app(INFO, contexts(), Worker(), ServiceOptions(**options), clock)


def test_bad_words_count_as_memory() -> None:
    store, words = contexts(), [[0, 1, 2, 1000 + i][:3] * 21 for i in range(1000)]

    def opened(name: str, bad_words: list[list[int]]) -> VerifyRequest:
        body = {**OPEN, "ctx_id": name, "sampling_cfg": {"temp": 1.0, "bad_words": bad_words}}
        return CODECS["application/json"].load(VerifyRequest, json.dumps(body).encode())

    response_of(store, opened("warm", []))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0], store.reserved_bytes
    for name in "abc":
        response_of(store, opened(name, words))
    used, reserved = tracemalloc.get_traced_memory()[0] - before[0], store.reserved_bytes - before[1]
    tracemalloc.stop()
    assert reserved >= used > 1_000_000


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
    ("token", "limits", "expected"), [("wrong", {}, 401), ("secret", {"requests_per_second": 1e-6, "burst": 20}, 200)]
)
def test_addresses_of_an_ipv6_network_share_their_limits(token: str, limits: dict[str, Any], expected: int) -> None:
    app = application(token="secret", clock=lambda: 0.0, **limits)

    def status(address: str) -> int:
        return TestClient(app, client=(address, 1)).get("/v1/target", headers=bearer(token)).status_code

    statuses = [status(f"2001:db8:0:1::{i:x}") for i in range(22)]
    assert statuses == [expected] * 20 + [429] * 2 and status("2001:db8:0:2::1") == expected


def bearer(token: str, session: str = "") -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **({"X-Session-Id": session} if session else {})}


def test_rates_are_limited_per_token_if_there_are_several() -> None:
    app = application(token="first second", requests_per_second=1e-6, burst=1)
    one, other = (TestClient(app, client=(address, 1)) for address in ("192.0.2.1", "192.0.2.2"))
    sent = [(one, "first"), (other, "first"), (other, "second"), (one, "second"), (one, "first second")]
    assert [client.get("/v1/target", headers=bearer(token)).status_code for client, token in sent] == [
        200, 429, 200, 429, 401,
    ]  # fmt: skip


SESSION, OTHER = "s" * 32, "t" * 32


@pytest.mark.parametrize(
    ("tokens", "opener", "reader", "same"),
    [
        ("first second", ("first", SESSION, "192.0.2.1"), ("first", SESSION, "192.0.2.2"), True),  # another network
        ("first second", ("first", SESSION, "192.0.2.1"), ("first", OTHER, "192.0.2.1"), False),
        ("first second", ("first", SESSION, "192.0.2.1"), ("second", SESSION, "192.0.2.1"), False),  # a stolen header
        ("first second", ("first", SESSION, "192.0.2.1"), ("first", "", "192.0.2.1"), False),
        ("first second", ("first", "", "192.0.2.1"), ("first", "", "192.0.2.2"), True),
        ("first second", ("first", "", "192.0.2.1"), ("second", "", "192.0.2.1"), False),
        (None, ("", "", "192.0.2.1"), ("", "", "192.0.2.2"), False),
    ],
)
def test_contexts_belong_to_token_and_session_or_to_an_address(
    tokens: str | None, opener: tuple[str, str, str], reader: tuple[str, str, str], same: bool
) -> None:
    app = application(token=tokens)

    def send(who: tuple[str, str, str], method: str, path: str, body: Any = None) -> Any:
        token, session, address = who
        client = TestClient(app, client=(address, 1))
        return client.request(method, path, json=body, headers=bearer(token, session))

    onward = {"ctx_id": "a", "round": 1, "base": 4, "digest": digest([2, 0, 2, 0]), "k": 0}
    assert send(opener, "POST", "/v1/rounds", OPEN).status_code == 200
    assert send(reader, "POST", "/v1/rounds", onward).status_code == (200 if same else 404)
    assert send(reader, "DELETE", "/v1/contexts/a").json().get("forgotten", False) == same
    assert send(reader, "POST", "/v1/rounds", {**OPEN, "epoch": 5}).status_code == 200
    later = send(opener, "POST", "/v1/rounds", {**DRAFTED, "round": 2, "epoch": 4})
    assert later.status_code == (409 if same else 200)  # the epoch of another client supersedes nothing


def test_other_session_headers_are_refused() -> None:
    client = TestClient(application())
    for session in ("s" * 31, "s" * 100_000, "s" * 31 + ";", "../" * 20):
        response = client.post("/v1/rounds", json=OPEN, headers={"X-Session-Id": session})
        assert response.status_code == 422 and "32 to 128" in response.json()["error"]
        assert client.delete("/v1/contexts/a", headers={"X-Session-Id": session}).status_code == 422


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:8300"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:8300"}, 200),
        ({"Origin": "http://evil.example"}, 403),
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


# --- health -----------------------------------------------------------------------------------------------------------


def test_an_idle_service_decodes_a_token() -> None:
    cloud = contexts()
    with closing(Worker()) as worker:
        service_health(worker, cloud).check()
        assert sum(worker.texts_per_pass.values()) == 0 and len(cloud) == 0 and worker.active == 0

        def broken() -> Any:
            raise RuntimeError("out of memory")

        cloud.make_cache = broken
        with pytest.raises(Unhealthy, match="an idle service cannot decode a token: out of memory"):
            service_health(worker, cloud).check()


def test_a_busy_service_is_healthy_while_jobs_advance() -> None:
    """Checks do not wait for the job."""
    now, turns, advanced = [1000.0], threading.Semaphore(0), threading.Semaphore(0)  # idle until now

    def job() -> Iterator[None]:
        for _ in range(3):
            turns.acquire()
            yield

    with closing(Worker(clock=lambda: now[0])) as worker:
        health, stream = service_health(worker, contexts()), worker.submit(job)
        stream.listen(advanced.release)
        for _ in range(2):
            now[0] += STALLED_S - 1
            health.check()
            turns.release()
            advanced.acquire()
        now[0] += STALLED_S
        with pytest.raises(Unhealthy, match="no step was completed for 25 s: the device does not respond"):
            health.check()
        turns.release()
        stream.wait()
        assert worker.stalled_s == 0


def test_a_probe_that_hangs_is_unhealthy() -> None:
    """The clock advances with each look at it."""
    cloud, release = contexts(), threading.Event()
    cloud.make_cache = release.wait
    with closing(Worker(clock=itertools.count(0.0, STALLED_S).__next__)) as worker:
        health = service_health(worker, cloud)
        health.patience_s = 0.1
        with pytest.raises(Unhealthy, match="no step was completed"):
            health.check()
        release.set()


def test_each_step_is_reported_once() -> None:
    """Requests for rows and repetitions of a request are no steps."""
    seen: list[VerifyRequest] = []
    client = DirectClient(contexts(observe=lambda request, response: seen.append(request)))
    drafter = ModelDrafter(SMALL.score, SamplingParams(), Noise(3, "draft"), VOCAB)
    verifier = remote_verifier(client, verify_config(SamplingParams(), seed=3))  # type: ignore[arg-type]
    steps = run(PROMPT, verifier, drafter, Fixed(3), 12)
    response_of(client.cloud, client.sent[-1])
    assert len(client.sent) > len(steps)
    assert [request.step for request in seen] == list(range(len(steps)))
    assert [bool(request.base) for request in seen] == [False, *[True] * (len(steps) - 1)]
