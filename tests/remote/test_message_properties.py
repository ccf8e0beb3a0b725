"""Properties of network messages: equal after every encoding; every request gets an answer or a sentence."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from fakes.arbitrary_messages import requests
from fakes.enumeration import DRAFTERS, PROMPT, STOP, VOCAB
from fakes.properties import changed, holds_for
from fakes.remote import INFO, DirectClient, contexts, verify_config
from fakes.tiny_models import Explorer, run
from fastapi.testclient import TestClient
from hypothesis import strategies as st
from pydantic import ValidationError

from specdemo.core import step_record
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.policies import Fixed
from specdemo.core.sampling import SamplingParams
from specdemo.remote.client import RemoteVerifier
from specdemo.remote.contexts import draft_from_request
from specdemo.remote.protocol import CODECS, StreamRequest, VerifyRequest, VerifyResponse
from specdemo.remote.server import create_app, parse_body
from specdemo.worker import Worker

pytestmark = pytest.mark.slow

JSON, MSGPACK = "application/json", "application/msgpack"


def answered(values: list[Any]) -> list[VerifyResponse | None]:
    """Send JSON requests to a service; return the responses, None for sentences."""
    service, results = contexts(budget_bytes=1 << 16), []
    for value in values:
        try:
            request = CODECS[JSON].load(VerifyRequest, json.dumps(value, default=str).encode())
            results.append(service.verify(request))
        except UserError as error:
            assert str(error).strip()
            results.append(None)
    return results


@holds_for(30, value=requests())
def test_valid_requests_are_equal_after_both_encodings(value: dict[str, Any]) -> None:
    request = CODECS[JSON].load(VerifyRequest, json.dumps(value).encode())
    for codec in CODECS.values():
        assert codec.load(VerifyRequest, codec.dump(request)) == request


@holds_for(30, value=requests())
def test_responses_are_equal_after_both_encodings_and_fit_the_draft(value: dict[str, Any]) -> None:
    (response,) = answered([value])
    if response is None:
        return
    for codec in CODECS.values():
        assert codec.load(VerifyResponse, codec.dump(response)) == response
    if not response.wanted and "round" in value:  # otherwise without the bonus
        request = CODECS[JSON].load(VerifyRequest, json.dumps(value).encode())
        response.to(draft_from_request(request, VOCAB, "cpu"), VOCAB)


@holds_for(30, values=st.lists(requests().flatmap(changed), max_size=4))
def test_every_request_gets_a_response_or_a_sentence(values: list[Any]) -> None:
    answered(values)


@holds_for(20, kind=st.sampled_from(("model", "siblings", "guesses")), data=st.data())
def test_changed_responses_give_steps_of_valid_traces_or_a_sentence(kind: str, data: st.DataObject) -> None:
    class Changed(DirectClient):
        def exchange(self, message: Any, kind: Any) -> Any:
            value = json.loads(CODECS[JSON].dump(super().exchange(message, kind)))
            return CODECS[JSON].load(kind, json.dumps(data.draw(changed(value)), default=str).encode())

    verifier = RemoteVerifier(Changed(contexts()), verify_config(SamplingParams(), seed=1), top=2, vocab_size=VOCAB)
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


@holds_for(
    25,
    path=st.sampled_from(("/v1/rounds", "/v1/texts")),
    kind=st.sampled_from((JSON, MSGPACK, "text/plain")),
    body=bodies.map(lambda value: json.dumps(value).encode()) | bodies.map(packed) | st.binary(max_size=40),
    cut=st.none() | st.integers(0, 200),
)
def test_every_body_gets_a_status_of_the_service(path: str, kind: str, body: bytes, cut: int | None) -> None:
    app = create_app(INFO, contexts(), Worker())
    response = TestClient(app).post(path, content=body[:cut], headers={"Content-Type": kind})
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


def test_a_number_of_many_digits_does_not_prevent_the_limit_of_keys() -> None:
    body = json.dumps({f"k{i}": None for i in range(300)}).replace("null", "9" * 5000, 1).encode()
    with pytest.raises(UserError, match="an object has 300 keys"):
        CODECS[JSON].load(VerifyRequest, body)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_long_bodies_are_parsed_outside_of_the_event_loop(size: int) -> None:
    def parse(body: bytes) -> bool:
        return threading.current_thread() is threading.main_thread()

    assert asyncio.run(parse_body(parse, b"x" * size)) == (size < 100)
