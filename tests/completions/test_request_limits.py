"""Invalid bodies of the endpoint: few errors are built, however many values are invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from specdemo.completions.requests import ChatRequest, CompletionRequest, TextRequest, parse_request
from specdemo.core.errors import UserError

MANY = 5_000


@pytest.mark.parametrize(
    ("kind", "body", "sentence"),
    [
        (ChatRequest, {"messages": [{}] * MANY}, "messages.0.role is missing: add it"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages.0.content must be a text"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "x"}] * MANY},
            "messages: list should have at most 4096",
        ),
        (TextRequest, {"prompt": [None] * MANY}, "prompt must be a text"),
        (TextRequest, {"prompt": "x", "stop": [None] * MANY}, "stop must be a text"),
        (TextRequest, {"prompt": "x", "prediction": {"type": "content", "content": [{}] * MANY}}, "prediction.content"),
    ],
)
def test_validation_ends_at_the_first_invalid_item(
    kind: type[CompletionRequest], body: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        parse_request(kind, json.dumps({"model": "default", **body}).encode())
    assert str(refused.value).startswith(sentence)
    cause = refused.value.__context__
    assert isinstance(cause, ValidationError) and cause.error_count() < 5


@pytest.mark.parametrize("nested", [False, True])
def test_objects_with_many_keys_are_refused_before_validation(nested: bool) -> None:
    keys = {f"k{i}": None for i in range(300)}
    body = {"messages": [keys]} if nested else keys
    with pytest.raises(UserError, match="an object has 300 keys: at most 256 are read") as refused:
        parse_request(ChatRequest, json.dumps(body).encode())
    assert refused.value.__context__ is None
