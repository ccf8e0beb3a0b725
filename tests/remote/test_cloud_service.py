"""Cloud service: authentication, invalid requests, streaming, shutdown; two processes over loopback."""

import math
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import msgpack
import pytest
from fakes.enumeration import TARGET, VOCAB
from fakes.forked_process import ForkedProcess, terminal, without_sigint
from fakes.http_server import Handler, http_server
from fakes.remote import DRAFTED, INFO, OPEN, TableCache, contexts, decode_locally
from fakes.service_process import ServiceProcess
from fakes.table_service import MODEL
from fakes.trace_lines import trace_lines as generate
from fastapi.testclient import TestClient

from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote.admission import ServiceOptions
from specdemo.remote.config import CloudConfig
from specdemo.remote.connection import ConnectionLost
from specdemo.remote.contexts import Contexts
from specdemo.remote.link import Cause, HttpClient, Retry
from specdemo.remote.protocol import CODECS, ServiceInfo, StreamRequest, VerifyConfig
from specdemo.remote.server import create_app
from specdemo.remote.target import _connection, _service_info
from specdemo.worker import Worker

pytestmark = pytest.mark.slow


def client(worker: Worker | None = None, table: Contexts | None = None, **options: Any) -> TestClient:
    cloud = contexts(stop=frozenset({3})) if table is None else table
    app = create_app(INFO, cloud, worker or Worker(), ServiceOptions(**options))
    return TestClient(app, raise_server_exceptions=False)


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


def test_full_queue_responds_busy() -> None:
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
    """The model fails for texts of at least five tokens."""

    class BrokenCache(TableCache):
        error: Exception = ZeroDivisionError()

        def __init__(self) -> None:
            self.score = self._score

        def _score(self, tokens: Any, draft: Any) -> Any:
            if len(tokens) >= 5:
                raise self.error
            return TARGET.score(tokens, draft)

    broken = client(table=Contexts(BrokenCache, vocab_size=VOCAB, context=64))
    assert broken.post("/v1/rounds", json={**OPEN, "tokens": [1] * 5}).status_code == 500
    assert broken.post("/v1/rounds", json=OPEN).status_code == 200
    BrokenCache.error = UserError("the model failed: try again")
    body = {"tokens": [2, 0, 2, 0], "sampling_cfg": {}, "max_tokens": 9}
    lines = broken.post("/v1/texts", json=body).text.splitlines()
    assert len(lines) == 2 and lines[0].isdigit() and lines[1] == "error the model failed: try again"


# --- two processes -----------------------------------------------------------------------------------------------

TEXT = 'def read_lines(path):\n    """Read the lines of a file."""\n'


TOKEN = {"SPECDEMO_TOKEN": "secret"}


@pytest.fixture(scope="module")
def process() -> Iterator[ServiceProcess]:
    with closing(ServiceProcess(**TOKEN)) as running:
        yield running


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEMO_TOKEN", "secret")


POOL = ModelPool()


def tokens(**options: Any) -> list[int]:
    lines = list(generate(Recipe(device="cpu", max_tokens=24, **options), TEXT, POOL))
    assert lines[-1]["end"] in ("length", "stop"), lines[-1]
    return [token for line in lines if "i" in line for token in line["tokens"]]


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


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_two_processes_give_the_local_text(process: ServiceProcess, secret: None, encoding: str) -> None:
    cloud = CloudConfig(process.url, encoding=encoding)
    coupled = {"temperature": 1.0, "top_p": 1.0, "rule": "coupled", "seed": 3}
    for settings in ({"temperature": 0.0}, coupled):
        baseline = tokens(method="ar", **settings)
        for method in ("draft", "nasd", "tree") if encoding == "json" else ("draft", "lookahead"):
            assert tokens(method=method, cloud=cloud, **settings) == baseline, method
    if encoding == "json":
        return
    assert tokens(cloud=CloudConfig(process.url, mode="cloud_only"), **coupled) == tokens(method="ar", **coupled)


@pytest.mark.parametrize(
    ("number", "temperature"), [(signal.SIGKILL, 0.0), (signal.SIGTERM, 1.0), (signal.SIGSTOP, 1.0)]
)
def test_another_service_continues_after_a_signal(
    process: ServiceProcess, secret: None, number: signal.Signals, temperature: float
) -> None:
    """The signal follows the first step in which the victim responded; the session decides which service is first."""
    options = {"device": "cpu", "max_tokens": 24, "temperature": temperature, "top_p": 1.0, "seed": 11}
    recipe = Recipe(cloud=CloudConfig(process.url, deadline_ms=2000, lost_after_s=120), **options)
    expected = [token for line in generate(recipe, TEXT, POOL) for token in line.get("tokens", ())]
    with closing(ServiceProcess(**TOKEN)) as victim:
        both = replace(recipe, cloud=replace(recipe.cloud, remote=f"{victim.url} {process.url}"))
        hit = False
        while not hit:  # each session begins with the victim with probability 1/2
            lines = []
            for line in generate(both, TEXT, POOL):
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


def assert_cut_off(stream: Iterator[Any]) -> None:
    with pytest.raises(Retry, match="cut off"):
        for _ in stream:
            pass


def assert_gone(client: HttpClient) -> None:
    with pytest.raises(Retry):
        client.call("GET", "/v1/target", None, ServiceInfo, 60)


def test_a_service_that_drains_refuses_connections_and_completes_its_streams() -> None:
    command = ("serve", "--pair", "bundled", "--port", "0", "--device", "cpu", "--drain-s", "60")
    with closing(ForkedProcess(without_sigint, terminal, *command)) as process:
        url = process.stdout.readline().removeprefix("listening on ").strip()
        client, stream = opened_stream(url, 300)
        process.send_signal(signal.SIGINT)
        while is_open(url):
            pass
        assert len(list(stream)) == 300  # raises if it is cut off
        assert_gone(client)
        assert process.wait() == 0 and process.stderr.read() == ""


def is_open(url: str) -> bool:
    try:
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)).close()
    except ConnectionError:
        return False
    return True


def test_terminated_service_ends_streams_with_exit_code_0(process: ServiceProcess) -> None:
    """Last test of the shared service."""
    client, stream = opened_stream(process.url, 1 << 17, "secret")
    process.process.send_signal(signal.SIGTERM)
    assert process.process.wait() == 0
    assert_cut_off(stream)
    assert_gone(client)


def test_closed_worker_responds_unavailable() -> None:
    worker = Worker()
    stopped = client(worker)
    worker.close()
    response = stopped.post("/v1/rounds", json=OPEN)
    assert response.status_code == 503 and response.json()["code"] == "stopping"
