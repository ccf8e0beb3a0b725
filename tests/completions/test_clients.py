"""Clients of the endpoint: their fields, streams that wait, prefixes, arbitrary bodies, scores of prompts."""

import json
import threading
from collections.abc import Iterator
from functools import cache, partial
from itertools import accumulate, cycle, product
from typing import Any

import httpx
import pytest
import torch
from fakes.properties import changed, holds_for
from fakes.services import completion_app, completions, running_service
from fakes.tiny_models import TEMPLATE
from fastapi.testclient import TestClient
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from specdemo.completions.fields import SYNONYMS, InvalidParameter
from specdemo.completions.requests import ChatRequest, CompletionRequest, TextRequest, parse_request
from specdemo.completions.responses import COMMENT, Answer
from specdemo.completions.service import CompletionService
from specdemo.core.errors import PromptTooLong, UserError
from specdemo.core.events import StepEvent
from specdemo.core.step import Draft, Step, Verdict
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe

TEXT: dict[str, Any] = {"model": "default", "prompt": "x"}
USER = {"role": "user", "content": "x"}
CHAT: dict[str, Any] = {"model": "default", "messages": [USER]}


def text(**values: Any) -> TextRequest:
    return parse_request(TextRequest, json.dumps({**TEXT, **values}).encode())


def chat(*messages: dict[str, Any], **values: Any) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({**CHAT, "messages": [*messages] or [USER]} | values).encode())


# Bodies as clients send them by default, with the values of their settings that are off.
OPENAI = {
    "n": 1, "store": False, "metadata": {}, "service_tier": "auto", "modalities": ["text"], "user": "bob",
    "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
    "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "safety_identifier": "b", "audio": None,
    "prompt_cache_key": "k", "verbosity": "medium", "reasoning_effort": None, "stream_options": None,
    "function_call": "auto", "functions": [], "prediction": None, "seed": None, "stop": None, "top_logprobs": None,
}  # fmt: skip
LLAMA_CPP = {
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "typical_p": 1.0, "xtc_probability": 0.0, "min_p": 0,
    "xtc_threshold": 0.1, "repeat_last_n": 64, "repeat_penalty": 1.0, "dry_multiplier": 0.0, "dry_base": 1.75,
    "dry_allowed_length": 2, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n", ":"], "mirostat": 0,
    "mirostat_tau": 5.0, "mirostat_eta": 0.1, "top_n_sigma": -1.0, "n_keep": 0, "n_discard": 0, "n_probs": 0,
    "min_keep": 0, "grammar": "", "ignore_eos": False, "logit_bias": [[5, 0.0]], "id_slot": -1, "n_indent": 0,
    "cache_prompt": True, "t_max_predict_ms": 0, "timings_per_token": False, "post_sampling_probs": False,
    "lora": [], "response_fields": [], "image_data": [], "return_tokens": False, "return_progress": False,
    "samplers": ["penalties", "dry", "temperature", "top_k", "top_p"], "n_cache_reuse": 0, "seed": -1,
}  # fmt: skip
SILLY_TAVERN = {
    "max_new_tokens": 9, "max_tokens": 9, "n_predict": 9, "num_predict": 9, "temperature": 0.7, "top_p": 0.9,
    "typical_p": 1, "typical": 1, "sampler_seed": -1, "seed": -1, "min_p": 0, "repetition_penalty": 1,
    "rep_pen": 1, "repeat_penalty": 1, "rep_pen_range": 0, "repetition_penalty_range": 0, "top_k": 0, "skew": 0,
    "min_tokens": 0, "min_length": 0, "num_beams": 1, "add_bos_token": True, "smoothing_factor": 0, "tfs": 1,
    "smoothing_curve": 1, "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": '["\\n"]', "top_a": 0,
    "max_tokens_second": 0, "stopping_strings": [], "stop": [], "truncation_length": 8192, "ban_eos_token": False,
    "include_reasoning": True, "epsilon_cutoff": 0, "eta_cutoff": 0, "mirostat_mode": 0, "custom_token_bans": "",
    "banned_strings": [], "api_type": "vllm", "api_server": "http://127.0.0.1", "legacy_api": False, "nsigma": 0,
    "xtc_threshold": 0.1, "xtc_probability": 0, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0,
    "penalty_alpha": 0, "temperature_last": False, "do_sample": True, "guidance_scale": 1, "negative_prompt": "",
    "grammar_string": "", "speculative_ngram": False, "sampler_priority": ["temperature", "top_k", "top_p"],
    "num_ctx": 8192, "adaptive_target": -1, "adaptive_decay": 0.9, "dynatemp_low": 1, "dynatemp_high": 1,
}  # fmt: skip
OTHERS_OFF = {  # of vLLM, pages and evaluation harnesses
    "mode": "instruct", "continue_": False, "auto_max_new_tokens": False, "chat_id": "c", "features": {},
    "keep_alive": "5m", "format": "", "think": None, "suffix": "", "logprobs": None, "provider": {},
    "usage": {"include": True}, "extra_body": {}, "num_return_sequences": 1, "truncate_prompt_tokens": -1,
    "stop_token_ids": [], "skip_special_tokens": True, "guided_json": None, "guided_regex": "", "request_id": "r",
}  # fmt: skip
BODIES = [OPENAI, LLAMA_CPP, SILLY_TAVERN, OTHERS_OFF]
EFFECTIVE = {*CompletionRequest.model_fields, "echo", "logprobs", "top_logprobs", "chat_template_kwargs"} - {"model"}
CHAT_ONLY, TEXT_ONLY = {"mode", "continue_", "top_logprobs"}, {"suffix", "echo", "add_bos_token"}


@pytest.mark.parametrize("body", BODIES)
def test_neutral_values_change_nothing(body: dict[str, Any]) -> None:
    """Each field alone, and complete bodies."""
    for make, without in ((text, CHAT_ONLY), (chat, TEXT_ONLY)):
        plain, values = make(), {name: value for name, value in body.items() if name not in without}
        make(**values)
        for name, value in values.items():
            request = make(**{name: value})
            if SYNONYMS.get(name, name) not in EFFECTIVE:
                assert (request, request.options) == (plain, plain.options), name
            assert make(**{name: None}) == plain, name


REFUSED: dict[str, Any] = {
    "n": 2, "best_of": True, "frequency_penalty": -1, "typical_p": 0.9, "mirostat": 2, "repeat_penalty": 1.1,
    "logit_bias": {"5": 1}, "ignore_eos": True, "stop_token_ids": [2], "skip_special_tokens": False,
    "grammar": "root", "guided_json": {}, "response_format": {"type": "json_object"}, "tool_choice": "required",
    "tools": [{"type": "function"}], "modalities": ["audio"], "service_tier": "flex", "id_slot": 0, "mystery": 0,
    "samplers": ["top_p", "top_k", "temperature"], "bad_words": ["x"], "do_sample": False, "verbosity": "high",
    "reasoning_effort": "low", "truncate_prompt_tokens": 10, "top_n_sigma": 1, "add_special_tokens": 5,
    "reasoning_format": "auto", "prompt_logprobs": 0,
}  # fmt: skip


def test_other_values_are_refused_by_name() -> None:
    for (name, value), make in product(REFUSED.items(), (text, chat)):
        with pytest.raises(InvalidParameter, match=f"^{name} is not supported: ") as refused:
            make(**{name: value})
        assert refused.value.parameter == name


CONVENTIONS: list[tuple[dict[str, Any], str, Any]] = [
    ({"top_k": -1}, "top_k", 0),
    ({"sampler_seed": -1}, "seed", None),
    ({"seed": -2}, "seed", -2),
    ({"seed": (1 << 63) - 1}, "seed", (1 << 63) - 1),
    ({"seed": 1 << 63}, "seed", -(1 << 63)),
    ({"seed": (1 << 64) - 1}, "seed", -1),
    ({"n_predict": -1}, "max_tokens", -1),
    ({"max_completion_tokens": 7, "max_tokens": 7}, "max_tokens", 7),
    ({"rep_pen": 1.2}, "repetition_penalty", 1.2),
    ({"stop": ""}, "stop_texts", None),
    ({"stopping_strings": ["a"], "stop": ["a"]}, "stop_texts", ("a",)),
]


def test_conventional_values_and_names() -> None:
    for (values, option, expected), make in product(CONVENTIONS, (text, chat)):
        assert make(**values).options.get(option) == expected, values
    with pytest.raises(InvalidParameter, match="max_new_tokens is another max_tokens"):
        text(max_tokens=5, max_new_tokens=6)


# --- messages ----------------------------------------------------------------------------------------------------

ANSWER = {"role": "assistant", "content": "y"}
NEUTRAL_OF_MESSAGES: dict[str, Any] = {
    "name": "bob", "id": "m1", "refusal": "", "tool_calls": [], "annotations": [], "reasoning_content": "",
    "audio": {}, "metadata": {"title": "t"}, "logprobs": {"content": []}, "finish_reason": "stop", "prefix": False,
}  # fmt: skip
REFUSED_OF_MESSAGES: dict[str, Any] = {
    "tool_calls": [{"id": "c"}], "refusal": "no", "reasoning_content": "hm", "prefix": True, "mystery": 1,
}  # fmt: skip


def test_fields_of_messages() -> None:
    for name, value in NEUTRAL_OF_MESSAGES.items():
        assert chat(USER, {**ANSWER, name: value}, USER) == chat(USER, ANSWER, USER), name
    for name, value in REFUSED_OF_MESSAGES.items():
        with pytest.raises(InvalidParameter, match=f"messages.1.{name} is not supported: "):
            chat(USER, {**ANSWER, name: value}, USER)
    assert chat(USER, {"role": "assistant", "content": None}, USER).prompt_input[1]["content"] == ""
    with pytest.raises(InvalidParameter, match=r"messages\.0\.content is missing"):
        chat({"role": "user", "content": None})
    with pytest.raises(InvalidParameter, match=r"messages\.1\.role must be .*tools are not supported"):
        chat(USER, {"role": "tool", "content": "x"})


def test_parts_of_texts_are_joined_and_others_refused() -> None:
    for kind in ("text", "input_text", "output_text"):
        more = {"cache_control": {"type": "ephemeral"}, "id": "p", "mystery": None}
        parts = [{"type": kind, "text": part, **more} for part in "ab"]
        assert chat({"role": "user", "content": parts}).prompt_input == [{"role": "user", "content": "ab"}]
    for kind in ("image_url", "refusal"):
        with pytest.raises(InvalidParameter, match=f"messages.0.content.1 is of type '{kind}', and this service reads"):
            chat({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]})


CONTINUED = {"continue_final_message": True}
ENDS: list[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = [
    ([USER], {}, {}),
    ([USER], {"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ([USER, ANSWER], {}, CONTINUED),
    ([USER, ANSWER], {"continue_final_message": False}, {}),
    ([USER, ANSWER], {"add_generation_prompt": True}, {}),
    ([USER, {"role": "assistant", "content": ""}], {}, {}),
    ([USER], {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
]


def test_the_last_message_is_continued_or_answered() -> None:
    for messages, values, expected in ENDS:
        request = chat(*messages, **values)
        assert request.template_options == expected
        assert len(request.prompt_input) == (1 if messages[-1]["content"] == "" else len(messages))
    with pytest.raises(UserError, match="omit add_generation_prompt"):
        chat(USER, ANSWER, continue_final_message=True, add_generation_prompt=True)
    for name in ("messages", "a b", ""):
        with pytest.raises(UserError, match="chat_template_kwargs"):
            chat(chat_template_kwargs={name: 1})


# --- many invalid values -----------------------------------------------------------------------------------------

MANY: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {"messages": [{}] * 5000}, "messages.0.role is missing: add it"),
    (chat, {"messages": [{"role": "user", "content": [{}] * 5000}]}, "messages.0.content must be a text"),
    (chat, {"messages": [USER] * 5000}, "messages: list should have at most 4096"),
    (text, {"prompt": [None] * 5000}, "prompt must be a text"),
    (text, {"stop": [None] * 5000}, "stop must be a text"),
    (text, {"prediction": {"type": "content", "content": [{}] * 5000}}, "prediction.content"),
]


def test_validation_ends_at_the_first_invalid_item() -> None:
    for make, values, sentence in MANY:
        with pytest.raises(UserError, match=f"^{sentence}") as refused:
            make(**values)
        cause = refused.value.__context__
        assert isinstance(cause, ValidationError) and cause.error_count() < 5
    keys = {f"k{i}": None for i in range(300)}
    for values in ({"messages": [keys]}, keys):
        with pytest.raises(UserError, match="an object has 30[02] keys: at most 256 are read") as refused:
            chat(**values)
        assert refused.value.__context__ is None  # before validation


# --- streams, prefixes, arbitrary bodies ------------------------------------------------------------------------------

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
