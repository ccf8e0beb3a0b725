"""Messages: where the token is sent, arbitrary or contradictory values of both ends, requests of the practice guide."""

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import msgpack
import pytest
from fakes.enumeration import DRAFTERS, PROMPT, ROUNDING, STOP, TARGET, VOCAB, distance, true_distribution
from fakes.http_server import Handler, http_server
from fakes.properties import changed, holds_for
from fakes.remote import (
    COUPLED,
    DRAFTED,
    INFO,
    OPEN,
    DirectClient,
    InlineConnection,
    RepeatableNoise,
    bundled_info,
    contexts,
    decode_coupled,
    hostile_service,
    rejection,
    remote_verifier,
    requests,
    response_of,
    streaming_verifier,
    verify_config,
)
from fakes.tiny_models import Explorer, run
from fastapi.testclient import TestClient
from hypothesis import strategies as st
from pydantic import ValidationError

from specdemo.cli import main
from specdemo.core import step_record
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.policies import Fixed
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft
from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS, fingerprint
from specdemo.remote.access import token_for
from specdemo.remote.config import CloudConfig
from specdemo.remote.connection import Deadlines
from specdemo.remote.contexts import draft_from_request
from specdemo.remote.link import HttpClient
from specdemo.remote.protocol import (
    CODECS,
    ServiceIdentity,
    ServiceInfo,
    StreamRequest,
    VerifyConfig,
    VerifyRequest,
    VerifyResponse,
)
from specdemo.remote.server import create_app, parse_body
from specdemo.remote.target import connect
from specdemo.ui.limits import HostLimits
from specdemo.worker import Worker

pytestmark = pytest.mark.slow

SPEC = ModelSpec(PAIRS["bundled"].target, device="cpu")
JSON, MSGPACK = "application/json", "application/msgpack"
SECRET = {"SPECDEMO_TOKEN": "secret"}
LISTED = SECRET | {"SPECDEMO_REMOTE": "https://good.example:8300, http://plain.example, https://other.example"}


@pytest.mark.parametrize(
    ("url", "environment", "sent"),
    [
        ("http://127.0.0.1:8300", SECRET, True),
        ("http://localhost:8300", SECRET, True),
        ("http://[::1]:8300", SECRET, True),
        ("https://good.example:8300/", LISTED, True),
        ("https://OTHER.example", LISTED, True),
        ("https://good.example:8300", SECRET, False),
        ("http://good.example:8300", LISTED, False),
        ("http://plain.example", LISTED, False),
        ("https://evil.example", SECRET | {"SPECDEMO_REMOTE": "any"}, False),
        ("http://localhost@evil.example", LISTED, False),
        ("http://localhost.evil.example", LISTED, False),
        ("https://good.example:8300@evil.example", LISTED, False),
        ("http://127.0.0.1:x", SECRET, False),
    ],
)
def test_token_is_sent_to_this_machine_and_listed_https_addresses(url: str, environment: Any, sent: bool) -> None:
    assert token_for(url, environment) == ("secret" if sent else None)


VALID = (
    "http://cloud:8300", "https://good.example", "http://127.0.0.1:1/", "http://[::1]:8300/behind/a/proxy",
)  # fmt: skip
INVALID = (
    "http://[", "http://", "http://host:99999", "http://é.example", f"http://{'a' * 64}.example", "http://user@host",
    "http://host/?q=1", "http://host/a b", "http://host\r\nX: y", "host:8300",
)  # fmt: skip


def test_addresses_of_services_are_parsed_strictly() -> None:
    for address in VALID:
        assert CloudConfig(address).remote == address
        assert HostLimits(remote=(address,)).remote == (address,)
    for address, accept in product(INVALID, (CloudConfig, lambda address: HostLimits(remote=(address,)))):
        with pytest.raises(UserError, match="http://host:port") as error:
            accept(address)
        assert str(error.value).isprintable()


class Prepared(Handler):
    """Respond with the prepared status and body."""

    status, content = 200, b""

    def do_GET(self) -> None:
        self.answer(self.status, self.content)

    def do_POST(self) -> None:
        self.body()
        self.do_GET()


ESCAPES = "\x1b]0;owned\x07\x1b[31mred\u202e\r\nline\x9b2J"


@pytest.mark.parametrize(
    ("status", "changes", "sentence"),
    [
        (200, {"vocab_size": 1 << 30}, "vocab_size"),
        (200, {"vocab_size": 1 << 21}, "\\(2,097,152 token ids\\) and .* different tokenizers"),
        (200, {"weight_bytes": 10**30}, "weight_bytes"),
        (200, {"stop": [1] * 100_000}, "stop"),
        (200, {"name": ESCAPES, "tokenizer": "other"}, "different tokenizers"),
        (403, {"error": ESCAPES * 100, "code": "x"}, "owned"),
        (200, None, "too large"),
    ],
)
def test_malicious_descriptions_get_a_sentence(status: int, changes: Any, sentence: str) -> None:
    info = {**json.loads(INFO.model_dump_json()), "tokenizer": fingerprint(read_tokenizer(SPEC)), "vocab_size": 4096}
    Prepared.status = status
    Prepared.content = (
        b" " * (17 << 20) if changes is None else json.dumps(info | changes if status == 200 else changes).encode()
    )
    with http_server(Prepared) as url, pytest.raises(UserError, match=sentence) as error:
        connect(CloudConfig(url, deadline_ms=60_000), SPEC, 0)  # the time limit of an attempt
    assert str(error.value).isprintable() and len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("body", "sentence"),
    [(b"-5\n", "unknown token id"), (b"9" * 5000, "no token ids"), (f"error {ESCAPES}\n".encode(), "failed: .*owned")],
)
def test_malicious_streams_get_a_sentence(body: bytes, sentence: str) -> None:
    Prepared.status, Prepared.content = 200, body
    with http_server(Prepared) as url, pytest.raises(UserError, match=sentence) as error:
        streaming_verifier(HttpClient(url), COUPLED, 4, vocab_size=4).verify([1], Draft())
    assert str(error.value).isprintable()


class Extended(DirectClient):
    """Cloud of a later version: every object of a response has another field."""

    def exchange(self, message: Any, kind: Any) -> Any:
        response = super().exchange(message, kind)
        body = json.loads(response.model_dump_json(by_alias=True, exclude_none=True), object_hook=with_another_field)
        return CODECS["application/json"].load(kind, json.dumps(body).encode())


def with_another_field(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "later": {"x": [1]}}


def test_unknown_fields_of_responses_are_ignored() -> None:
    extended, known = (decode_coupled(kind(contexts()), top=2) for kind in (Extended, DirectClient))
    texts = [[(step.tokens, step.verdict.target_top) for step in steps] for steps in (extended, known)]
    assert texts[0] == texts[1] and all(step.verdict.target_top for step in extended)
    info = CODECS[JSON].load(ServiceInfo, json.dumps(with_another_field(vars(INFO))).encode())
    assert info == INFO


def test_unknown_fields_of_requests_are_refused() -> None:
    row = {"node": 0, "values": "AACAPw=="}
    for body in (
        with_another_field(OPEN),
        {**OPEN, "sampling_cfg": with_another_field({"temp": 1.0})},
        {**DRAFTED, "rows": [with_another_field(row)]},
    ):
        with pytest.raises(UserError, match="later: extra inputs are not permitted"):
            CODECS[JSON].load(VerifyRequest, json.dumps(body).encode())


# --- responses that contradict themselves or the tokenizer ---


class Changed(DirectClient):
    """Service whose responses to drafts are changed."""

    def __init__(self, change: Callable[[VerifyResponse], dict[str, Any]]) -> None:
        super().__init__(contexts())
        self.change = change

    def exchange(self, message: Any, kind: Any) -> Any:
        response = super().exchange(message, kind)
        if not message.draft_tokens or response.wanted:
            return response
        return self.codec.load(kind, self.codec.dump(response.model_copy(update=self.change(response))))


def all_accepted(response: VerifyResponse) -> dict[str, Any]:
    """Accept the complete draft, with the draws of the tested nodes."""
    return {"accepted_len": len(response.p), "correction": None, "bonus": 1, "draws": [0.5] * (len(response.p) - 1)}


def test_contradictions_get_a_sentence() -> None:
    for change in (
        all_accepted,
        lambda response: {"draws": [], "accepted_len": 0, "correction": 1, "bonus": None},
        lambda response: {"correction": 1, "bonus": 2},
        lambda response: {"correction": response.bonus, "bonus": response.correction},
        lambda response: {"correction": None, "bonus": None},
        lambda response: {"accepted": [0, 0], "tested": [0], "accepted_len": 2},
        lambda response: {"accepted": [], "accepted_len": 1, "tested": []},
    ):
        with pytest.raises(UserError, match="does not fit the draft"):
            decode_coupled(Changed(change))


@pytest.mark.parametrize("padded", [False, True])
def test_a_committed_id_without_an_entry_ends_the_run(padded: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The vocabulary of a service may be padded, but no text contains the padding."""
    size = bundled_info()["vocab_size"]
    token = 2 * size - 1 if padded else 5
    with hostile_service(lambda request: (200, rejection(request, token)), vocab_size=2 * size) as url:
        command = ["run", "def f():", "--pair", "bundled", "--remote", url, "--max-tokens", "3", "--method", "nasd"]
        code = main(command)
    out, err = capsys.readouterr()
    if padded:
        assert code == 1 and f"committed token {token:,}" in err and "exact" not in out + err
    else:
        assert code == 0 and f"exact, verified by the service at {url}" in out


def test_streams_and_accepted_drafts_are_checked() -> None:
    class Stream:
        url, network, identity = "stream", DirectClient(contexts()).network, ServiceIdentity()

        def tokens(self, *_: Any) -> Any:
            yield from (1, 3)

        def close(self) -> None: ...

    verifier = streaming_verifier(Stream(), COUPLED, 4, Deadlines(), VOCAB, lambda token: token != 3)
    assert verifier.verify([1], Draft()).token == 1
    with pytest.raises(UserError, match="committed token 3"):
        verifier.verify([1, 1], Draft())

    def accepting(response: VerifyResponse) -> dict[str, Any]:
        return {"accepted_len": 1, "correction": None, "bonus": 1, "draws": None}

    known = remote_verifier(Changed(accepting), COUPLED, has_entry=lambda token: token != 2)
    first = known.verify([1], Draft()).token
    with pytest.raises(UserError, match="committed token 2"):
        known.verify([1, first], Draft.chain((2,)))


# --- arbitrary messages -----------------------------------------------------------------------------------------------


@holds_for(50, value=requests())
def test_messages_are_equal_after_both_encodings_and_responses_fit_the_draft(value: dict[str, Any]) -> None:
    request = CODECS[JSON].load(VerifyRequest, json.dumps(value).encode())
    try:
        response = response_of(contexts(budget_bytes=1 << 16), request)
    except UserError:
        response = None
    for codec in CODECS.values():
        assert codec.load(VerifyRequest, codec.dump(request)) == request
        assert response is None or codec.load(VerifyResponse, codec.dump(response)) == response
    if response is not None and not response.wanted and "round" in value:  # otherwise without the bonus
        response.to(draft_from_request(request, VOCAB), VOCAB)


@holds_for(20, kind=st.sampled_from(("model", "siblings", "guesses")), data=st.data())
def test_changed_responses_give_steps_of_valid_traces_or_a_sentence(kind: str, data: st.DataObject) -> None:
    class Changed(DirectClient):
        def exchange(self, message: Any, kind: Any) -> Any:
            value = json.loads(CODECS[JSON].dump(super().exchange(message, kind)))
            return CODECS[JSON].load(kind, json.dumps(data.draw(changed(value)), default=str).encode())

    connection = InlineConnection([Changed(contexts())])  # the thread of a test chooses its values
    verifier = remote_verifier(connection, verify_config(SamplingParams(), seed=1), top=2, vocab_size=VOCAB)
    explorer = Explorer()
    explorer.choose = lambda chances: max(range(len(chances)), key=chances.__getitem__)
    with suppress(UserError):
        metrics = Metrics()
        for step in run(PROMPT, verifier, DRAFTERS[kind](SamplingParams(), explorer), Fixed(2), 5, STOP):
            metrics = metrics.plus(step)
            event = StepEvent(step, ("",) * len(step.tokens), ("",) * len(step.draft), metrics=metrics)
            step_record.CHECKED.validate_json(json.dumps(step_record.of(event)))
        metrics.as_dict()


def packed(value: Any) -> bytes:
    """Encode as msgpack; values that it lacks give an empty body."""
    try:
        return bytes(msgpack.packb(value))
    except (OverflowError, UnicodeEncodeError):
        return b""


bodies = requests().flatmap(changed).map(lambda value: json.loads(json.dumps(value, default=str)))


@cache
def shared_service() -> TestClient:
    return service(budget_bytes=1 << 16)


@holds_for(
    60,
    path=st.sampled_from(("/v1/rounds", "/v1/texts")),
    kind=st.sampled_from((JSON, MSGPACK, "text/plain")),
    body=bodies.map(lambda value: json.dumps(value).encode()) | bodies.map(packed) | st.binary(max_size=40),
    cut=st.none() | st.integers(0, 200),
)
def test_every_body_gets_a_status_of_the_service(path: str, kind: str, body: bytes, cut: int | None) -> None:
    """Requests of all examples share the contexts."""
    response = shared_service().post(path, content=body[:cut], headers={"Content-Type": kind})
    assert response.status_code in (200, 404, 409, 413, 415, 422), response.text
    if response.status_code != 200:
        problem = response.json() if response.headers["content-type"] == JSON else msgpack.unpackb(response.content)
        assert problem["error"].strip()


# --- many invalid values -----------------------------------------------------------------------------------------

REQUEST: dict[str, Any] = {"ctx_id": "a", "round": 0, "base": 0, "k": 1}
NULLS = [None] * 5000
MANY: list[tuple[Any, dict[str, Any], int]] = [  # kind of message, fields, most errors
    *((VerifyRequest, {name: NULLS}, 1) for name in ("tokens", "draft_tokens", "parents", "q_token_probs")),
    (VerifyRequest, {"rows": [{f"k{i}": None for i in range(200)}] * 5000}, 202),
    (VerifyRequest, {"sampling_cfg": {"bad_words": [NULLS] * 50, "bad_texts": NULLS}}, 2),
    (StreamRequest, {"tokens": NULLS}, 7),
]


@pytest.mark.parametrize("kind", [JSON, MSGPACK])
def test_few_errors_are_built_however_many_values_are_invalid(kind: str) -> None:
    encode: Any = msgpack.packb if kind == MSGPACK else lambda value: json.dumps(value).encode()
    for message, values, most in MANY:
        with pytest.raises(UserError) as refused:
            CODECS[kind].load(message, encode({**REQUEST, **values}))
        cause = refused.value.__cause__
        assert isinstance(cause, ValidationError) and cause.error_count() <= most
    keys = {f"k{i}": None for i in range(300)}
    for values in ({"rows": [keys]}, keys):
        with pytest.raises(UserError, match="at most 256 (keys|are read)") as refused:
            CODECS[kind].load(VerifyRequest, encode({**REQUEST, **values}))
        assert not isinstance(refused.value.__cause__, ValidationError)  # before validation
    digits = json.dumps(keys).encode().replace(b"null", b"9" * 5000, 1)  # a number that Python does not convert
    with pytest.raises(UserError, match="an object has 300 keys"):
        CODECS[JSON].load(VerifyRequest, digits)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_long_bodies_are_parsed_outside_of_the_event_loop(size: int) -> None:
    def parse(body: bytes) -> bool:
        return threading.current_thread() is threading.main_thread()

    assert asyncio.run(parse_body(parse, b"x" * size)) == (size < 100)


# --- the practice guide's fields only (section 5.1), as its loop (section 6.1) sends them -----------------------------

FIELDS = {"ctx_id", "draft_tokens", "q_token_probs", "hard_mask", "k", "sampling_cfg"}
GREEDY = {"temp": 0.0, "top_p": 0.9, "rep_penalty": 1.1}
SAMPLED = {"temp": 1.0}
TEXT = list(PROMPT)


def service(**options: Any) -> TestClient:
    return TestClient(create_app(INFO, contexts(**options), Worker()))


def message(drafted: list[int], q: list[float] | None = None, config: Any = GREEDY, **more: Any) -> dict[str, Any]:
    """Return a message of the guide; `more`: `tokens` of the first message."""
    return {
        "ctx_id": "guide",
        "draft_tokens": drafted,
        "q_token_probs": q or [1.0] * len(drafted),
        "hard_mask": [0] * len(drafted),
        "k": len(drafted),
        "sampling_cfg": config,
        **more,
    }


def post(cloud: TestClient, body: dict[str, Any], key: str | None = None) -> Any:
    return cloud.post("/v1/rounds", json=body, headers={} if key is None else {"Idempotency-Key": key})


def greedy_text(length: int) -> list[int]:
    text, sampling = list(TEXT), SamplingParams(temperature=0, repetition_penalty=1.1)
    for _ in range(length):
        text.append(int(sampling(TARGET.score(text, Draft()), [text]).argmax()))
    return text[len(TEXT) :]


def test_the_guide_s_loop_writes_the_greedy_text() -> None:
    """Every second draft is right."""
    cloud, text, accepted, step = service(), [], 0, 0
    expected = greedy_text(14)
    while len(text) < 12:
        draft = [(step + i) % VOCAB for i in range(2)] if step % 2 else expected[len(text) :][:2]
        sent = message(draft, **({} if step else {"tokens": TEXT}))
        assert sent.keys() == (FIELDS if step else FIELDS | {"tokens"})
        answer = post(cloud, sent).json()
        assert "bonus" not in answer and 0 <= answer["metrics"]["la_over_k"] <= 1
        text += draft[: answer["accepted_len"]]
        text += [] if answer["correction"] is None else [answer["correction"]]
        accepted, step = accepted + answer["accepted_len"], step + 1
    assert text == expected[: len(text)] and accepted > 6


def test_the_guide_s_loop_samples_from_the_target() -> None:
    """All outcomes of point-mass drafts: the missing bonus token does not change the distribution."""
    explorer = Explorer()

    def once() -> tuple[int, ...]:
        values: dict[Any, Any] = {}
        cloud = contexts(noise_sources=lambda config, position: (RepeatableNoise(explorer, position, values),) * 2)
        text: list[int] = []
        while len(text) < 2:
            draft, first = [len(text) + 1], {} if text else {"tokens": TEXT}
            config = VerifyConfig(temperature=1.0)
            request = VerifyRequest(context_id="a", draft_tokens=draft, token_probs=[1.0], k=1, config=config, **first)
            response = response_of(cloud, request)
            assert response.accepted_len or response.correction is not None
            text += draft if response.accepted_len else [response.correction]
        return tuple(text)

    assert distance(explorer.distribution(once), true_distribution(SamplingParams(), 2, ())) < ROUNDING


def test_correction_is_null_after_a_fully_accepted_draft() -> None:
    cloud, expected = service(), greedy_text(3)
    body = post(cloud, message(expected[:2], tokens=TEXT)).json()
    assert body["accepted_len"] == 2 and body["correction"] is None and "bonus" not in body
    assert b'"correction":null' in post(cloud, message(expected[2:])).content
    body = post(cloud, {**message(expected[:2], tokens=TEXT), "ctx_id": "n", "round": 0, "base": 0}).json()
    assert body["correction"] is None and body["bonus"] == expected[2]


def test_equal_requests_are_steps_unless_their_key_is_equal() -> None:
    cloud = service()
    assert post(cloud, message([1], tokens=TEXT), "a").json()["round"] == 0
    steps = [post(cloud, message([1]), key).json()["round"] for key in ("b", "b", "c", None, None)]
    assert steps == [1, 1, 2, 3, 4]
    late = post(cloud, message([1]), "b")
    assert late.status_code == 409 and "send a new key for each step" in late.json()["error"]
    assert post(cloud, message([1]), "d").json()["round"] == 5
    other = post(cloud, message([2]), "d")
    assert other.status_code == 422 and "different request" in other.json()["error"]


def test_a_first_message_opens_its_context_again_and_an_evicted_context_ends_with_404() -> None:
    cloud = service(max_contexts=1)
    answers = [post(cloud, message([1, 2], [0.5, 0.5], SAMPLED, tokens=TEXT)).json() for _ in range(2)]
    first, second = ({**answer, "epoch": 0, "metrics": None} for answer in answers)
    assert first == second
    assert post(cloud, {**message([1], tokens=TEXT), "ctx_id": "other"}).status_code == 200
    gone = post(cloud, message([1]))
    assert gone.status_code == 404 and "was evicted: send its complete text as tokens" in gone.json()["error"]


def test_other_requests_without_round_get_a_sentence() -> None:
    cloud = service()
    for changes, words in (
        ({"base": 4}, "need round"),
        ({"round": 0}, "round needs base"),
        ({"draft_tokens": [], "k": 0, "q_token_probs": [], "hard_mask": []}, "draft_tokens is empty"),
        ({"sampling_cfg": None}, "requires sampling_cfg"),
    ):
        response = post(cloud, {**message([1], tokens=TEXT), **changes})
        assert response.status_code == 422 and words in response.json()["error"]


LOSSY: list[tuple[dict[str, Any], bool]] = [
    ({}, True),  # a sampled draft with scalar q
    ({"q_token_probs": [1.0, 1.0]}, False),  # point masses
    ({"q_token_probs": None}, False),
    ({"rows": []}, False),  # the service requests the rows
    ({"sampling_cfg": {"temp": 0.0}}, False),
    ({"sampling_cfg": {"rule": "match"}}, False),
    ({"sampling_cfg": {"rule": "ratio", "threshold": 1.0}}, True),
    ({"sampling_cfg": {"adjust": False}, "rows": []}, True),
]


def test_lossy_verdicts_are_marked() -> None:
    cloud = service()
    for changes, lossy in LOSSY:
        sent = [message(draft, [0.5] * 2, SAMPLED, tokens=TEXT) for draft in ([0, 0], [1, 2], [3, 3])]
        bodies = [post(cloud, {**body, **changes}).json() for body in sent]
        decided = [body for body in bodies if "wants" not in body]
        assert decided and all(body.get("lossy", False) == lossy for body in decided), changes
