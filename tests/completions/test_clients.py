"""Clients of the endpoint: streams that wait, prefixes, arbitrary bodies, scores of prompts."""

import json
import threading
from collections.abc import Iterator
from functools import cache, partial
from itertools import accumulate, cycle
from typing import Any

import httpx
import pytest
import torch
from fakes.properties import changed, holds_for
from fakes.services import completion_app, completions, running_service
from fakes.tiny_models import TEMPLATE
from fastapi.testclient import TestClient
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from specdemo.completions.answer import Answer
from specdemo.completions.responses import COMMENT
from specdemo.completions.service import CompletionService
from specdemo.core.errors import PromptTooLong
from specdemo.core.events import StepEvent
from specdemo.core.step import Draft, Step, Verdict
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe

AT_ONCE = 0.001


Served = tuple[str, CompletionService]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running_service(Recipe(pair="bundled", gamma=3, max_tokens=48), TEMPLATE) as (url, service):
        service.keep_alive_s = 1e9
        yield f"{url}/v1", service


def body(path: str, text: str, **values: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": text}]} if path.startswith("chat") else {"prompt": text}
    return {"model": "default", **prompt, **values}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "failure"), [("completions", None), ("chat/completions", PromptTooLong(9, 8))])
def test_a_waiting_request_gets_comments_and_then_its_answer_or_error(
    path: str, failure: Exception | None, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, service = served
    commented, original = threading.Event(), service.events

    def events(*given: Any) -> Iterator[Any]:
        assert commented.wait(60)
        if failure is not None:
            raise failure
        yield from original(*given)

    monkeypatch.setattr(service, "keep_alive_s", AT_ONCE)
    monkeypatch.setattr(service, "events", events)
    request = body(path, "x", stream=True, max_tokens=4)
    with httpx.stream("POST", f"{url}/{path}", json=request, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert f"{next(lines)}\n\n".encode() == COMMENT
        commented.set()
        data = [line for line in lines if line.startswith("data: ")]
    if failure is None:
        assert data[-1] == "data: [DONE]"
    else:
        assert json.loads(data[-1].removeprefix("data: "))["error"]["code"] == "context_length_exceeded"


@pytest.mark.slow
def test_long_prompts_have_code_and_counts(served: Served) -> None:
    url, service = served
    for path in ("completions", "chat/completions"):
        for text, stream in (("word " * 3000, True), ("x" * (1 << 17), False)):
            response = httpx.post(f"{url}/{path}", json=body(path, text, stream=stream), timeout=60)
            error = response.json()["error"]
            assert response.status_code == 400 and error["code"] == "context_length_exceeded"
            assert f"maximum context length is {service.target.context:,} tokens" in error["message"]


def test_emitted_tokens_are_counted_where_a_text_ends_inside_a_draft() -> None:
    answer = Answer()
    for tokens, accepted in (((1, 2, 3, 4), (0, 1, 2)), ((5, 6), (0, 1))):  # the second has no bonus
        step = Step(1, tokens, Draft.chain((1, 2, 3)), Verdict(accepted, None), 3, 0.0, 0.0, 0.0, 1.0)
        answer.add(StepEvent(step, ("x",) * len(tokens)))
    statistics = answer.counts.statistics(3)
    assert statistics["mean_acceptance_length"] == (4 + 2) / 2 and statistics["num_accepted_draft_tokens"] == 5


def test_an_answer_continues_the_prefix_of_the_client(served: Served) -> None:
    def post(*messages: dict[str, str], **values: Any) -> Any:
        options = {"temperature": 0, "max_tokens": 8, "return_token_ids": True, **values}
        request = {"model": "default", "messages": [*messages], **options}
        return httpx.post(f"{served[0]}/chat/completions", json=request, timeout=60).json()

    user = {"role": "user", "content": "for i in "}
    whole = post(user)["choices"][0]["message"]["content"]
    rest = post(user, {"role": "assistant", "content": whole[:4]})["choices"][0]["message"]["content"]
    assert (whole[:4] + rest).startswith(whole)
    empty = post(user, {"role": "assistant", "content": ""})["choices"][0]["message"]["content"]
    closed = post(user, {"role": "assistant", "content": whole[:4]}, add_generation_prompt=True)
    assert empty == whole and closed["prompt_token_ids"] != post(user)["prompt_token_ids"]


# --- arbitrary bodies -------------------------------------------------------------------------------------------------


@cache
def client() -> TestClient:
    app, _ = completion_app(Recipe(pair="bundled", gamma=3, max_tokens=3), TEMPLATE)
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


# --- log-probabilities of prompts, and of answers that stop texts cut -------------------------------------------------

PROMPT = "def read(path):\n    with open(path, 'é') as file:\n        return file.read()\n" * 4


@pytest.fixture(scope="module")
def post(served: Served) -> Any:
    def send(**values: Any) -> Any:
        request = {"model": "default", "temperature": 0, **values}
        answer = httpx.post(f"{served[0]}/completions", json=request, timeout=60)
        return answer.json() if answer.status_code == 200 else answer

    return send


@pytest.fixture(scope="module")
def ids(post: Any) -> list[int]:
    encoded: list[int] = post(prompt=PROMPT, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    return encoded


def reference(tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(PAIRS["bundled"].target, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_scores_of_a_prompt_equal_those_of_transformers(post: Any, ids: list[int], max_tokens: int) -> None:
    assert len(ids) > 64  # several passes
    answer = post(prompt=[ids], echo=True, logprobs=2, max_tokens=max_tokens, return_token_ids=True)
    (choice,) = answer["choices"]
    listed, tokens = choice["logprobs"], [*ids, *choice["token_ids"]]
    assert len(tokens) == len(ids) + max_tokens == len(listed["tokens"])
    rows = reference(tokens)[:-1]
    own = rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert listed["token_logprobs"][0] is None and listed["top_logprobs"][0] is None
    assert torch.allclose(torch.tensor(listed["token_logprobs"][1:]), own, atol=1e-3)
    best = [max(top.values()) for top in listed["top_logprobs"][1:]]
    assert torch.allclose(torch.tensor(best), rows.max(1).values, atol=1e-3)
    placed = zip(listed["tokens"][1:], listed["token_logprobs"][1:], listed["top_logprobs"][1:], strict=True)
    assert all(top[token] == value for token, value, top in placed)
    assert "".join(listed["tokens"]) == choice["text"] and choice["text"].startswith(PROMPT)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert [*accumulate(map(len, listed["tokens"]), initial=0)][:-1] == listed["text_offset"]


def test_requests_of_evaluation_harnesses_have_an_answer_per_prompt(post: Any, ids: list[int]) -> None:
    """Score the continuations of contexts by slices, with the greedy choice of each token."""
    prompts = [ids, ids[:20], ids[5:40]]
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = post(prompt=prompts, **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts)) and answer["usage"]["completion_tokens"] == 3
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        scores, context = choice["logprobs"], 8
        rows = reference(prompt)[context - 1 : -1]
        new = torch.tensor(prompt[context:])
        total = float(rows.gather(1, new[:, None]).sum())
        assert sum(scores["token_logprobs"][context:-1]) == pytest.approx(total, abs=1e-2)
        pairs = zip(scores["tokens"][context:-1], scores["top_logprobs"][context:-1], strict=True)
        greedy = [max(top, key=top.get) == token for token, top in pairs]
        assert greedy == (rows.argmax(1) == new).tolist()


def test_texts_are_scored_and_repeated_without_scores(post: Any) -> None:
    both = post(prompt=[PROMPT, "import "], echo=True, max_tokens=2)["choices"]
    single = post(prompt="import ", max_tokens=2)["choices"][0]
    assert both[1]["text"] == "import " + single["text"] and both[0]["text"].startswith(PROMPT)
    scored = post(prompt=PROMPT, echo=True, max_tokens=0, logprobs=0)["choices"][0]
    assert scored["text"] == PROMPT == "".join(scored["logprobs"]["tokens"])
    assert post(prompt="import ", echo=True, max_tokens=0)["choices"][0]["text"] == "import "
    without_echo = post(prompt=PROMPT, max_tokens=0)
    assert without_echo.status_code == 400 and "max_tokens must be from 1" in without_echo.text


def test_listed_tokens_are_the_text_wherever_a_stop_text_ends_it(post: Any) -> None:
    ask = partial(post, prompt="for i in range(", max_tokens=32, logprobs=1, return_token_ids=True)
    whole = ask()["choices"][0]
    text = whole["text"]
    for start, size in zip(range(1, len(text) - 6, 8), cycle((1, 3, 6)), strict=False):
        stop = text[start : start + size]
        choice = ask(stop=[stop, "\0"])["choices"][0]
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == text[: text.index(stop)]
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    half_seen = ask(stop=[text[-1] + "\0"])["choices"][0]
    assert half_seen["logprobs"] == whole["logprobs"]
