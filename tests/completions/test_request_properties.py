"""Properties of the endpoint: every body gets an answer or an error in the shape of OpenAI."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from fakes.arbitrary_messages import completions
from fakes.properties import changed, holds_for
from fakes.tiny_models import TEMPLATE
from fastapi.testclient import TestClient
from hypothesis import strategies as st

from specdemo.completions.routes import add_completions
from specdemo.completions.service import CompletionService
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote import serve

pytestmark = pytest.mark.slow


@cache
def client() -> TestClient:
    recipe = Recipe(pair="bundled", gamma=3, max_tokens=3)
    pool = ModelPool()
    target = pool.take(recipe.target_spec)
    target.tokenizer.chat_template = TEMPLATE
    app = serve.serve_model(target, local=True)
    add_completions(app, CompletionService(pool, recipe, seed=lambda: 5))
    return TestClient(app, base_url="http://127.0.0.1")


@holds_for(
    40,
    path=st.sampled_from(("/v1/completions", "/v1/chat/completions")),
    body=completions.flatmap(changed).map(lambda value: json.dumps(value, default=str).encode())
    | st.binary(max_size=20),
    cut=st.just(None) | st.integers(0, 100),
)
def test_every_body_gets_an_answer_or_an_error(path: str, body: bytes, cut: int | None) -> None:
    response = client().post(path, content=body[:cut], headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"].strip()
    elif response.headers["content-type"].startswith("text/event-stream"):
        lines: list[Any] = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
        assert lines[-1] == "[DONE]" and not any("error" in json.loads(line) for line in lines[:-1])
    else:
        assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")
