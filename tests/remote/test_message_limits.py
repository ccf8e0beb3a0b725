"""Invalid messages: few errors are built, however many values are invalid; long bodies leave the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from specdemo.core.errors import UserError
from specdemo.remote.protocol import CODECS, StreamRequest, VerifyRequest
from specdemo.remote.server import parse_body

MANY = 5_000
REQUEST: dict[str, Any] = {"ctx_id": "a", "round": 0, "base": 0, "k": 1}
ROW = {f"k{i}": None for i in range(200)}
ENCODE: dict[str, Callable[[Any], bytes]] = {
    "application/json": lambda value: json.dumps(value).encode(),
    "application/msgpack": msgpack.packb,
}


@pytest.mark.parametrize("encoding", CODECS)
@pytest.mark.parametrize(
    ("kind", "changes", "most"),
    [
        *((VerifyRequest, {name: [None] * MANY}, 1) for name in ("tokens", "draft_tokens", "parents", "q_token_probs")),
        (VerifyRequest, {"hard_mask": [None] * MANY}, 1),
        (VerifyRequest, {"rows": [ROW] * MANY}, 202),
        (VerifyRequest, {"sampling_cfg": {"bad_words": [[None] * MANY] * MANY}}, 1),
        (VerifyRequest, {"sampling_cfg": {"bad_texts": [None] * MANY}}, 1),
        (StreamRequest, {"tokens": [None] * MANY}, 7),
    ],
)
def test_validation_ends_at_the_first_invalid_item(
    encoding: str, kind: Any, changes: dict[str, Any], most: int
) -> None:
    with pytest.raises(UserError) as refused:
        CODECS[encoding].load(kind, ENCODE[encoding]({**REQUEST, **changes}))
    cause = refused.value.__cause__
    assert isinstance(cause, ValidationError) and cause.error_count() <= most


@pytest.mark.parametrize("encoding", CODECS)
@pytest.mark.parametrize("nested", [False, True])
def test_objects_with_many_keys_are_refused_before_validation(encoding: str, nested: bool) -> None:
    keys = {f"k{i}": None for i in range(300)}
    body = ENCODE[encoding]({**REQUEST, "rows": [keys]} if nested else {**REQUEST, **keys})
    with pytest.raises(UserError, match="at most 256 (keys|are read)") as refused:
        CODECS[encoding].load(VerifyRequest, body)
    assert not isinstance(refused.value.__cause__, ValidationError)


def test_a_number_of_many_digits_does_not_prevent_the_limit_of_keys() -> None:
    keys = {f"k{i}": None for i in range(300)}
    body = json.dumps(keys).replace("null", "9" * 5000, 1).encode()
    with pytest.raises(UserError, match="an object has 300 keys"):
        CODECS["application/json"].load(VerifyRequest, body)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_long_bodies_are_parsed_outside_of_the_event_loop(size: int) -> None:
    def parse(body: bytes) -> bool:
        return threading.current_thread() is threading.main_thread()

    assert asyncio.run(parse_body(parse, b"x" * size)) == (size < 100)
