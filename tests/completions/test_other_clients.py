"""Conversations of other client libraries, where they are installed, and prefixes of answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes.running_service import running_service
from fakes.tiny_models import TEMPLATE

from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

ASK: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with running_service(Recipe(pair="bundled", gamma=3), TEMPLATE) as (url, _):
        yield f"{url}/v1"


def test_langchain_continues_a_conversation_and_knows_the_context(base: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    options = {"api_key": "none", "model": "default", "max_retries": 0, "seed": -1, "logprobs": True, **ASK}
    model = langchain.ChatOpenAI(base_url=base, **options)
    turns = [messages.HumanMessage("import ", name="bob")]
    turns += [model.invoke(turns), messages.HumanMessage([{"type": "text", "text": "def "}])]
    whole, *parts = model.stream(turns)
    for part in parts:
        whole += part
    assert model.invoke(turns).content == whole.content
    assert model.invoke([*turns, whole, messages.HumanMessage("class ")]).content
    with pytest.raises(Exception, match="context_length_exceeded"):
        model.invoke("word " * 3000)


def test_litellm_continues_a_conversation_and_knows_the_context(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    options = {"model": "openai/default", "api_base": base, "api_key": "none", "num_retries": 0, **ASK}
    turns: list[Any] = [{"role": "user", "content": "import "}]
    first = litellm.completion(messages=turns, **options)
    turns += [first.choices[0].message.model_dump(), {"role": "user", "content": "def "}]
    whole = litellm.stream_chunk_builder([*litellm.completion(messages=turns, stream=True, **options)])
    turns += [whole.choices[0].message.model_dump(), {"role": "user", "content": "class "}]
    assert litellm.completion(messages=turns, **options).choices[0].message.content
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 3000}], **options)


def test_an_answer_continues_the_prefix_of_the_client(base: str) -> None:
    def post(*messages: dict[str, str], **values: Any) -> Any:
        body = {"model": "default", "messages": [*messages], "return_token_ids": True, **ASK, **values}
        return httpx.post(f"{base}/chat/completions", content=json.dumps(body), headers=JSON, timeout=60).json()

    user = {"role": "user", "content": "for i in "}
    whole = post(user)["choices"][0]["message"]["content"]
    rest = post(user, {"role": "assistant", "content": whole[:4]})["choices"][0]["message"]["content"]
    assert (whole[:4] + rest).startswith(whole)
    empty = post(user, {"role": "assistant", "content": ""})["choices"][0]["message"]["content"]
    closed = post(user, {"role": "assistant", "content": whole[:4]}, add_generation_prompt=True)
    assert empty == whole and closed["prompt_token_ids"] != post(user)["prompt_token_ids"]


JSON = {"content-type": "application/json"}
