"""Cloud service: access, limits of clients, invalid requests, streams, health; two processes over loopback."""

import json
import math
import signal
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import msgpack
import pytest
from fakes.enumeration import TARGET
from fakes.forked_process import ForkedProcess, terminal, without_sigint
from fakes.http_server import Handler, http_server
from fakes.remote import DRAFTED, INFO, MODEL, OPEN, contexts, decode_locally, response_of
from fakes.services import ServiceProcess
from fakes.traces import run_of, trace_lines
from fastapi import FastAPI
from fastapi.testclient import TestClient

from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote import server
from specdemo.remote.access import bind
from specdemo.remote.admission import ServiceOptions
from specdemo.remote.config import CloudConfig
from specdemo.remote.connection import ConnectionLost
from specdemo.remote.contexts import Contexts
from specdemo.remote.link import Cause, HttpClient, Retry
from specdemo.remote.protocol import CODECS, ServiceInfo, StreamRequest, VerifyConfig, VerifyRequest, digest
from specdemo.remote.server import SERVICE_ROUTES, STALLED_S, Unhealthy, create_app, service_health
from specdemo.remote.target import _connection, _service_info
from specdemo.worker import Worker

pytestmark = pytest.mark.slow


def application(
    worker: Worker | None = None,
    table: Contexts | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> FastAPI:
    cloud = contexts(stop=frozenset({3})) if table is None else table
    return create_app(INFO, cloud, worker or Worker(), ServiceOptions(**options), clock)


def client(worker: Worker | None = None, table: Contexts | None = None, **options: Any) -> TestClient:
    return TestClient(application(worker, table, **options), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def cloud() -> TestClient:
    return client()


# --- authentication and rate limit -------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [None, "Bearer wrong", "Bearer ", "Basic c2VjcmV0", "secret", "Bearer sécret"])
def test_requests_without_the_token_are_rejected(sent: str | None) -> None:
    guarded = client(token="secret")
    headers = {} if sent is None else {"Authorization": sent.encode("utf-8")}
    for path in ("/docs", "/openapi.json"):
        assert guarded.get(path, headers=headers).status_code == 401
    for response in (
        guarded.get("/v1/target", headers=headers),
        guarded.post("/v1/rounds", json=OPEN, headers=headers),
        guarded.post("/v1/rounds", content=b"nonsense", headers=headers),
        guarded.post("/v1/texts", json={}, headers=headers),
        guarded.delete("/v1/contexts/a", headers=headers),
    ):
        assert response.status_code == 401 and response.json()["code"] == "unauthorised"
    allowed = {"Authorization": "Bearer secret"}
    assert guarded.get("/v1/target", headers=allowed).json()["name"] == "table"
    assert guarded.get("/docs", headers=allowed).status_code == 200 and guarded.get("/redoc").status_code == 404
    assert guarded.get("/v1/ready").status_code == 200


# --- invalid requests --------------------------------------------------------------------------------------------


TEXT_OF = {"tokens": [2, 0], "sampling_cfg": {}, "max_tokens": 4}
INVALID: dict[str, tuple[str, dict[str, Any], str]] = {  # route, body, word of the sentence
    "a number in quotes": ("rounds", {**OPEN, "round": "0"}, "round"),
    "k of another draft": ("rounds", {**DRAFTED, "k": 3}, "k is 3 and 2 tokens"),
    "a million draft tokens": ("rounds", {**DRAFTED, "draft_tokens": [1] * 10**6}, "at most 256"),
    "an unknown id": ("rounds", {**DRAFTED, "draft_tokens": [1, 4]}, "not among the model's 4 ids"),
    "a later parent": ("rounds", {**DRAFTED, "parents": [-1, 1]}, "must precede"),
    "a row of zeros": ("rounds", {**DRAFTED, "rows": [{"node": 0, "values": "A" * 21 + "A=="}]}, "no distribution"),
    "an unknown rule": ("rounds", {**OPEN, "sampling_cfg": {"rule": "magic"}}, "known are rejection"),
    "a penalty near 0": ("rounds", {**OPEN, "sampling_cfg": {"rep_penalty": 1e-300}}, "rep_penalty"),
    "only bad words": ("texts", {**TEXT_OF, "sampling_cfg": {"bad_words": [[0], [1], [2], [3]]}}, "ban fewer"),
    "a text without end": ("texts", {**TEXT_OF, "max_tokens": 10**9}, "max_tokens"),
    "a long text": ("rounds", {**OPEN, "tokens": [1] * 65}, "do not fit the model's 64"),
}


def test_invalid_requests_get_a_sentence_and_the_service_goes_on(cloud: TestClient) -> None:
    for case, (route, body, words) in INVALID.items():
        response = cloud.post(f"/v1/{route}", json=body)
        assert response.status_code == 422 and words in response.json()["error"], case
        assert "\n" not in response.json()["error"] and len(response.json()["error"]) < 300
    response = cloud.post("/v1/rounds", json={**DRAFTED, "ctx_id": "fresh", "q_token_probs": None}).json()
    assert response["accepted_len"] in (0, 1, 2) and len(response["p"]) == 2


def test_unreadable_bodies_are_rejected(cloud: TestClient) -> None:
    nan = msgpack.packb({**DRAFTED, "q_token_probs": msgpack.ExtType(1, struct.pack("<2f", math.nan, 0.5))})
    for body, kind, status in (
        (nan, "application/msgpack", 422),
        (b"\x91" * 100_000, "application/msgpack", 422),
        (b"\xdf\xff\xff\xff\xff", "application/msgpack", 422),
        (b"[" * 100_000, "application/json", 422),
        (b"{}", "text/plain", 415),
    ):
        assert cloud.post("/v1/rounds", content=body, headers={"Content-Type": kind}).status_code == status
    small = client(body_bytes=1000)
    assert small.post("/v1/rounds", content=b" " * 2000).status_code in (413, 415)


# --- job queue ---------------------------------------------------------------------------------------------------


def test_a_full_queue_responds_busy_and_a_closed_one_unavailable() -> None:
    worker, release, started = Worker(at_once=1, waiting=1), threading.Event(), threading.Event()

    def blocking() -> Iterator[None]:
        started.set()
        release.wait()
        yield

    worker.submit(blocking)
    assert started.wait(60)
    worker.submit(blocking)
    response = client(worker).post("/v1/rounds", json=OPEN)
    release.set()
    assert response.status_code == 429 and response.json()["code"] == "busy" and response.headers["retry-after"]
    worker.close()
    response = client(worker).post("/v1/rounds", json=OPEN)
    assert response.status_code == 503 and response.json()["code"] == "stopping"


def test_streamed_text_equals_the_local_text(cloud: TestClient) -> None:
    config = {"temp": 1.0, "rule": "coupled", "seed": 7}
    body = {"tokens": [2, 0, 2, 0], "sampling_cfg": config, "max_tokens": 40}
    *tokens, end = cloud.post("/v1/texts", json=body).text.split()
    text = decode_locally()
    stop = text.index(3) + 1 if 3 in text else len(text)
    assert [int(token) for token in tokens] == text[:stop] and end == "end"
    full = cloud.post("/v1/texts", json={**body, "tokens": [1] * 63}).text.split()
    assert full[-1] == "end" and 1 <= len(full) - 1 <= 2  # up to the context of 64
    long = cloud.post("/v1/texts", json={**body, "tokens": [1] * 65})
    assert long.status_code == 422 and "do not fit" in long.json()["error"]


def test_a_model_error_affects_only_its_request() -> None:
    """The model fails for texts of at least five tokens; their context stays usable."""
    errors: list[Exception] = [ZeroDivisionError(), UserError("the model failed: try again")]

    def score(tokens: Any, draft: Any) -> Any:
        if len(tokens) >= 5:
            raise errors.pop(0)
        return TARGET.score(tokens, draft)

    broken = client(table=contexts(score))
    assert broken.post("/v1/rounds", json={**OPEN, "tokens": [1] * 5}).status_code == 500
    assert broken.post("/v1/rounds", json=OPEN).status_code == 200
    body = {"tokens": [2, 0, 2, 0], "sampling_cfg": {}, "max_tokens": 9}
    lines = broken.post("/v1/texts", json=body).text.splitlines()
    assert len(lines) == 2 and lines[0].isdigit() and lines[1] == "error the model failed: try again"


# --- limits of clients -----------------------------------------------------------------------------------------------


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
    server.listen(create_app(INFO, contexts(), worker), listener, **options)
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


# --- two processes -----------------------------------------------------------------------------------------------

TEXT = 'def read_lines(path):\n    """Read the lines of a file."""\n'
TOKEN = {"SPECDEMO_TOKEN": "secret"}
POOL = ModelPool()


@pytest.fixture(scope="module")
def process() -> Iterator[ServiceProcess]:
    with closing(ServiceProcess(**TOKEN)) as running:
        yield running


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEMO_TOKEN", "secret")


def tokens(**options: Any) -> list[int]:
    return run_of(Recipe(device="cpu", max_tokens=24, **options), TEXT, POOL)[0]


NAMED = INFO.model_copy(update={"model": MODEL})


class Late(Handler):
    """Answer the first request for the description when it is repeated."""

    repeated = threading.Event()
    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        if self.requests > 1:
            self.repeated.set()
        self.repeated.wait()
        self.answer(200, CODECS["application/json"].dump(NAMED))


def described(url: str, clock: Callable[[], float]) -> ServiceInfo:
    """Return the description by the service at `url`; another service of the list is dead."""
    cloud = CloudConfig(f"http://127.0.0.1:1 {url}")
    with closing(_connection(cloud, 0, clock, "s" * 32)) as connection:
        return _service_info(connection, cloud, False)


def test_a_busy_service_is_not_taken_for_none_while_another_is_dead() -> None:
    with http_server(Late) as url:
        assert described(url, time.monotonic) == NAMED and Late.requests >= 2


def test_a_host_that_does_not_answer_is_reported_before_the_connection_counts_as_lost() -> None:
    with socket.socket() as listening, ExitStack() as opened:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        for _ in range(4):  # further connections are ignored
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        with pytest.raises(ConnectionLost, match="there is no service at"):
            described("http://{}:{}".format(*address), lambda: 0.0)  # never lost by this clock


def test_a_busy_service_that_does_not_begin_encryption_counts_as_busy() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with closing(HttpClient(f"https://127.0.0.1:{listening.getsockname()[1]}")) as http:
            with pytest.raises(Retry) as failure:
                http.call("GET", "/v1/target", None, ServiceInfo, 0.2)
    assert failure.value.cause is Cause.LATE


def test_two_processes_give_the_local_text(process: ServiceProcess, secret: None) -> None:
    by_json, packed = (CloudConfig(process.url, encoding=encoding) for encoding in ("json", "msgpack"))
    coupled = {"temperature": 1.0, "top_p": 1.0, "rule": "coupled", "seed": 3}
    for settings in ({"temperature": 0.0}, coupled):
        baseline = tokens(method="ar", **settings)
        for method, cloud in (("draft", by_json), ("draft", packed), ("nasd", by_json), ("tree", packed)):
            assert tokens(method=method, cloud=cloud, **settings) == baseline, method
    assert tokens(cloud=replace(packed, mode="cloud_only"), **coupled) == baseline
    assert tokens(method="lookahead", cloud=packed, **coupled) == baseline


@pytest.mark.parametrize(
    ("number", "temperature"),
    [
        (signal.SIGKILL, 0.0),
        (signal.SIGSTOP, 1.0),
        pytest.param(signal.SIGTERM, 1.0, marks=pytest.mark.exhaustive),
    ],
)
def test_another_service_continues_after_a_signal(
    process: ServiceProcess, secret: None, number: signal.Signals, temperature: float
) -> None:
    """The signal follows the first step in which the victim responded; the session decides which service is first."""
    options = {"device": "cpu", "max_tokens": 24, "temperature": temperature, "top_p": 1.0, "seed": 11}
    recipe = Recipe(cloud=CloudConfig(process.url, deadline_ms=2000, lost_after_s=120), **options)
    expected, _ = run_of(recipe, TEXT, POOL)
    with closing(ServiceProcess(**TOKEN)) as victim:
        both = replace(recipe, cloud=replace(recipe.cloud, remote=f"{victim.url} {process.url}"))
        hit = False
        while not hit:  # each session begins with the victim with probability 1/2
            lines = []
            for line in trace_lines(both, TEXT, POOL):
                lines.append(line)
                if line.get("i") == 2 and any(early.get("replica", "").endswith(f":{victim.port}") for early in lines):
                    victim.process.send_signal(number)
                    if number != signal.SIGSTOP:  # a draining service still responds to steps
                        victim.process.wait()
                    hit = True
            assert [token for line in lines for token in line.get("tokens", ())] == expected
    links = [line["remote"] for line in lines if "i" in line]
    assert sum(link.get("switched", 0) for link in links) == 1 and not any("numerics" in link for link in links)
    assert sum(link.get("reread", 0) for link in links) > len(lines[0].get("prompt_tokens", ()))
    assert sum(link.get("gap_s", 0) for link in links) > 0


# --- shutdown ------------------------------------------------------------------------------------------------------


def opened_stream(url: str, count: int, token: str | None = None) -> tuple[HttpClient, Iterator[Any]]:
    """Client and stream of a text of `count` tokens, after its prefill."""
    client = HttpClient(url, token=token)
    info = client.call("GET", "/v1/target", None, ServiceInfo, 60)
    banned = [[token] for token in info.stop]
    request = StreamRequest(tokens=[1, 2], config=VerifyConfig(bad_words=banned), max_tokens=count)
    stream = client.tokens("/v1/texts", request, 60)
    assert next(stream) is not None
    return client, stream


def is_open(url: str) -> bool:
    try:
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)).close()
    except ConnectionError:
        return False
    return True


def test_a_service_that_drains_refuses_connections_and_completes_its_streams() -> None:
    command = ("serve", "--pair", "bundled", "--port", "0", "--device", "cpu", "--drain-s", "60")
    with closing(ForkedProcess(without_sigint, terminal, *command)) as process:
        url = process.stdout.readline().removeprefix("listening on ").strip()
        _, stream = opened_stream(url, 300)
        process.send_signal(signal.SIGINT)
        while is_open(url):
            pass
        assert len(list(stream)) == 300  # raises if it is cut off
        assert process.wait() == 0 and process.stderr.read() == ""


def test_terminated_service_ends_streams_with_exit_code_0(process: ServiceProcess) -> None:
    """Last test of the shared service."""
    client, stream = opened_stream(process.url, 1 << 17, "secret")
    process.process.send_signal(signal.SIGTERM)
    assert process.process.wait() == 0
    with pytest.raises(Retry, match="cut off"):
        list(stream)
    with pytest.raises(Retry):
        client.call("GET", "/v1/target", None, ServiceInfo, 60)
