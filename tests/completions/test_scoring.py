"""Log-probabilities of prompts, as evaluation harnesses request them, and of answers that stop texts cut."""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import httpx
import pytest
import torch
from fakes.running_service import running_service
from transformers import AutoModelForCausalLM

from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

PROMPT = "def read(path):\n    with open(path, 'é') as file:\n        return file.read()\n" * 4


@pytest.fixture(scope="module")
def post() -> Iterator[Any]:
    with running_service(Recipe(pair="bundled", gamma=3, max_tokens=48)) as (url, service):
        service.keep_alive_s = 1e9

        def send(**body: Any) -> Any:
            answer = httpx.post(
                f"{url}/v1/completions", json={"model": "default", "temperature": 0, **body}, timeout=60
            )
            return answer.json() if answer.status_code == 200 else answer

        yield send


@pytest.fixture(scope="module")
def ids(post: Any) -> list[int]:
    encoded: list[int] = post(prompt=PROMPT, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    return encoded


def reference(tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(PAIRS["bundled"].target, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
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


def test_without_echo_a_token_is_needed(post: Any) -> None:
    refused = post(prompt=PROMPT, max_tokens=0)
    assert refused.status_code == 400 and "max_tokens must be from 1" in refused.text


def test_listed_tokens_are_the_text_wherever_a_stop_text_ends_it(post: Any) -> None:
    ask = partial(post, prompt="for i in range(", max_tokens=32, logprobs=1, return_token_ids=True)
    whole = ask()["choices"][0]
    text = whole["text"]
    for start in range(1, len(text) - 6, 11):
        for size in (1, 3, 6):
            choice = ask(stop=[text[start : start + size], "\0"])["choices"][0]
            assert (
                choice["text"]
                == "".join(choice["logprobs"]["tokens"])
                == text[: text.index(text[start : start + size])]
            )
            assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    half_seen = ask(stop=[text[-1] + "\0"])["choices"][0]
    assert half_seen["logprobs"] == whole["logprobs"]
