"""Several services: a run that loses one continues with another, and its text is that of an undisturbed run."""

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from fakes.enumeration import PROMPT, SMALL, VOCAB
from fakes.relay import Relay, cut_at, relay
from fakes.remote import (
    COUPLED,
    MODEL,
    NUMERICS,
    contexts,
    decode_coupled,
    decode_locally,
    remote_verifier,
    streaming_verifier,
    table_service,
    verify_config,
)
from fakes.tiny_models import committed, run

from specdemo.core.errors import UserError
from specdemo.core.explain import exact_label
from specdemo.core.metrics import Metrics
from specdemo.core.policies import Fixed
from specdemo.core.sampling import Noise, SamplingParams, SharedNoise
from specdemo.core.step import Draft, Step
from specdemo.drafters.chain import ModelDrafter
from specdemo.remote.config import CloudConfig
from specdemo.remote.connection import SKIP_S, Connection, ConnectionLost, Deadlines, Requests
from specdemo.remote.link import Cause, HttpClient, MeteredNetwork, ResendText, Retry
from specdemo.remote.protocol import ReadyResponse, ServiceIdentity, VerifyResponse
from specdemo.remote.target import RemoteSession

pytestmark = pytest.mark.slow

SESSION = "s" * 32
PATIENT = Deadlines(deadline_s=20.0, lost_s=60.0)
TOKENS = 12


def connected(*urls: str, session: str = SESSION, describe: bool = True, **times: Any) -> Connection:
    """Connect to the services; `times`: clock and sleep."""
    network = MeteredNetwork()
    replicas = Connection([HttpClient(url, session=session, network=network) for url in urls], session, **times)
    if describe:
        replicas.describe(20.0, 60.0)
    return replicas


def starting_with(url: str, *others: str, describe: bool = True) -> Connection:
    """Connect in a session whose first choice is `url`."""
    sessions = (f"{i}" * 32 for i in range(1000))
    first = next(session for session in sessions if connected(url, *others, session=session, describe=False).url == url)
    return connected(url, *others, session=first, describe=describe)


def through(cut: Relay, *others: str) -> Connection:
    """Connect with the relay as first choice, and count messages from then on."""
    http = starting_with(cut.url, *others)
    cut.counting = True
    return http


def decode_sampled(http: Any, temperature: float = 1.0) -> list[Step]:
    """Decode with rule rejection; temperature 1 needs rows of q."""
    sampling = SamplingParams(temperature)
    drafter = ModelDrafter(SMALL.score, sampling, Noise(3, "draft"), VOCAB)
    verifier = remote_verifier(http, verify_config(sampling, seed=3), deadlines=PATIENT)
    return run(PROMPT, verifier, drafter, Fixed(3), TOKENS)


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[str, str]]:
    with table_service(replica="first") as first, table_service(replica="second") as second:
        yield first, second


def in_total(steps: list[Step], name: str) -> float:
    return Metrics.of(steps).remote.get(name, 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("direction", ["request", "response"])
def test_a_service_may_die_at_every_message(services: tuple[str, str], temperature: float, direction: str) -> None:
    """Messages are requests and responses, with and without rows."""
    first, second = services
    expected = committed(decode_sampled(connected(second), temperature))
    with relay(first) as undisturbed:
        steps = decode_sampled(through(undisturbed, second), temperature)
        assert committed(steps) == expected and not in_total(steps, "switched")
        messages = undisturbed.counts[direction]
    assert messages > 8
    cuts = 0
    for last in range(1, messages + 1):
        with relay(first, cut_at(direction, last)) as cut:
            steps = decode_sampled(through(cut, second), temperature)
            switched = in_total(steps, "switched")
            assert committed(steps) == expected and not in_total(steps, "numerics"), last
            assert switched == cut.is_cut and in_total(steps, "reread") >= switched * len(PROMPT), last
            noted = [step.verdict.replica for step in steps if step.verdict.replica]
            assert not switched or noted in (["first", "second"], ["second"]), last
            cuts += cut.is_cut
    assert cuts > messages / 2  # responses arrive in one or two parts


def test_streams_continue_with_another_service(services: tuple[str, str]) -> None:
    first, second = services
    switches = 0.0
    for last in range(1, 12):
        with relay(first, cut_at("response", last)) as cut:
            verifier = streaming_verifier(through(cut, second), COUPLED, TOKENS, PATIENT)
            tokens = list(PROMPT)
            verdicts = []
            while len(verdicts) < TOKENS and tokens[-1] != 3:
                verdicts.append(verifier.verify(tokens, Draft()))
                tokens.append(verdicts[-1].token)
            text = decode_locally(max_tokens=TOKENS)
            assert tokens[len(PROMPT) :] == (text[: text.index(3) + 1] if 3 in text else text)
            switched = sum(verdict.remote.get("switched", 0) for verdict in verdicts)
            assert switched <= cut.is_cut  # a response may contain the rest of the text
            switches += switched
    assert switches


@contextmanager
def dying(*given: tuple[str, int], others: Sequence[str] = (), **times: Any) -> Iterator[Connection]:
    """Connect through relays; each is cut at a request, whose number is given."""
    with ExitStack() as opened:
        cuts = [opened.enter_context(relay(url, cut_at("request", last))) for url, last in given]
        http = connected(*(cut.url for cut in cuts), *others, **times)
        for cut in cuts:
            cut.counting = True
        yield http


def test_a_run_survives_any_number_of_failures_while_a_service_is_left(services: tuple[str, str]) -> None:
    first, second = services
    with dying((first, 1), (first, 2), (first, 3), others=[second]) as http:
        steps = decode_coupled(http, max_tokens=TOKENS, deadlines=PATIENT)
    assert committed(steps) == decode_locally(max_tokens=TOKENS)


def test_a_run_without_services_ends_at_one_deadline_for_all(services: tuple[str, str]) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + 0.01

    with dying(*((url, 2) for url in services), clock=lambda: now[0], sleep=sleep) as http:
        with pytest.raises(ConnectionLost, match="no progress for [34] s"):
            decode_coupled(http, deadlines=Deadlines(0.4, 3.0))


# --- models and numerics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "c" * 32, "replica": "x"}, "replica .* states another model than replica .*: start every replica"),
        ({"model": "", "replica": ""}, "or none: start every replica"),
        ({"token": "another"}, "bearer token is missing or wrong"),
    ],
)
def test_a_service_of_another_model_or_token_refuses_the_run(
    services: tuple[str, str], changes: dict[str, Any], sentence: str
) -> None:
    with table_service(**changes) as other, pytest.raises(UserError, match=sentence):
        connected(*services, other)


def test_a_service_that_restarts_with_another_model_is_left(services: tuple[str, str]) -> None:
    """Also with a third service that failed."""
    expected = committed(decode_sampled(connected(services[1])))
    with table_service(model="c" * 32, replica="third") as other, relay(services[0]) as gone:
        gone.cut()
        http = starting_with(other, gone.url, services[1], describe=False)
        http.clients[0].identity = ServiceIdentity(model=MODEL, replica="third")
        steps = decode_sampled(http)
    assert committed(steps) == expected and in_total(steps, "switched") == 1 and http.url == services[1]


# --- choice of the service -------------------------------------------------------------------------------------------


def test_rendezvous_hashing_spreads_sessions_and_moves_only_those_of_a_removed_service() -> None:
    urls = [f"http://host{i}:1" for i in range(4)]
    sessions = [f"{i:032}" for i in range(1000)]
    chosen = {session: connected(*urls, session=session, describe=False).url for session in sessions}
    assert all(180 < count < 320 for count in Counter(chosen.values()).values())  # 4.9 sigma
    fewer = {session: connected(*urls[:3], session=session, describe=False).url for session in sessions}
    assert all(fewer[session] == url for session, url in chosen.items() if url != urls[3])


class Scripted:
    """Client whose calls end as listed."""

    def __init__(self, url: str, *failures: Exception | None) -> None:
        self.url, self.failures, self.paths = url, list(failures), []
        self.network, self.identity = MeteredNetwork(), ServiceIdentity()

    def call(self, method: str, path: str, *rest: Any) -> Any:
        self.paths.append(path)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return ReadyResponse()


LATE, DOWN = Retry("late", Cause.LATE), Retry("refused", Cause.DOWN)


def scripted(*failures: Exception | None) -> tuple[Connection, Scripted, Scripted, list[float]]:
    now = [0.0]
    first, second = Scripted("a", *failures), Scripted("b")
    replicas = Connection([first, second], "", lambda: now[0], lambda seconds: None)  # type: ignore[list-item]
    replicas.clients, replicas.client = [first, second], first  # type: ignore[list-item, assignment]
    return replicas, first, second, now


def verify(replicas: Connection) -> None:
    requests = Requests(replicas, Deadlines(), length=4, unread=0, advice="restart it")
    requests.send(lambda client, timeout: client.call("POST", "/v1/rounds", None, VerifyResponse, timeout))


def test_a_busy_service_keeps_the_request() -> None:
    """It responds to the readiness route, or is older and refuses it."""
    for answer in (None, UserError("status 404")):
        replicas, first, *_ = scripted(LATE, answer)
        verify(replicas)
        assert first.paths == ["/v1/rounds", "/v1/ready", "/v1/rounds"] and replicas.url == "a"


def test_a_service_that_is_down_is_left_at_once_and_a_frozen_service_is_skipped_for_some_seconds() -> None:
    replicas, first, second, now = scripted(LATE, LATE)

    def expect(url: str) -> None:
        with pytest.raises(ResendText):
            verify(replicas)
        assert replicas.url == url

    expect("b")
    second.failures = [DOWN]
    expect("a")  # it failed earlier
    now[0] = SKIP_S * 0.9
    first.failures = [DOWN]
    expect("b")
    now[0] = SKIP_S * 1.1  # the skip of the second has ended
    second.failures = [DOWN]
    expect("a")
    verify(replicas)
    assert first.paths.count("/v1/rounds") == 3 and second.paths.count("/v1/rounds") == 2


# --- conversations ---------------------------------------------------------------------------------------------------


def turn(url: str, session: RemoteSession, prompt: list[int], seed: int = 7) -> tuple[list[int], list[Any]]:
    """Return prompt and text of a turn, and the base of each request."""
    http, bases = connected(url, session=session.id), []
    call = http.client.call

    def recorded(method: str, path: str, message: Any, *rest: Any) -> Any:
        bases.append((method, getattr(message, "base", None)))
        return call(method, path, message, *rest)

    http.client.call = recorded  # type: ignore[method-assign]
    verifier = remote_verifier(http, verify_config(SamplingParams(), "coupled", seed), session=session)  # type: ignore[arg-type]
    drafter = ModelDrafter(SMALL.score, SamplingParams(), SharedNoise(seed), VOCAB)
    text = committed(run(prompt, verifier, drafter, Fixed(3), 6))
    verifier.close()
    return [*prompt, *text], bases


def test_a_conversation_continues_its_context(services: tuple[str, str]) -> None:
    cloud, session = contexts(), RemoteSession(lasts=True)
    with table_service(cloud) as url:
        text, _ = turn(url, session, PROMPT)
        longer, bases = turn(url, session, [*text, 1])
        assert bases[0] == ("POST", len(text)) and len(cloud) == 1 and bases[-1][0] == "POST"
        assert (longer, 1) == (turn(url, RemoteSession(), [*text, 1])[0], len(cloud))
        assert turn(url, session, longer, seed=8)[1][0] == ("POST", 0)  # the sampling is fixed by the context
        _, bases = turn(url, RemoteSession(), PROMPT)
        assert bases[-1] == ("DELETE", None)
        assert turn(url, session, longer)[1][0][1] > 0
        interrupted = remote_verifier(connected(url, session=session.id), COUPLED, session=session)  # type: ignore[arg-type]
        interrupted.is_lost = True  # after a lost connection
        interrupted.close()
        assert turn(url, session, longer)[1][0] == ("POST", 0)


# --- options ---------------------------------------------------------------------------------------------------------


def test_each_address_gets_the_token_by_its_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdemo.remote.target import _connection

    monkeypatch.setenv("SPECDEMO_TOKEN", "secret")
    monkeypatch.setenv("SPECDEMO_REMOTE", "https://listed")
    addresses = ("https://listed", "https://other", "http://127.0.0.1:1", "http://listed")
    replicas = _connection(CloudConfig(" ".join(addresses)), 0, lambda: 0.0, SESSION)
    sent = {client.url: client._headers.get("Authorization") for client in replicas.clients}
    assert sent == dict(zip(addresses, ["Bearer secret", None, "Bearer secret", None], strict=True))


def test_a_frozen_service_does_not_delay_a_run(services: tuple[str, str]) -> None:
    """A description of the frozen service would take ten minutes."""
    with closing(socket.create_server(("127.0.0.1", 0))) as frozen:
        http = starting_with("http://{}:{}".format(*frozen.getsockname()), services[1], describe=False)
        http.describe(600.0, 600.0)
        assert http.url == services[1]
        assert committed(decode_sampled(http)) == committed(decode_sampled(connected(services[0])))


def test_a_switch_behind_one_address_is_measured(services: tuple[str, str]) -> None:
    first, second = services

    def move(direction: str, number: int, data: bytes) -> bytes:
        if (direction, number) == ("request", 3):
            proxy.redirect(second)
        return data

    with relay(first, move) as proxy:
        steps = decode_sampled(through(proxy))
    assert committed(steps) == committed(decode_sampled(connected(first)))
    assert in_total(steps, "switched") == 1 and in_total(steps, "gap_s") > 0


# --- identity: a text is never continued by another model -------------------------------------------------------------

EXPECTED = ServiceIdentity(model=MODEL, numerics=NUMERICS, replica="first")


def identified(url: str, identity: ServiceIdentity = EXPECTED) -> HttpClient:
    http = HttpClient(url)
    http.identity = identity
    return http


@pytest.mark.parametrize("stated", ["c" * 32, ""])
def test_another_model_ends_the_run(stated: str) -> None:
    """The service was replaced after its description was read. Without digests it serves alone."""
    with table_service(model=stated, replica="second") as url:
        with pytest.raises(UserError, match=f"replica second at {url} states .* replica first, or none: start"):
            decode_coupled(identified(url))
        with pytest.raises(UserError, match="replica second"):
            streaming_verifier(identified(url), COUPLED, 4).verify([2, 0], Draft())
        if not stated:
            assert committed(decode_coupled(identified(url, ServiceIdentity()))) == decode_locally()


def test_a_change_of_rounding_is_noted_in_its_step() -> None:
    with table_service(numerics="d" * 32) as url:
        steps = decode_coupled(identified(url))
        first, second = (streaming_verifier(identified(url), COUPLED, 4).verify([2, 0], Draft()) for _ in range(2))
    assert committed(steps) == decode_locally()
    noted = [step.verdict.remote.get("numerics") for step in steps]
    assert noted == [1.0] + [None] * (len(steps) - 1)
    assert first.remote["numerics"] == second.remote["numerics"] == 1.0
    label = {"cloud": {"remote": "http://a", "mode": "speculative"}}
    assert exact_label(label, Metrics.of(steps).remote) == "exact, text may differ"
    assert exact_label(label, {}) == "exact, verified by the service at http://a"


def test_invalid_identities_are_refused() -> None:
    for changes in ({"model": "x" * 32}, {"numerics": "a" * 33}, {"replica": "y" * 200}):
        with table_service(**changes) as url, pytest.raises(UserError, match="is not a specdemo service"):
            decode_coupled(identified(url))
