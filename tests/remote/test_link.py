"""Links and time limits: emulated delays and losses, damaged messages, steps that never end, slow prompts."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import httpcore
import pytest
from fakes.enumeration import PROMPT, SMALL, TARGET, VOCAB
from fakes.forked_process import ForkedProcess, terminal
from fakes.remote import (
    COUPLED,
    INFO,
    LONG,
    OPEN,
    DirectClient,
    TableCache,
    connection,
    contexts,
    decode_coupled,
    decode_locally,
    hostile_service,
    rejection,
    remote_verifier,
    streaming_verifier,
    verify_config,
)
from fakes.tiny_models import committed, run
from fastapi.testclient import TestClient

from specdemo.core.errors import UserError
from specdemo.core.policies import Fixed
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.drafters.chain import ModelDrafter
from specdemo.remote.connection import READ_S, ConnectionLost, Deadlines, Requests
from specdemo.remote.contexts import Contexts
from specdemo.remote.link import Cause, HttpClient, MeteredNetwork, NewContext, ResendText, Retry
from specdemo.remote.protocol import PrefillPosition, ReadyResponse, ServiceIdentity, ServiceInfo
from specdemo.remote.server import create_app
from specdemo.worker import Worker

MOST_REQUESTS = 2000  # of a step that should have ended
PATIENCE = 60.0


class Clock:
    """Clock that advances with sleeps and with requests."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.parametrize("unread", [0, 50])
@pytest.mark.parametrize("every_s", [0.5, 2.9, 3.1])
def test_a_step_ends_without_progress_and_at_its_total_limit(unread: int, every_s: float) -> None:
    """Progress is a larger position: each position is reported twice, and the smaller ones again."""
    clock = Clock()
    opened = connection(DirectClient(contexts()), clock=clock)
    requests, position, latest = Requests(opened, Deadlines(lost_s=3.0), 10_000, unread), 0, 0
    assert not requests.report(10_001)
    while requests.remaining() > 0:
        clock.now += min(every_s, requests.remaining())
        if requests.remaining() > 0:
            position += 1
            for reported in (position, position, position - 1, 0):
                assert requests.report(reported) == (reported == position and reported > latest)
                latest = max(latest, reported)
    expected = 3.0 if every_s > 3 else 3.0 + READ_S * unread
    assert clock.now == pytest.approx(expected)


@pytest.mark.parametrize("stopped_s", [0.5, 4.5, 60.0])
def test_the_time_in_which_the_edge_was_stopped_does_not_count(stopped_s: float) -> None:
    """A run in the background of a shell (Ctrl-Z) continues; without responses it is lost 3 s later."""
    clock = Clock()

    class Interrupted(DirectClient):
        def exchange(self, *arguments: Any) -> Any:
            response = super().exchange(*arguments)
            if len(self.sent) == 3:
                clock.now += self.network.limit() + stopped_s
                raise Retry("timed out", Cause.LATE)
            return response

    def text() -> list[int]:
        return committed(decode_coupled(Interrupted(contexts()), clock=clock, deadlines=Deadlines(lost_s=3.0)))

    if stopped_s < 1.0:
        with pytest.raises(ConnectionLost, match="no progress for 4 s"):
            text()
    else:
        assert text() == decode_locally()


class Stuck(DirectClient):
    """Service that responds to drafts with the same failure, or with the response of an earlier step."""

    def __init__(self, clock: Clock, failure: Exception | None, prefill: bool) -> None:
        super().__init__(contexts())
        self.clock, self.failure, self.prefill = clock, failure, prefill
        self.count = 0

    def exchange(self, message: Any, *rest: Any) -> Any:
        if message.draft_tokens or self.prefill:
            self.count += 1
            self.clock.now += 0.001
            assert self.count < MOST_REQUESTS, "the step does not end"
            if self.failure is not None:
                raise self.failure
            return self.responses[-1]
        return super().exchange(message, *rest)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("failure", "prefill"),
    [(ResendText("gone"), True), (NewContext("old"), False), (Retry("late"), True), (None, False)],
)
def test_repeated_responses_end_a_step(failure: Exception | None, prefill: bool, strict: bool) -> None:
    clock = Clock()
    http = Stuck(clock, failure, prefill)
    deadlines = Deadlines(0.4 if strict else 60.0, 3.0, strict)
    verifier = remote_verifier(http, COUPLED, clock=clock, sleep=clock.sleep, deadlines=deadlines)
    text = list(PROMPT)
    if not prefill:
        text.append(verifier.verify(text, Draft()).token)
    began = clock.now
    with pytest.raises(ConnectionLost, match="no progress for [3-4] s"):
        verifier.verify(text, Draft() if prefill else Draft.chain((1, 2)))
    assert 3.0 <= clock.now - began < 3.0 + READ_S * len(text) + 0.5


def test_each_row_is_requested_at_most_once() -> None:
    class Insatiable(DirectClient):
        def exchange(self, message: Any, *rest: Any) -> Any:
            response = super().exchange(message, *rest)
            if message.draft_tokens:
                response = response.model_copy(update={"wanted_row": 0})
            assert len(self.sent) < 100, "the row was requested again"
            return response

    verifier = remote_verifier(Insatiable(contexts()), verify_config(SamplingParams(), seed=1))
    drafter = ModelDrafter(SMALL.score, SamplingParams(), Noise(1, "draft"), VOCAB)
    with pytest.raises(UserError, match="requests the same row again"):
        run(PROMPT, verifier, drafter, Fixed(3), LONG)


class Backend(httpcore.NetworkBackend):
    """Network whose connections call `read(timeout)` and `write(data)`; `connections` are counted."""

    def __init__(self, read: Callable[[float | None], bytes], write: Callable[[bytes], object] = len) -> None:
        self.read, self.write, self.connections = read, write, 0

    def connect_tcp(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        self.connections += 1
        network = self

        class Stream(httpcore.NetworkStream):
            def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
                return network.read(timeout)

            def write(self, buffer: bytes, timeout: float | None = None) -> None:
                network.write(buffer)

            def close(self) -> None: ...

        return Stream()


@pytest.mark.parametrize("dripping", ["headers", "body"])
def test_dripping_responses_are_cut_off_at_the_limit(dripping: str) -> None:
    """A byte arrives every 0.3 s."""
    clock = Clock()
    header = b"X: y\r\n" * 1000 if dripping == "headers" else b""
    response = iter(b"HTTP/1.1 200 OK\r\n" + header + b"Content-Length: 5000\r\n\r\n" + b" " * 5000)

    def read(timeout: float | None) -> bytes:
        clock.now += 0.3
        return bytes([next(response)])

    http = HttpClient("http://cloud:1")
    http.network.clock, http.network.inner = clock, Backend(read)
    Requests(connection(http, clock=clock), Deadlines(lost_s=3.0))
    with pytest.raises(Retry):
        http.call("GET", "/v1/target", None, ServiceInfo, 0.4)
    assert 3.0 <= clock.now < 3.5
    verifier = streaming_verifier(http, COUPLED, 4, Deadlines(lost_s=3.0), clock=clock, sleep=clock.sleep)
    began = clock.now
    with pytest.raises(ConnectionLost):
        verifier.verify([1, 2], Draft())
    assert 3.0 <= clock.now - began < 4.0


# --- processes -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupt_ends_a_run_that_waits_for_a_service() -> None:
    waiting, released = threading.Event(), threading.Event()

    def respond(request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "round" in request and not request.get("draft_tokens"):
            return 200, rejection(request, 5)
        waiting.set()
        released.wait(PATIENCE)
        return 404, {"error": "gone", "code": "unknown_context"}

    with hostile_service(respond) as url:
        command = ("run", "def f():", "--remote", url, "--pair", "bundled", "--provisional")
        with closing(ForkedProcess(terminal, *command, "--deadline-ms", "60000", "--lost-after-s", "600")) as program:
            try:
                assert waiting.wait(PATIENCE)
                program.send_signal(signal.SIGINT)
                _, errors = program.communicate()
            finally:
                released.set()
            assert program.wait() == 130 and "Traceback" not in errors, errors


# --- links ------------------------------------------------------------------------------------------------------------


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def emulated(**link: Any) -> tuple[HttpClient, list[bytes], Clock]:
    """Client of a service that responds at once, received messages, and the clock."""
    clock, received = Clock(), []
    inner = Backend(lambda timeout: OK, received.append)
    network = MeteredNetwork(**link, wait=clock.sleep, clock=clock, inner=inner)
    return HttpClient("http://cloud:1", network=network), received, clock


def ask(http: HttpClient) -> ReadyResponse:
    return http.call("GET", "/v1/ready", None, ReadyResponse, 0.4)


def test_bytes_and_round_trips_are_counted() -> None:
    http, received, clock = emulated(rtt_s=0.1)
    for round_trips in (2, 3):  # the first is the handshake
        ask(http)
        assert clock.now == pytest.approx(0.1 * round_trips)
    link, _ = http.network.take()
    assert (link.bytes_up, link.bytes_down) == (len(b"".join(received)), 2 * len(OK))
    assert (link.up_s, link.down_s) == (0, 0), "the emulated delay is no time of sending"
    assert http.network.take()[0].bytes_up == 0


def test_lost_messages_time_out() -> None:
    """With 30 % loss each way, 51 % of the exchanges time out."""
    failed = reached = 0
    for seed in range(400):
        http, received, clock = emulated(loss=0.3, seed=seed)
        try:
            ask(http)
        except Retry as failure:
            failed += 1
            assert clock.now == pytest.approx(0.4) and failure.cause is Cause.LATE
        reached += bool(received)
    assert 0.41 < failed / 400 < 0.61 and 0.6 < reached / 400 < 0.8  # four standard deviations


DAMAGED = ((200, b"{"), (400, b"Invalid HTTP request received."), (422, b'{"error": "no JSON", "code": "unreadable"}'))


def test_damaged_messages_are_repeated_on_a_new_connection() -> None:
    """After the first response."""
    responses = iter([DAMAGED[0], (200, b"{}"), *DAMAGED, (200, b"{}"), (200, b"{}")])

    def read(timeout: float | None) -> bytes:
        status, body = next(responses)
        return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)

    http = HttpClient("http://cloud:1")
    http.network.inner = service = Backend(read)
    with pytest.raises(UserError, match="is not a specdemo service of this version"):
        ask(http)
    ask(http)
    for _ in DAMAGED:
        with pytest.raises(Retry):
            ask(http)
    ask(http)
    ask(http)
    assert service.connections == 2 + len(DAMAGED) and next(responses, None) is None


# --- long prompts, which the service reads in parts -------------------------------------------------------------------

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


class Reading(DirectClient):
    """Service that reads `rate` tokens per second of its clock, and stops at `stuck`."""

    def __init__(self, rate: float, stuck: int = 1 << 30) -> None:
        super().__init__(contexts())
        self.rate, self.stuck = rate, stuck
        self.now = self.read = 0.0

    def exchange(self, message: Any, *rest: Any) -> Any:
        if message.base == 0 and self.read < len(message.tokens):
            self.now += 1.0
            self.read = min(self.read + self.rate, self.stuck)
            if self.read < len(message.tokens):
                raise Retry("reading", Cause.BUSY, int(self.read))
        return super().exchange(message, *rest)


def test_a_long_prompt_is_not_a_lost_connection() -> None:
    """It takes 50 s, and a service without progress is lost after 3 s."""
    http = Reading(rate=1.0)
    assert committed(decode_coupled(http, clock=lambda: http.now)) == decode_locally()
    http = Reading(rate=1.0)
    http.cloud.context = 200
    text, slept = [1 + i % 2 for i in range(50)], []
    options = {"deadlines": Deadlines(lost_s=3.0), "clock": lambda: http.now, "sleep": slept.append}
    limited = remote_verifier(http, COUPLED, **options)
    with pytest.raises(ConnectionLost):  # 0.1 s per token
        limited.verify(text, Draft())
    assert http.now == pytest.approx(3 + READ_S * len(text), abs=1.0)
    http.rate, http.read = 8.0, 0.0
    assert remote_verifier(http, COUPLED, **options).verify(text, Draft()).token is not None and not slept
    http.read, http.stuck, start = 0.0, 20, http.now
    with pytest.raises(ConnectionLost):
        remote_verifier(http, COUPLED, **options).verify(text, Draft())
    assert 5.0 <= http.now - start <= 7.0


class ReportingStream:
    """Client of a stream that reports its prefill."""

    url = "stream"

    def __init__(self, positions: Sequence[int]) -> None:
        self.now, self.positions = 0.0, positions
        self.network, self.identity = DirectClient(contexts()).network, ServiceIdentity()

    def tokens(self, *_: Any) -> Iterator[int | PrefillPosition | None]:
        for position in self.positions:
            self.now += 2.0
            if self.network.limit() <= 0:
                raise Retry("late")
            yield PrefillPosition(position)
        yield 1

    def close(self) -> None: ...


def test_progress_of_a_stream_extends_its_deadline() -> None:
    def token(*positions: int) -> int | None:
        http = ReportingStream(positions)
        options = {"clock": lambda: http.now, "sleep": lambda seconds: None, "vocab_size": VOCAB}
        return streaming_verifier(http, COUPLED, 4, Deadlines(lost_s=3.0), **options).verify(PROMPT * 20, Draft()).token

    assert token(10, 20, 30, 40) == 1
    for positions in ((10, 10, 10, 10), (99, 98, 97, 96)):
        with pytest.raises(ConnectionLost):
            token(*positions)
