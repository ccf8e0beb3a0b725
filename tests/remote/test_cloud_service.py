"""The cloud's service: who may ask, what is refused, what is streamed; and two real processes over loopback."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
from fakes.enumeration import TARGET, VOCAB
from fakes.remote import Table, contexts, plain
from fakes.trace_lines import trace_lines as generate
from fastapi.testclient import TestClient

from specdemo.cli.main import main
from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig
from specdemo.remote.contexts import Contexts
from specdemo.remote.protocol import ENCODINGS, ServiceInfo
from specdemo.remote.server import RateLimiter, ServiceLimits, service
from specdemo.worker import Worker

ROOT = Path(__file__).parents[2]
ABOUT = ServiceInfo(
    name="table",
    vocab_size=VOCAB,
    context=64,
    stop=[3],
    tokenizer="",
    engine="table",
    dtype="float32",
    device="cpu",
    threads=1,
    weight_bytes=0,
    bit_equal=True,
)
OPEN = {"ctx_id": "a", "round": 0, "base": 0, "k": 0, "tokens": [2, 0, 2, 0], "sampling_cfg": {"temp": 1.0}}
DRAFTED = {**OPEN, "k": 2, "draft_tokens": [1, 2], "q_token_probs": [0.5, 0.5]}


def client(worker: Worker | None = None, held: Contexts | None = None, **options: Any) -> TestClient:
    app = service(ABOUT, contexts(stop=frozenset({3})) if held is None else held, worker or Worker(), **options)
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def cloud() -> TestClient:
    return client()


# --- who may ask -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [None, "Bearer wrong", "Bearer ", "Basic c2VjcmV0", "secret", "Bearer sécret"])
def test_without_the_token_nothing_is_told(sent: str | None) -> None:
    guarded = client(token="secret")
    headers = {} if sent is None else {"Authorization": sent.encode("utf-8")}
    for response in (
        guarded.get("/v1/target", headers=headers),
        guarded.post("/v1/rounds", json=OPEN, headers=headers),
        guarded.post("/v1/rounds", content=b"nonsense", headers=headers),
        guarded.post("/v1/texts", json={}, headers=headers),
        guarded.delete("/v1/contexts/a", headers=headers),
    ):
        assert response.status_code == 401 and response.json()["code"] == "unauthorised"
    assert guarded.get("/v1/target", headers={"Authorization": "Bearer secret"}).json()["name"] == "table"


def test_an_address_may_ask_so_often() -> None:
    now = [0.0]
    rates = RateLimiter(2.0, 3, clock=lambda: now[0])
    assert [rates.allow("a") for _ in range(4)] == [True, True, True, False] and rates.allow("b")
    now[0] = 0.5
    assert rates.allow("a") and not rates.allow("a")
    limited = client(limits=ServiceLimits(rounds_per_second=1e-6, burst=1))
    first, second = limited.get("/v1/target"), limited.get("/v1/target")
    assert (first.status_code, second.status_code, second.json()["code"]) == (200, 429, "busy")


# --- what is refused ---------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, int, str]] = {
    "no object": ([], 422, "VerifyRequest"),
    "unknown field": ({**OPEN, "extra": 1}, 422, "extra"),
    "a number in quotes": ({**OPEN, "round": "0"}, 422, "round"),
    "a number that is a truth value": ({**OPEN, "round": True}, 422, "round"),
    "a negative k": ({**OPEN, "k": -1}, 422, "k:"),
    "k that does not fit": ({**DRAFTED, "k": 3}, 422, "k is 3 and 2 tokens"),
    "a million drafted": ({**DRAFTED, "draft_tokens": [1] * 10**6}, 422, "at most 256"),
    "an id out of range": ({**DRAFTED, "draft_tokens": [1, 4]}, 422, "not among the model's 4 ids"),
    "a negative id": ({**DRAFTED, "draft_tokens": [1, -4]}, 422, "draft_tokens"),
    "an id in the text out of range": ({**OPEN, "tokens": [9]}, 422, "not among the model's 4 ids"),
    "an id beyond all bounds": ({**OPEN, "tokens": [1 << 80]}, 422, "tokens"),
    "q above one": ({**DRAFTED, "q_token_probs": [1.5, 0.5]}, 422, "q_token_probs"),
    "a q too few": ({**DRAFTED, "q_token_probs": [0.5]}, 422, "one for each"),
    "a parent that comes later": ({**DRAFTED, "parents": [-1, 1]}, 422, "must come before"),
    "a parent of parents": ({**DRAFTED, "parents": [-2, 0]}, 422, "parents"),
    "a row that is none": ({**DRAFTED, "rows": [{"node": 0, "values": "AACAPw=="}]}, 422, "does not fit"),
    "a row in pieces": ({**DRAFTED, "rows": [{"node": 0, "values": "AAA="}]}, 422, "middle of a number"),
    "a row that is no base64": ({**DRAFTED, "rows": [{"node": 0, "values": "%%"}]}, 422, "rows.0.values"),
    "a row of zeros": ({**DRAFTED, "rows": [{"node": 0, "values": "A" * 21 + "A=="}]}, 422, "is no law"),
    "a row of no node": ({**DRAFTED, "rows": [{"node": 7, "values": "AAAA"}]}, 422, "belongs to no node"),
    "an unknown rule": ({**OPEN, "sampling_cfg": {"rule": "magic"}}, 422, "known are rejection"),
    "no temperature": ({**OPEN, "sampling_cfg": {"temp": -1.0}}, 422, "temp"),
    "a bad word out of range": ({**OPEN, "sampling_cfg": {"bad_words": [[2147483646]]}}, 422, "not among"),
    "all but cold": ({**OPEN, "sampling_cfg": {"temp": 1e-300}}, 422, "0 or at least"),
    "a penalty that leaves no number": ({**OPEN, "sampling_cfg": {"rep_penalty": 1e-300}}, 422, "rep_penalty"),
    "every token a bad word": ({**OPEN, "sampling_cfg": {"bad_words": [[0], [1], [2], [3]]}}, 422, "ban fewer"),
    "no settings": ({**OPEN, "sampling_cfg": None}, 422, "sampling_cfg"),
    "no text": ({**OPEN, "tokens": []}, 422, "nothing to continue"),
    "too long a text": ({**OPEN, "tokens": [1] * 65}, 422, "do not fit the model's 64"),
    "an id with a path in it": ({**OPEN, "ctx_id": "../a"}, 422, "ctx_id"),
    "a context that is not there": ({**OPEN, "ctx_id": "b", "base": 4, "digest": "0" * 16}, 404, "whole text"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rounds_get_one_sentence(cloud: TestClient, case: str) -> None:
    body, status, words = BAD[case]
    response = cloud.post("/v1/rounds", json=body)
    assert response.status_code == status and words in response.json()["error"]
    assert "\n" not in response.json()["error"] and len(response.json()["error"]) < 300
    packed = cloud.post("/v1/rounds", content=_packed(body), headers={"Content-Type": "application/msgpack"})
    assert packed.status_code in (status, 422) and msgpack.unpackb(packed.content)["error"]


NAN = struct.pack("<f", math.nan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_token_probs": [math.nan, 0.5]}, "q_token_probs"),
        ({"q_token_probs": [0.5, math.inf]}, "q_token_probs"),
        ({"q_token_probs": msgpack.ExtType(1, NAN * 2)}, "q_token_probs"),
        ({"q_token_probs": msgpack.ExtType(1, NAN[:3])}, "msgpack"),
        ({"sampling_cfg": {"temp": math.nan}}, "temp"),
        ({"sampling_cfg": {"top_p": math.nan}}, "top_p"),
        ({"rows": [{"node": 0, "values": NAN * VOCAB}]}, "is no law"),
        ({"draft_tokens": msgpack.ExtType(1, struct.pack("<2f", 1, 2))}, "draft_tokens"),
    ],
)
def test_numbers_that_are_none_are_refused_in_the_binary_encoding_too(
    cloud: TestClient, changes: dict[str, Any], words: str
) -> None:
    body = msgpack.packb({**DRAFTED, **changes})
    response = cloud.post("/v1/rounds", content=body, headers={"Content-Type": "application/msgpack"})
    assert response.status_code == 422 and words in msgpack.unpackb(response.content)["error"]


TEXT_OF = {"tokens": [2, 0], "sampling_cfg": {}, "max_tokens": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": [4]}, "not among the model's 4 ids"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [1.5]}, "tokens"),
        ({"tokens": [1] * 10**6}, "tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"sampling_cfg": None}, "sampling_cfg"),
        ({"sampling_cfg": {"rule": "magic"}}, "known are rejection"),
        ({"sampling_cfg": {"bad_words": [[0], [1], [2], [3]]}}, "ban fewer"),
        ({"sampling_cfg": {"bad_words": [[4]]}}, "not among the model's 4 ids"),
        ({"sampling_cfg": {"temp": 1e-9}}, "0 or at least"),
        ({"draft_tokens": [1]}, "draft_tokens"),
    ],
)
def test_bad_texts_get_one_sentence(cloud: TestClient, changes: dict[str, Any], words: str) -> None:
    response = cloud.post("/v1/texts", json={**TEXT_OF, **changes})
    assert response.status_code == 422 and words in response.json()["error"] and "\n" not in response.json()["error"]


def _packed(body: Any) -> bytes:
    try:
        return msgpack.packb(body)
    except OverflowError:  # msgpack has no such numbers: let it be nonsense
        return b"\xc1"


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", "application/json", 422),
        (b"{", "application/json", 422),
        (b'{"ctx_id":"a","round":0,"base":0,"k":1,"draft_tokens":[1],"q_token_probs":[NaN]}', "application/json", 422),
        (b"[" * 100_000, "application/json", 422),
        (b"\xff\xfe", "application/json", 422),
        (b"\xc1", "application/msgpack", 422),
        (b"\x91" * 100_000, "application/msgpack", 422),
        (b"\xdf\xff\xff\xff\xff", "application/msgpack", 422),
        (b"\xd6\x05abcd", "application/msgpack", 422),
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
        (b" " * 2000, "application/json", 413),
    ],
)
def test_bodies_that_are_no_messages(body: bytes, kind: str, status: int) -> None:
    small = client(limits=ServiceLimits(body_bytes=1000 if status == 413 else 1 << 20))
    response = small.post("/v1/rounds", content=body, headers={"Content-Type": kind})
    assert response.status_code == status and response.content


def test_after_all_that_it_still_judges(cloud: TestClient) -> None:
    answer = cloud.post("/v1/rounds", json={**DRAFTED, "ctx_id": "fresh", "q_token_probs": None}).json()
    assert answer["accepted_len"] in (0, 1, 2) and len(answer["p"]) == 2
    assert all(math.isfinite(p) for p in answer["p"])


def test_what_it_takes_and_gives_is_described(cloud: TestClient) -> None:
    described = cloud.get("/openapi.json").json()
    assert set(described["paths"]) == {"/v1/target", "/v1/rounds", "/v1/texts", "/v1/contexts/{ctx_id}"}
    fields = described["components"]["schemas"]["VerifyRequest"]["properties"]
    assert {"ctx_id", "draft_tokens", "q_token_probs", "hard_mask", "k", "sampling_cfg"} <= set(fields)
    for operation in (one for path in described["paths"].values() for one in path.values()):
        for part in (operation.get("requestBody", {}), *operation["responses"].values()):
            assert set(part.get("content", {})) in (set(), set(ENCODINGS))
        assert operation.get("requestBody") or not operation["operationId"].endswith("post")
    text = json.dumps(described)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in described["components"]["schemas"]


# --- turns -------------------------------------------------------------------------------------------------------


@contextmanager
def occupied(worker: Worker, jobs: int = 1) -> Iterator[None]:
    """The worker is at the first of these jobs, and the others wait, until the block ends."""
    go, started = threading.Event(), threading.Event()

    def held() -> Iterator[None]:
        started.set()
        go.wait()
        yield

    worker.submit(held)
    assert started.wait(10)
    for _ in range(jobs - 1):
        worker.submit(held)
    try:
        yield
    finally:
        go.set()


def test_too_many_at_once_are_told_so() -> None:
    """The worker is held up by one job and one waits: the next is one too many."""
    worker = Worker(at_once=1, waiting=1)
    with occupied(worker, jobs=2):
        response = client(worker).post("/v1/rounds", json=OPEN)
    assert response.status_code == 429 and response.json()["code"] == "busy" and response.headers["retry-after"]


def test_what_is_given_up_while_it_waits_is_never_computed() -> None:
    """Whoever hangs up in the queue takes its round along; the next one finds its turn."""
    worker, cloud = Worker(at_once=1), contexts()
    messages = [
        {"type": "http.request", "body": json.dumps(OPEN).encode(), "more_body": False},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/rounds",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("edge", 1),
    }
    with occupied(worker):
        asyncio.run(service(ABOUT, cloud, worker)(scope, receive, send))
    worker.close()
    assert sent[0]["status"] == 400 and len(cloud) == 0


def test_a_text_is_streamed_as_plain_decoding_writes_it(cloud: TestClient) -> None:
    chosen = {"temp": 1.0, "rule": "coupled", "seed": 7}
    body = {"tokens": [2, 0, 2, 0], "sampling_cfg": chosen, "max_tokens": 40}
    *tokens, end = cloud.post("/v1/texts", json=body).text.split()
    whole = plain()
    stop = whole.index(3) + 1 if 3 in whole else len(whole)
    assert [int(token) for token in tokens] == whole[:stop] and end == "end"
    full = cloud.post("/v1/texts", json={**body, "tokens": [1] * 63}).text.split()
    assert full[-1] == "end" and 1 <= len(full) - 1 <= 2  # as far as the context of 64 reaches
    long = cloud.post("/v1/texts", json={**body, "tokens": [1] * 65})
    assert long.status_code == 422 and "do not fit" in long.json()["error"]


def failing(error: Exception) -> TestClient:
    """A service whose model fails on texts of five tokens and more."""

    class Broken(Table):
        def __init__(self) -> None:
            self.score = self._score

        def _score(self, tokens: Any, draft: Any) -> Any:
            if len(tokens) >= 5:
                raise error
            return TARGET.score(tokens, draft)

    return client(held=Contexts(Broken, vocab_size=VOCAB, context=64))


def test_a_text_that_fails_half_way_says_why() -> None:
    body = {"tokens": [2, 0, 2, 0], "sampling_cfg": {}, "max_tokens": 9}
    lines = failing(UserError("the model is tired: let it rest")).post("/v1/texts", json=body).text.splitlines()
    assert len(lines) == 2 and lines[0].isdigit() and lines[1] == "error the model is tired: let it rest"


def test_an_error_in_the_model_is_no_answer_and_harms_no_other() -> None:
    flawed = failing(ZeroDivisionError())
    assert flawed.post("/v1/rounds", json={**OPEN, "tokens": [1] * 5}).status_code == 500
    assert flawed.post("/v1/rounds", json=OPEN).status_code == 200


# --- the terminal ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serve", "--port", "70000"], "cannot listen on"),
        (["serve", "--queue", "0"], "must be above 0"),
        (["serve", "--certificate", "/nowhere"], "there is no file /nowhere"),
        (["serve", "--target", "/nowhere"], "/nowhere"),
        (["run", "x", "--rtt-ms", "3"], "has no meaning without --remote"),
        (["run", "x", "--remote", "nowhere"], "give http://host:port"),
        (["run", "x", "--remote", "http://127.0.0.1:1"], "there is no service at"),
        (["run", "x", "--remote", "http://127.0.0.1:1", "--mode", "magic"], "known are speculative"),
        (["run", "x", "--remote", "http://127.0.0.1:1", "--gate", "magic"], "known are nll"),
    ],
)
def test_bad_options_get_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert sentence in error[-1] and error[-1].startswith("specdemo: ")


# --- two processes -----------------------------------------------------------------------------------------------

TEXT = 'def read_lines(path):\n    """Read the lines of a file."""\n'


class Process:
    """The service in a process of its own."""

    def __init__(self, port: int = 0) -> None:
        command = [sys.executable, "-m", "specdemo", "serve", "--port", str(port), "--device", "cpu"]
        environment = {**os.environ, "SPECDEMO_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().removeprefix("listening on ").strip()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def process() -> Iterator[list[Process]]:
    """The one that runs now, last in the list; tests may put another in its place."""
    running = [Process()]
    yield running
    running[-1].kill()


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEMO_TOKEN", "secret")


SHELF = ModelPool()


def tokens(**options: Any) -> list[int]:
    lines = list(generate(Recipe(device="cpu", max_tokens=24, **options), TEXT, SHELF))
    assert lines[-1]["end"] in ("length", "stop"), lines[-1]
    return [token for line in lines if "i" in line for token in line["tokens"]]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_two_processes_write_what_one_writes(process: list[Process], secret: None, encoding: str) -> None:
    cloud = CloudConfig(process[-1].url, encoding=encoding)
    coupled = {"temperature": 1.0, "top_p": 1.0, "rule": "coupled", "seed": 3}
    for settings in ({"temperature": 0.0}, coupled):
        plainly = tokens(method="ar", **settings)
        for method in ("draft", "nasd", "tree") if encoding == "json" else ("draft", "lookahead"):
            assert tokens(method=method, cloud=cloud, **settings) == plainly, method
    if encoding == "json":
        return
    assert tokens(cloud=CloudConfig(process[-1].url, mode="cloud_only"), **coupled) == tokens(method="ar", **coupled)


def test_the_trace_counts_what_went_over_the_wire(process: list[Process], secret: None) -> None:
    recipe = Recipe(
        device="cpu", max_tokens=24, temperature=1.0, cloud=CloudConfig(process[-1].url, encoding="msgpack")
    )
    head, *steps, end = (line for line in generate(recipe, TEXT, SHELF) if "phase" not in line)
    assert head["exact"] and process[-1].url in head["environment"]["device"]
    assert head["recipe"]["cloud"]["remote"] == process[-1].url and "secret" not in json.dumps([head, steps, end])
    for step in steps:
        link = step["remote"]
        assert link["bytes_up"] > 0 and link["bytes_down"] > 0 and link["escalated"] == 1
        assert 0 < link["cloud_s"] < step["verify_s"] and link["rtt_s"] > 0
    total = end["metrics"]["remote"]
    assert total["bytes_up"] == sum(step["remote"]["bytes_up"] for step in steps)
    assert total["cloud_call_share"] == 1
    rejected = [step["remote"] for step in steps if step["kind"] == "correction"]
    assert rejected and all(link["rows"] >= 1 for link in rejected)


def test_a_cloud_that_is_killed_in_mid_run_and_started_again_changes_nothing(
    process: list[Process], secret: None
) -> None:
    settings = {"temperature": 1.0, "top_p": 1.0, "seed": 11}
    cloud = CloudConfig(process[-1].url, deadline_ms=200, lost_after_s=120)
    faultless = tokens(cloud=cloud, **settings)
    recipe = Recipe(device="cpu", max_tokens=24, cloud=cloud, **settings)
    written, port = [], int(process[-1].url.rpartition(":")[2])
    for line in generate(recipe, TEXT, SHELF):
        if "i" in line:
            written += line["tokens"]
            if line["i"] == 3:
                process[-1].kill()
                process.append(Process(port))
    assert written == faultless and line["end"] in ("length", "stop")


def test_an_edge_that_is_killed_in_mid_run_harms_nobody(process: list[Process], secret: None) -> None:
    url = process[-1].url
    command = [sys.executable, "-m", "specdemo", "run", TEXT, "--remote", url, "--json", "--max-tokens", "1000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as edge:
        assert edge.stdout is not None
        assert any(json.loads(line).get("i") == 3 for line in edge.stdout)  # in the midst of its text
        edge.kill()
    assert edge.returncode == -signal.SIGKILL
    assert tokens(cloud=CloudConfig(url), temperature=0.0) == tokens(method="ar", temperature=0.0)


def test_what_does_not_fit_is_refused_in_one_sentence(
    process: list[Process], secret: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="there is no service at"):
        tokens(cloud=CloudConfig("http://127.0.0.1:1", lost_after_s=1))
    monkeypatch.setenv("SPECDEMO_TOKEN", "wrong")
    with pytest.raises(UserError, match="bearer token"):
        tokens(cloud=CloudConfig(process[-1].url))
