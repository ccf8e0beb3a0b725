"""Time limit of a step: services that never complete a step end it, and slow ones with progress do not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import httpcore
import pytest
from fakes.enumeration import PROMPT, SMALL, VOCAB
from fakes.forked_process import ForkedProcess, terminal
from fakes.hostile_service import hostile_service
from fakes.remote import COUPLED, LONG, DirectClient, contexts, decode_coupled, decode_locally, verify_config
from fakes.tiny_models import committed, run

from specdemo.core.errors import UserError
from specdemo.core.policies import Fixed
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.drafters.model import ModelDrafter
from specdemo.remote.client import Deadlines, RemoteVerifier, StreamingVerifier
from specdemo.remote.deadline import READ_S, ConnectionLost, StepDeadline
from specdemo.remote.link import ContextGone, HttpClient, NoResponse, RequestSuperseded, RequestTimeout
from specdemo.remote.protocol import ServiceInfo, VerifyRequest

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


@pytest.mark.parametrize("unread", [0, 1, 50, 5000])
@pytest.mark.parametrize("every_s", [0.5, 2.9, 3.1])
def test_a_step_ends_without_progress_and_at_its_total_limit(unread: int, every_s: float) -> None:
    """Progress is a larger position: each position is reported twice, and the smaller ones again."""
    clock = Clock()
    deadline, position = StepDeadline(3.0, unread, clock), 0
    latest = 0
    assert not deadline.report(10_001, 10_000)
    while deadline.remaining() > 0:
        clock.now += min(every_s, deadline.remaining())
        if deadline.remaining() > 0:
            position += 1
            for reported in (position, position, position - 1, 0):
                assert deadline.report(reported, 10_000) == (reported == position and reported > latest)
                latest = max(latest, reported)
    with pytest.raises(ConnectionLost, match="no progress for"):
        deadline.check("url", "late", "restart it")
    expected = 3.0 if every_s > 3 else 3.0 + READ_S * unread
    assert clock.now == pytest.approx(expected)


@pytest.mark.parametrize("stopped_s", [0.5, 4.5, 60.0])
def test_the_time_in_which_the_edge_was_stopped_does_not_count(stopped_s: float) -> None:
    """A run in the background of a shell (Ctrl-Z) continues; without responses it is lost 3 s later."""
    clock = Clock()

    class Interrupted(DirectClient):
        def call(self, method: str, path: str, message: Any, *rest: Any) -> Any:
            response = super().call(method, path, message, *rest)
            if len(self.sent) == 3:
                clock.now += self.network.limit() + stopped_s
                raise RequestTimeout("timed out")
            return response

    options: dict[str, Any] = {"clock": clock, "deadlines": Deadlines(lost_s=3.0)}
    if stopped_s < 1.0:
        with pytest.raises(ConnectionLost, match="no progress for 4 s"):
            decode_coupled(Interrupted(contexts()), **options)
        return
    assert committed(decode_coupled(Interrupted(contexts()), **options)) == decode_locally()
    deadline = StepDeadline(3.0, clock=clock)
    clock.now += 3.0 + stopped_s
    assert deadline.remaining() == 3.0
    clock.now += 3.0
    with pytest.raises(ConnectionLost, match="no progress for 3 s"):
        deadline.check("url", "late", "restart it")


class Stuck(DirectClient):
    """Service that responds to drafts with the same failure, or with the response of an earlier step."""

    def __init__(self, clock: Clock, failure: Exception | None, prefill: bool) -> None:
        super().__init__(contexts())
        self.clock, self.failure, self.prefill = clock, failure, prefill
        self.count = 0

    def call(self, method: str, path: str, message: Any, *rest: Any) -> Any:
        if isinstance(message, VerifyRequest) and (message.draft_tokens or self.prefill):
            self.count += 1
            self.clock.now += 0.001
            assert self.count < MOST_REQUESTS, "the step does not end"
            if self.failure is not None:
                raise self.failure
            return self.responses[-1]
        return super().call(method, path, message, *rest)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("failure", [ContextGone("gone"), RequestSuperseded("old"), NoResponse("late"), None])
def test_repeated_responses_end_a_step(failure: Exception | None, prefill: bool, strict: bool) -> None:
    if failure is None and prefill:
        pytest.skip("there is no earlier step")
    clock = Clock()
    http = Stuck(clock, failure, prefill)
    verifier = RemoteVerifier(
        http, COUPLED, clock=clock, sleep=clock.sleep, deadlines=Deadlines(60.0 if not strict else 0.4, 3.0, strict)
    )
    text = list(PROMPT)
    if not prefill:
        text.append(verifier.verify(text, Draft()).token)
    began = clock.now
    with pytest.raises(ConnectionLost, match="no progress for [3-4] s"):
        verifier.verify(text, Draft() if prefill else Draft.chain((1, 2)))
    assert 3.0 <= clock.now - began < 3.0 + READ_S * len(text) + 0.5


def test_each_row_is_requested_at_most_once() -> None:
    class Insatiable(DirectClient):
        def call(self, method: str, path: str, message: Any, *rest: Any) -> Any:
            response = super().call(method, path, message, *rest)
            if message.draft_tokens:
                response = response.model_copy(update={"wanted_row": 0})
            assert len(self.sent) < 100, "the row was requested again"
            return response

    verifier = RemoteVerifier(Insatiable(contexts()), verify_config(SamplingParams(), seed=1))
    drafter = ModelDrafter(SMALL.score, SamplingParams(), Noise(1, "draft"), VOCAB)
    with pytest.raises(UserError, match="requests the same row again"):
        run(PROMPT, verifier, drafter, Fixed(3), LONG)


def test_an_evicted_text_is_sent_again_without_a_pause() -> None:
    clock = Clock()
    http = DirectClient(contexts(budget_bytes=0))
    assert committed(decode_coupled(http, clock=clock)) == decode_locally()
    assert sum(request.base == 0 for request in http.sent) > 3 and not clock.slept


class Dripping(httpcore.NetworkBackend):
    """Network that delivers a response, one byte per read and 0.3 s."""

    def __init__(self, clock: Clock, response: bytes) -> None:
        self.clock, self.response = clock, response

    def connect_tcp(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        rest = iter(self.response)

        class Stream(httpcore.NetworkStream):
            def read(_, max_bytes: int, timeout: float | None = None) -> bytes:
                self.clock.now += 0.3
                return bytes([next(rest)])

            def write(_, buffer: bytes, timeout: float | None = None) -> None: ...

            def close(_) -> None: ...

        return Stream()


@pytest.mark.parametrize("dripping", ["headers", "body"])
def test_dripping_responses_are_cut_off_at_the_limit(dripping: str) -> None:
    clock = Clock()
    header = b"X: y\r\n" * 1000 if dripping == "headers" else b""
    head = b"HTTP/1.1 200 OK\r\n" + header + b"Content-Length: 5000\r\n\r\n"
    http = HttpClient("http://cloud:1")
    http.network.clock, http.network.inner = clock, Dripping(clock, head + b" " * 5000)
    http.network.limit = StepDeadline(3.0, clock=clock).remaining
    with pytest.raises(NoResponse):
        http.call("GET", "/v1/target", None, ServiceInfo, 0.4)
    assert 3.0 <= clock.now < 3.5
    verifier = StreamingVerifier(http, COUPLED, 4, Deadlines(lost_s=3.0), clock=clock, sleep=clock.sleep)
    began = clock.now
    with pytest.raises(ConnectionLost):
        verifier.verify([1, 2], Draft())
    assert 3.0 <= clock.now - began < 4.0


def test_a_closed_client_ends_the_read_of_another_thread() -> None:
    """Its request would time out after ten minutes."""
    reading, released = threading.Event(), threading.Event()

    class Silent(httpcore.NetworkStream):
        def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            assert timeout is not None and timeout < 2
            reading.set()
            assert released.wait(PATIENCE)
            raise httpcore.ReadTimeout("timed out")

        def write(self, buffer: bytes, timeout: float | None = None) -> None: ...

        def close(self) -> None: ...

    class Backend(httpcore.NetworkBackend):
        def connect_tcp(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
            return Silent()

    http, failures = HttpClient("http://cloud:1"), []
    http.network.inner = Backend()

    def request() -> None:
        try:
            http.call("GET", "/v1/target", None, ServiceInfo, 600.0)
        except NoResponse as failure:
            failures.append(failure)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    assert reading.wait(PATIENCE)
    http.close()
    released.set()
    thread.join(PATIENCE)
    assert len(failures) == 1


# --- processes -----------------------------------------------------------------------------------------------------


def verdict(request: dict[str, Any], **changes: Any) -> dict[str, Any]:
    n = len(request.get("draft_tokens", ()))
    fields = {"epoch": request.get("epoch", 0), "round": request["round"], "accepted_len": 0, "p": [0.5] * n}
    return {**fields, "correction" if n else "bonus": 5, "choices": [[5]] * (n + 1), **changes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGINT, ()), (signal.SIGTERM, ("--provisional",)), (signal.SIGTERM, ("--mode", "cloud_only"))],
)
def test_signals_end_a_run_that_waits_for_a_service(number: signal.Signals, options: Sequence[str]) -> None:
    waiting, released = threading.Event(), threading.Event()

    def respond(request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "round" in request and not request.get("draft_tokens"):
            return 200, verdict(request)
        waiting.set()
        released.wait(PATIENCE)
        return 404, {"error": "gone", "code": "unknown_context"}

    with hostile_service(respond) as url:
        command = ("run", "def f():", "--remote", url, "--pair", "bundled", *options)
        with closing(ForkedProcess(terminal, *command, "--deadline-ms", "60000", "--lost-after-s", "600")) as program:
            try:
                assert waiting.wait(PATIENCE)
                program.send_signal(number)
                _, errors = program.communicate()
            finally:
                released.set()
            assert program.wait() == 130 and "Traceback" not in errors, errors
