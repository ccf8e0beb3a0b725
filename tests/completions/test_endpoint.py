"""The endpoint with the client of OpenAI: chats, streams, seeds, stop texts, log-probabilities, predictions, errors."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from typing import Any

import gradio
import httpx
import pytest
import torch
from fakes.services import running_service
from fakes.tiny_models import TEMPLATE
from fakes.traces import text_of
from transformers import AutoModelForCausalLM

from specdemo.completions.requests import TextRequest, parse_request
from specdemo.completions.service import CompletionService
from specdemo.core.events import End, StepEvent
from specdemo.core.step import Draft, Step, Verdict
from specdemo.external.client import top_tokens_of
from specdemo.generate import generate
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

RECIPE = Recipe(pair="bundled", gamma=3, max_tokens=48)
PROMPT = "def read(path):\n    with open(path"
CHAT: Any = [{"role": "user", "content": "for i in range("}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, CompletionService]]:
    with running_service(RECIPE, TEMPLATE, body_bytes=1 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def openai() -> Any:
    """Import the client, which takes 0.7 s, only where these tests run."""
    return import_module("openai")


@pytest.fixture(scope="module")
def client(served: tuple[str, CompletionService], openai: Any) -> Any:
    return openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0)


def run(service: CompletionService, prompt: Any, **options: Any) -> str:
    recipe = Recipe(**{"pair": "bundled", "gamma": 3, "max_tokens": 48, **options})
    return text_of(generate(recipe, prompt, service.pool))


def complete(client: Any, prompt: str = PROMPT, **options: Any) -> Any:
    return client.completions.create(model="default", prompt=prompt, **{"temperature": 0, **options})


# --- texts -------------------------------------------------------------------------------------------------------


def test_models_are_the_pair_and_the_default(client: Any, openai: Any) -> None:
    assert [model.id for model in client.models.list()] == ["default", "bundled"]
    assert client.models.retrieve("bundled").id == "bundled"
    with pytest.raises(openai.NotFoundError, match="known are default, bundled"):
        client.models.retrieve("gpt-4o")


def test_greedy_texts_equal_those_of_a_run(client: Any, served: tuple[str, CompletionService]) -> None:
    answer = complete(client, max_tokens=40)
    assert answer.choices[0].text == run(served[1], PROMPT, temperature=0.0, max_tokens=40)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 40
    chat = client.chat.completions.create(model="bundled", messages=CHAT, temperature=0, max_completion_tokens=20)
    assert chat.choices[0].message.content == run(served[1], CHAT, temperature=0.0, max_tokens=20, chat=True)
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens


def test_omitted_sampling_parameters_are_those_of_the_pair(client: Any, served: tuple[str, CompletionService]) -> None:
    answer = client.completions.create(model="default", prompt=PROMPT, seed=11, max_tokens=24)
    assert answer.choices[0].text == run(served[1], PROMPT, seed=11, max_tokens=24)
    other = client.completions.create(model="default", prompt=PROMPT, seed=12, max_tokens=24)
    assert answer.choices[0].text != other.choices[0].text
    warm = client.completions.create(model="default", prompt=PROMPT, seed=11, max_tokens=24, temperature=1.2, top_p=0.9)
    assert warm.choices[0].text == run(served[1], PROMPT, seed=11, max_tokens=24, temperature=1.2, top_p=0.9)


def test_a_stream_has_the_text_the_end_and_the_usage(client: Any) -> None:
    whole = client.chat.completions.create(model="default", messages=CHAT, temperature=0, max_tokens=30)
    stream = client.chat.completions.create(
        model="default",
        messages=CHAT,
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")  # the stream finds its prompt in the cache
    assert not last.choices and all(getattr(last.usage, name) == getattr(whole.usage, name) for name in counts)
    assert last.usage.prompt_tokens_details.cached_tokens > 0
    assert last.metrics == whole.metrics and len({chunk.id for chunk in chunks}) == 1


def test_a_stop_text_ends_the_answer_before_it(client: Any) -> None:
    text = complete(client).choices[0].text
    stop = text[12:16]
    for stream in (False, True):
        answer = complete(client, stop=[stop, "never written"], stream=stream)
        parts = list(answer) if stream else [answer]
        assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_has_the_ids_of_tokens_without_text(
    served: tuple[str, CompletionService], client: Any, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    """The last step consists of the stop token."""
    service = served[1]
    stop, original = min(service.target.stop), service.events

    def events(*given: Any) -> Iterator[Any]:
        for event in original(*given):
            if isinstance(event, End):
                yield StepEvent(Step(12, (stop,), Draft(), Verdict((), stop), 0, 0.0, 0.0, 0.0, 1.0), ("",))
            yield event

    monkeypatch.setattr(service, "events", events)
    options: Any = {"model": "default", "max_tokens": 12, "extra_body": {"return_token_ids": True}}
    prompt: Any = {"messages": CHAT} if chat else {"prompt": PROMPT}
    create: Any = client.chat.completions.create if chat else client.completions.create
    whole = create(**options, **prompt).choices[0].token_ids
    assert len(whole) == 13 and whole[-1] == stop
    chunks = [chunk.choices[0] for chunk in create(**options, **prompt, stream=True)]
    assert [token for chunk in chunks for token in getattr(chunk, "token_ids", ())] == whole
    for chunk in create(**options | {"extra_body": {}}, **prompt, stream=True):
        assert not hasattr(chunk.choices[0], "token_ids")


def test_without_speculation_no_token_is_drafted(client: Any) -> None:
    plain, drafted = complete(client, extra_body={"speculation": False}), complete(client)
    assert plain.choices[0].text == drafted.choices[0].text
    assert plain.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    assert drafted.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_without_speculation_a_rule_of_shared_noise_stays(served: tuple[str, CompletionService]) -> None:
    """It gives the same sampled text; a threshold of the pair has no effect."""

    def asked(speculation: bool) -> Any:
        values = {**TEXT, "temperature": 1, "seed": 3, "speculation": speculation}
        return parse_request(TextRequest, json.dumps(values).encode())

    service = CompletionService(served[1].pool, replace(RECIPE, rule="threshold", threshold=0.4))
    recipe = service.recipe_of(asked(False))
    assert (recipe.method, recipe.rule, recipe.threshold) == ("ar", "rejection", None)
    service = CompletionService(served[1].pool, replace(RECIPE, rule="coupled"))
    requests = [asked(speculation) for speculation in (True, False)]
    texts = {text_of(service.events(request, service.recipe_of(request), "")) for request in requests}
    assert len(texts) == 1


def test_a_continued_conversation_reuses_its_cache(client: Any) -> None:
    ask: Any = {"model": "default", "temperature": 0, "max_tokens": 12}
    turns: list[Any] = [{"role": "user", "content": "class Node:\n    def __init__(self, value):"}]
    first = client.chat.completions.create(messages=turns, **ask)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    turns += [first.choices[0].message.model_dump(include={"role", "content"}), {"role": "user", "content": "pass"}]
    second = client.chat.completions.create(messages=turns, **ask)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens < cached < second.usage.prompt_tokens
    again = client.chat.completions.create(messages=turns, **ask)
    assert again.choices[0].message.content == second.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens
    other = client.chat.completions.create(messages=[{"role": "user", "content": "import os"}], **ask)
    assert other.usage.prompt_tokens_details.cached_tokens < 4


# --- log-probabilities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_equal_those_of_transformers(client: Any, temperature: float) -> None:
    body = {"return_token_ids": True, "top_k": 40}
    answer = complete(client, logprobs=5, max_tokens=32, temperature=temperature, seed=3, extra_body=body)
    choice, statistics = answer.choices[0], answer.metrics["speculative_decoding"]
    assert statistics["num_accepted_draft_tokens"] > 3
    model = AutoModelForCausalLM.from_pretrained(PAIRS["bundled"].target, dtype=torch.float32)
    prompt, ids = answer.prompt_token_ids, choice.token_ids
    with torch.inference_mode():
        rows = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(choice.logprobs.token_logprobs), own, atol=1e-3)
    best = [sorted(top.values(), reverse=True) for top in choice.logprobs.top_logprobs]
    assert torch.allclose(torch.tensor([row[:3] for row in best]), rows.topk(3).values, atol=1e-3)
    assert "".join(choice.logprobs.tokens) == choice.text
    placed = zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    assert all(choice.text.startswith(token, offset) for offset, token in placed)


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_those_of_tokens_that_may_begin_a_stop_text(client: Any, stream: bool) -> None:
    text = complete(client).choices[0].text
    withheld = [f"{character}\0" for character in sorted({*text})]
    for i in range(0, len(withheld), 4):
        answer = complete(client, logprobs=0, stop=withheld[i : i + 4], stream=stream)
        parts = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
        placed = [pair for part in parts if part for pair in zip(part.text_offset, part.tokens, strict=True)]
        assert "".join(token for _, token in placed) == text
        assert all(text.startswith(token, offset) for offset, token in placed)
        assert [offset for offset, _ in placed] == [*accumulate((len(token) for _, token in placed[:-1]), initial=0)]


def test_log_probabilities_of_a_streamed_chat(client: Any) -> None:
    ask: Any = {"model": "default", "messages": CHAT, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=2, **ask).choices[0].logprobs.content
    stream = client.chat.completions.create(logprobs=True, top_logprobs=2, stream=True, **ask)
    parts = [chunk.choices[0].logprobs.content for chunk in stream if chunk.choices[0].logprobs]
    assert [entry for part in parts for entry in part] == whole
    assert all(len(entry.top_logprobs) == 2 and bytes(entry.bytes).decode() == entry.token for entry in whole)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in whole)  # greedy


# --- provenance of tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"stop": "("}])
def test_a_stream_has_the_outcome_of_each_token_and_the_ledger(
    client: Any, served: tuple[str, CompletionService], chat: bool, options: dict[str, Any]
) -> None:
    """The outcomes are those of a run with the same options."""
    prompt: Any = {"messages": CHAT} if chat else {"prompt": PROMPT}
    create: Any = client.chat.completions.create if chat else client.completions.create
    ask = {"model": "default", "temperature": 0, "max_tokens": 24, **prompt, **options}
    if chat and "logprobs" in ask:
        ask |= {"logprobs": True, "top_logprobs": 1}
    plain = list(create(stream=True, **ask))
    *chunks, last = create(stream=True, stream_options={"speculation": True}, **ask)
    listed = [token for chunk in chunks for token in getattr(chunk.choices[0], "speculation", ())]
    recipe = Recipe(
        pair="bundled", gamma=3, max_tokens=24, temperature=0.0, chat=chat, stop_texts=("(",) if "stop" in ask else ()
    )
    events = list(generate(recipe, CHAT if chat else PROMPT, served[1].pool))
    tokens = [token for event in events if isinstance(event, StepEvent) for token in event.shown()]
    assert [token["outcome"] for token in listed] == [token.outcome for token in tokens if token.outcome.committed]
    assert {"plain", "accepted"} <= {token["outcome"] for token in listed}
    texts = [chunk.choices[0].delta.content or "" if chat else chunk.choices[0].text for chunk in chunks]
    assert "".join(token["token"] for token in listed) == "".join(texts) == text_of(events)
    assert not last.choices and last.usage.completion_tokens == len(listed)
    assert {"prompt", "commit"} <= last.ledger.keys() and all(part["seconds"] > 0 for part in last.ledger.values())
    assert sum(part["share"] for part in last.ledger.values()) == pytest.approx(1)
    logged = [chunk.choices[0].logprobs is not None for chunk in (*plain, *chunks)]
    assert any(logged) == ("logprobs" in options)


def test_clients_that_do_not_ask_see_no_outcomes(served: tuple[str, CompletionService]) -> None:
    for path, body in (("completions", {**TEXT, "prompt": PROMPT}), ("chat/completions", TALK)):
        streamed = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8}
        response = httpx.post(f"{served[0]}/v1/{path}", json={**body, **streamed}, timeout=60)
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        *chunks, last = map(json.loads, lines)
        own = "delta" if path.startswith("chat") else "text"
        envelope = {"id", "object", "created", "model", "system_fingerprint", "choices"}
        assert {key for chunk in chunks for key in chunk} == envelope and last.keys() == envelope | {"usage", "metrics"}
        keys = {key for chunk in chunks for key in chunk["choices"][0]}
        assert keys == {"index", own, "logprobs", "finish_reason"}


def test_the_endpoint_is_asked_for_margins_as_a_server_of_another_engine(
    client: Any, served: tuple[str, CompletionService]
) -> None:
    answer = complete(client, max_tokens=1, logprobs=2, extra_body={"return_token_ids": True})
    found = top_tokens_of(f"vllm={served[0]}", answer.prompt_token_ids)
    best, second = sorted(answer.choices[0].logprobs.top_logprobs[0].values(), reverse=True)
    assert found.margin == pytest.approx(best - second) and found.margin > 0
    assert found.system_fingerprint == answer.system_fingerprint
    assert top_tokens_of("vllm=http://127.0.0.1:9", [1]).margin is None


# --- predictions -------------------------------------------------------------------------------------------------


def test_a_prediction_is_drafted_and_counted(client: Any) -> None:
    expected = complete(client, max_tokens=40)
    text, plain = expected.choices[0].text, expected.metrics["speculative_decoding"]
    body = {"prediction": {"type": "content", "content": text}}
    answer = complete(client, max_tokens=40, extra_body=body)
    assert answer.choices[0].text == text
    details, statistics = answer.usage.completion_tokens_details, answer.metrics["speculative_decoding"]
    assert details.accepted_prediction_tokens > 25 and details.rejected_prediction_tokens < 10
    assert statistics["num_spec_steps"] < plain["num_spec_steps"] / 2 and statistics["num_spec_tokens"] == 15
    wrong = {"prediction": {"type": "content", "content": "Lorem ipsum dolor sit amet, consectetur"}}
    other = complete(client, max_tokens=40, extra_body=wrong)
    assert other.choices[0].text == text
    assert other.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_statistics_agree_with_each_other(client: Any) -> None:
    answer = complete(client, extra_body={"return_token_ids": True})
    counts = answer.metrics["speculative_decoding"]
    accepted, drafted = counts["per_step_accepted"], counts["per_step_drafted"]
    assert counts["acceptance_histogram"] == [accepted.count(n) for n in range(4)]
    assert counts["num_spec_steps"] == len(accepted) == len(drafted)
    assert counts["mean_acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted))
    assert counts["draft_acceptance_rate"] == pytest.approx(sum(accepted) / sum(drafted))
    details = answer.usage.completion_tokens_details  # without a prediction: of all drafts
    assert details.accepted_prediction_tokens == counts["num_accepted_draft_tokens"] == sum(accepted) > 0
    assert details.rejected_prediction_tokens == sum(drafted) - sum(accepted)
    assert 1 + sum(count + 1 for count in accepted) <= len(answer.choices[0].token_ids) == 48
    encoded = client.completions.create(model="default", prompt=answer.prompt_token_ids, temperature=0)
    assert encoded.choices[0].text == answer.choices[0].text


# --- errors ------------------------------------------------------------------------------------------------------

TEXT = {"model": "default", "prompt": "x"}
TALK = {"model": "default", "messages": CHAT}
PREDICTION = {"type": "content", "content": "x"}
BAD: list[tuple[str, Any, str, str | None]] = [
    ("completions", [], "must be a JSON object", None),
    ("completions", {"prompt": "x"}, "model is missing", "model"),
    ("completions", {**TEXT, "prompt": ["a"] * 2049}, "more than 2,048 texts", None),
    ("completions", {**TEXT, "prompt": [1 << 40]}, "is not among the 4,096 token ids", None),
    ("completions", {**TEXT, "prompt": [[]]}, "the prompt is empty", None),
    ("completions", {**TEXT, "prompt": "\ud800"}, "prompt", None),
    ("completions", {**TEXT, "temperature": "hot"}, "temperature: input should be a valid number", "temperature"),
    ("completions", {**TEXT, "max_tokens": 0}, "max_tokens must be from 1", None),
    ("completions", {**TEXT, "stop": ["x"] * 65}, "more than 64 items", None),
    ("completions", {**TEXT, "prediction": PREDICTION, "speculation": False}, "prediction needs speculation", None),
    ("chat/completions", {**TALK, "messages": []}, "at least 1", "messages"),
    ("chat/completions", {**TALK, "messages": [{"role": "user", "content": 5}]}, "must be a", "messages.0.content"),
    ("chat/completions", {**TALK, "response_format": {"type": "json_object"}}, "response_format", "response_format"),
    ("chat/completions", {**TALK, "top_logprobs": 3}, "top_logprobs needs logprobs", None),
]


@pytest.mark.parametrize(("path", "body", "words", "parameter"), BAD)
def test_invalid_requests_get_a_sentence(
    served: tuple[str, CompletionService], path: str, body: Any, words: str, parameter: str | None
) -> None:
    for stream in ({}, {"stream": True}):
        sent = {**body, **stream} if isinstance(body, dict) else body
        response = httpx.post(f"{served[0]}/v1/{path}", content=json.dumps(sent), headers=JSON, timeout=60)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error" and words in error["message"] and "\n" not in error["message"]
        assert parameter is None or error["param"] == parameter


JSON = {"content-type": "application/json"}


def test_malformed_requests_have_openais_shape(served: tuple[str, CompletionService]) -> None:
    for content, headers, status in (
        (b"[" * 100_000, JSON, 400),
        (b'{"model": "default", "prompt": NaN}', JSON, 400),
        (json.dumps({**TEXT, "prompt": "x" * (10 << 20)}).encode(), JSON, 413),
        (b"{}", {"content-type": "text/plain"}, 415),
        (json.dumps(TEXT).encode(), {**JSON, "origin": "http://evil.example"}, 403),
        (json.dumps({**TEXT, "model": "gpt-4o"}).encode(), JSON, 404),
    ):
        response = httpx.post(f"{served[0]}/v1/completions", content=content, headers=headers, timeout=60)
        assert response.status_code == status
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert (response.headers.get("connection") == "close") == (status == 413)  # the rest of the body is not read


# --- clients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_run(
    served: tuple[str, CompletionService], client: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    url, service = served
    begun, ended, original = threading.Event(), threading.Event(), service.events

    def events(*given: Any) -> Iterator[Any]:
        steps = 0
        try:
            for event in original(*given):
                steps += isinstance(event, StepEvent)
                if steps == 3:
                    begun.set()
                yield event
        finally:
            if steps < 900:
                ended.set()

    monkeypatch.setattr(service, "events", events)
    body = {**TEXT, "prompt": PROMPT, "max_tokens": 1000, "speculation": False, "stream": stream}
    with httpx.Client() as http, pytest.raises(httpx.ReadTimeout):
        with http.stream("POST", f"{url}/v1/completions", json=body, timeout=0.5) as response:
            begun.wait(30)
            raise httpx.ReadTimeout("") if response.status_code == 200 else AssertionError
    assert ended.wait(30)


def test_the_token_is_required_and_origins_are_allowed(openai: Any) -> None:
    options: Any = {"token": "secret", "origins": ["https://chat.example"]}
    with running_service(RECIPE, **options) as (url, _):
        with pytest.raises(openai.AuthenticationError, match="SPECDEMO_TOKEN") as refused:
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
        assert refused.value.code == "invalid_api_key"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        assert complete(client, max_tokens=2).usage.completion_tokens == 2
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="default", messages=CHAT)
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        for origin, allowed in (("https://chat.example", "https://chat.example"), ("https://evil.example", None)):
            preflight = httpx.options(f"{url}/v1/completions", headers={"origin": origin, **ask}, timeout=60)
            sent = {"origin": origin, "authorization": "Bearer secret", "sec-fetch-site": "cross-site"}
            answer = httpx.post(f"{url}/v1/completions", json={**TEXT, "max_tokens": 1}, headers=sent, timeout=60)
            assert preflight.headers.get("access-control-allow-origin") == allowed
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert answer.status_code == (200 if allowed else 403)


def test_the_caches_of_a_conversation_belong_to_the_token_and_session() -> None:
    ask: Any = {"content": json.dumps({**TEXT, "prompt": PROMPT, "max_tokens": 1}).encode(), "timeout": 60}
    with running_service(RECIPE, token="first second") as (url, _):

        def cached(token: str, session: str = "") -> int:
            sent = {**JSON, "authorization": f"Bearer {token}", **({"x-session-id": session} if session else {})}
            answer = httpx.post(f"{url}/v1/completions", headers=sent, **ask).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("first") == 0 and cached("first") > 0
        assert cached("second") == 0 and cached("first", "s" * 32) == 0
        assert cached("first") > 0 and cached("first", "s" * 32) > 0


def test_the_chat_page_of_gradio_uses_the_endpoint(served: tuple[str, CompletionService]) -> None:
    chat = gradio.load_chat(f"{served[0]}/v1", model="default", token="none")
    *_, first = chat.fn("import ", [])
    texts = (("user", "import "), ("assistant", first))
    turns = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]
    *parts, second = chat.fn("class Node:", turns)
    assert first and second and all(second.startswith(part) for part in parts)
