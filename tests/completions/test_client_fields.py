"""Fields of clients: neutral values change no option, others are refused by name, answers are accepted as they came."""

import json
from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError

from specdemo.completions.fields import SYNONYMS, InvalidParameter
from specdemo.completions.requests import ChatRequest, CompletionRequest, TextRequest, parse_request
from specdemo.core.errors import UserError

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
