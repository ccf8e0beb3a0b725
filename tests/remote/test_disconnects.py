"""Ends of connections: clients that disconnect, services that do not respond, refused services."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.enumeration import TARGET, VOCAB
from fakes.remote import INFO, DirectClient, TableCache, contexts
from fakes.tiny_models import byte_level_tokenizer, save_model
from fakes.trace_lines import trace_lines
from fastapi.testclient import TestClient

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.load import load, read_tokenizer
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe
from specdemo.remote import client as client_module
from specdemo.remote import target as target_module
from specdemo.remote.client import Deadlines, RemoteVerifier
from specdemo.remote.config import CloudConfig
from specdemo.remote.contexts import Contexts
from specdemo.remote.link import HttpClient
from specdemo.remote.protocol import ServiceInfo, VerifyConfig
from specdemo.remote.serve import serve_model
from specdemo.remote.server import create_app
from specdemo.remote.target import connect
from specdemo.worker import Stream, Worker

PATIENCE = 60.0
SPEC = ModelSpec(PAIRS["bundled"].target, device="cpu")
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


class CountingCache(TableCache):
    """Count passes; each waits for `gate`."""

    passes, gate = 0, threading.Semaphore(0)

    def __init__(self) -> None:
        self.score = self._score

    def _score(self, tokens: Any, draft: Draft) -> Any:
        assert CountingCache.gate.acquire(timeout=PATIENCE)
        CountingCache.passes += 1
        return TARGET.score(tokens, draft)


@pytest.fixture
def counted() -> type[CountingCache]:
    CountingCache.passes, CountingCache.gate = 0, threading.Semaphore(0)
    return CountingCache


async def request(worker: Worker, cloud: Contexts, gone: asyncio.Event, sent: list[Any]) -> None:
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


def test_a_stream_ends_when_its_client_disconnects_in_the_queue(counted: type[CountingCache]) -> None:
    """It computes no token afterwards."""
    worker, gate, sent = Worker(at_once=1), threading.Event(), []
    cloud = Contexts(counted, vocab_size=VOCAB, context=64)
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
        await asyncio.wait_for(request(worker, cloud, gone, sent), PATIENCE)

    asyncio.run(scenario())
    assert sent[0]["status"] == 400
    gate.set()
    assert busy.wait(PATIENCE)
    worker.close()
    assert counted.passes == 0


def test_a_stream_ends_when_its_client_disconnects(counted: type[CountingCache]) -> None:
    """The job ends before the response does."""
    worker, sent = Worker(), []
    cloud = Contexts(counted, vocab_size=VOCAB, context=64)
    counted.gate.release(1)

    async def scenario() -> int:
        await asyncio.wait_for(request(worker, cloud, asyncio.Event(), sent), PATIENCE)
        jobs = [job.stream for job in worker._open]
        counted.gate.release(100)
        for job in jobs:
            assert job.stopping
            await asyncio.to_thread(job.wait, PATIENCE)
        return counted.passes

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
    verifier = RemoteVerifier(http, VerifyConfig(temp=0.0), deadlines=Deadlines(600.0, 600.0, strict))
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


def test_a_run_ends_although_its_context_cannot_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline may be ten minutes."""
    monkeypatch.setattr(client_module, "CLOSE_S", 0.01)
    http, worker = SilentService("DELETE"), Worker()
    stream: Stream[Any] = worker.submit(lambda: verify_and_close(http))
    assert stream.wait(PATIENCE) and stream.error is None and http.asked.is_set()
    http.over.set()
    worker.close()


class RecordingClient(HttpClient):
    """Record which clients are open, and answer with `info`."""

    open: list[HttpClient] = []
    info = INFO

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.open.append(self)

    def call(self, *_: Any) -> Any:
        return self.info

    def close(self) -> None:
        super().close()
        self.open.remove(self)


def test_a_client_of_a_service_with_another_tokenizer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "HttpClient", RecordingClient)
    with pytest.raises(UserError, match="different tokenizers"):
        connect(CloudConfig("http://127.0.0.1:1"), SPEC, 0)
    assert RecordingClient.open == []


def test_forests_are_refused_before_the_first_request_if_the_service_cannot_verify_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer()
    target, drafter = (str(save_model(tmp_path / name, tokenizer)) for name in ("target", "drafter"))
    served = load(ModelSpec(target, device="cpu"), warm=False)
    with monkeypatch.context() as patched:
        patched.setattr(type(served), "chains_only", "its positions are fixed")
        info = ServiceInfo.model_validate_json(TestClient(serve_model(served)).get("/v1/target").content)
    monkeypatch.setattr(RecordingClient, "info", info)
    monkeypatch.setattr(target_module, "HttpClient", RecordingClient)
    cloud = CloudConfig("http://127.0.0.1:1")
    recipe = Recipe(target=target, drafter=drafter, method="tree", cloud=cloud, device="cpu")
    with pytest.raises(UserError, match="several continuations in one pass, and target "):
        list(trace_lines(recipe, "def f():", ModelPool()))
    assert RecordingClient.open == []


def test_the_tokenizer_of_a_remote_target_is_read_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def read(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read_tokenizer(*given)

    monkeypatch.setattr(target_module, "read_tokenizer", read)
    monkeypatch.setattr(target_module, "HttpClient", RecordingClient)
    worker = Worker()
    stream: Stream[Any] = worker.submit(lambda: iter((connect(CloudConfig("http://127.0.0.1:1"), SPEC, 0),)))
    assert stream.wait(PATIENCE) and isinstance(stream.error, UserError)
    assert threads == ["background"]
    worker.close()
