"""Long prompts of edges: the service reads them in parts, and a repeated request continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fakes.enumeration import PROMPT, TARGET, VOCAB
from fakes.remote import COUPLED, INFO, OPEN, DirectClient, TableCache, contexts, decode_coupled, decode_locally
from fakes.tiny_models import committed
from fastapi.testclient import TestClient

from specdemo.core.step import Draft
from specdemo.remote.client import Deadlines, RemoteVerifier, StreamingVerifier
from specdemo.remote.contexts import Contexts
from specdemo.remote.deadline import READ_S, ConnectionLost
from specdemo.remote.link import NoResponse, PromptReading
from specdemo.remote.protocol import PrefillPosition, ServiceIdentity, VerifyRequest
from specdemo.remote.server import create_app
from specdemo.worker import Worker

pytestmark = pytest.mark.slow

CHUNK = 10
LONG_TEXT = [1 + i % 2 for i in range(55)]


class SlowCache(TableCache):
    """Cache that needs 0.4 s per chunk of a prompt."""

    now = 0.0
    chunks: list[int] = []

    def __init__(self) -> None:
        self.score, self.read = TARGET.score, 0

    def prefill(self, tokens: Sequence[int]) -> Iterator[int]:
        while len(tokens) - self.read > CHUNK:
            SlowCache.now += 0.4
            self.read += CHUNK
            SlowCache.chunks.append(self.read)
            yield self.read


@pytest.fixture
def slow_service() -> Iterator[TestClient]:
    SlowCache.now, SlowCache.chunks = 0.0, []
    table, worker = Contexts(SlowCache, vocab_size=VOCAB, context=64), Worker()
    yield TestClient(create_app(INFO, table, worker, clock=lambda: SlowCache.now))
    worker.close()


def test_a_repeated_request_continues_the_prefill(slow_service: TestClient) -> None:
    request = {**OPEN, "tokens": LONG_TEXT}
    responses = [slow_service.post("/v1/rounds", json=request) for _ in range(3)]
    assert [response.status_code for response in responses] == [503, 200, 200]
    problem = responses[0].json()
    assert (problem["code"], problem["position"]) == ("prefill", 30) and "30 tokens" in problem["error"]
    assert SlowCache.chunks == [10, 20, 30, 40, 50]
    quick = {**request, "ctx_id": "b", "tokens": LONG_TEXT[:20]}
    assert slow_service.post("/v1/rounds", json=quick).status_code == 200


def test_streams_report_the_prefill_to_edges_that_request_it(slow_service: TestClient) -> None:
    body = {"tokens": LONG_TEXT, "sampling_cfg": {"temp": 0.0}, "max_tokens": 2}
    plain = slow_service.post("/v1/texts", json=body).text.splitlines()
    reported = slow_service.post("/v1/texts?progress=1", json=body).text.splitlines()
    assert reported == [f"read {count}" for count in range(10, 60, 10)] + plain and len(plain) == 3


@pytest.mark.parametrize("options", [{"max_contexts": 2}, {"expiry_s": 3.0}])
def test_a_prefill_counts_as_use(options: dict[str, Any]) -> None:
    """Context "a" is older than "b", and reads another text after it; "c" evicts."""
    now = [0.0]
    table = Contexts(SlowCache, vocab_size=VOCAB, context=64, clock=lambda: now[0], **options)

    def request(name: str, **changes: Any) -> VerifyRequest:
        return VerifyRequest(
            **{"context_id": name, "step": 0, "base": 0, "k": 0, "tokens": [*PROMPT], "config": COUPLED, **changes}
        )

    for second, name in enumerate(("a", "b")):
        now[0] = float(second)
        table.verify(request(name))
    now[0] = 3.0
    assert list(table.prefill(request("a", epoch=1, tokens=LONG_TEXT)))
    now[0] = 5.0
    table.verify(request("c"))
    assert table.delete("a") and not table.delete("b") and table.delete("c")


class Reading(DirectClient):
    """Service that reads `rate` tokens per second of its clock, and stops at `stuck`."""

    def __init__(self, rate: float, stuck: int = 1 << 30) -> None:
        super().__init__(contexts())
        self.rate, self.stuck = rate, stuck
        self.now = self.read = 0.0

    def call(self, method: str, path: str, message: Any, *rest: Any) -> Any:
        if isinstance(message, VerifyRequest) and message.base == 0 and self.read < len(message.tokens):
            self.now += 1.0
            self.read = min(self.read + self.rate, self.stuck)
            if self.read < len(message.tokens):
                raise PromptReading("reading", int(self.read))
        return super().call(method, path, message, *rest)


def test_a_long_prompt_is_not_a_lost_connection() -> None:
    """It takes 50 s, and a service without progress is lost after 3 s."""
    http = Reading(rate=1.0)
    http.cloud.context = 200
    text, slept = [1 + i % 2 for i in range(50)], []
    options = {"deadlines": Deadlines(lost_s=3.0), "clock": lambda: http.now, "sleep": slept.append}
    limited = RemoteVerifier(http, COUPLED, **options)
    with pytest.raises(ConnectionLost):  # 0.1 s per token
        limited.verify(text, Draft())
    assert http.now == pytest.approx(3 + READ_S * len(text), abs=1.0)
    http.rate, http.read = 8.0, 0.0
    assert RemoteVerifier(http, COUPLED, **options).verify(text, Draft()).token is not None and not slept
    http.read, http.stuck, start = 0.0, 20, http.now
    with pytest.raises(ConnectionLost):
        RemoteVerifier(http, COUPLED, **options).verify(text, Draft())
    assert 5.0 <= http.now - start <= 7.0


def test_the_text_after_a_prefill_in_parts_is_the_same() -> None:
    http = Reading(rate=1.0)
    assert committed(decode_coupled(http, clock=lambda: http.now)) == decode_locally()


class Stream:
    """Client of a stream that reports its prefill."""

    url = "stream"

    def __init__(self, positions: Sequence[int]) -> None:
        self.now, self.positions = 0.0, positions
        self.network, self.identity = DirectClient(contexts()).network, ServiceIdentity()

    def tokens(self, *_: Any) -> Iterator[int | PrefillPosition | None]:
        for position in self.positions:
            self.now += 2.0
            if self.network.limit() <= 0:
                raise NoResponse("late")
            yield PrefillPosition(position)
        yield 1

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("positions", "lost"), [([10, 20, 30, 40], False), ([10, 10, 10, 10], True), ([99, 98, 97, 96], True)]
)
def test_progress_of_a_stream_extends_its_deadline(positions: list[int], lost: bool) -> None:
    http = Stream(positions)
    options = {"clock": lambda: http.now, "sleep": lambda seconds: None, "vocab_size": VOCAB}
    verifier = StreamingVerifier(http, COUPLED, 4, Deadlines(lost_s=3.0), **options)
    if lost:
        with pytest.raises(ConnectionLost):
            verifier.verify(list(PROMPT) * 20, Draft())
    else:
        assert verifier.verify(list(PROMPT) * 20, Draft()).token == 1
