"""Fields that clients send and this service does not implement, with the values that change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from specdemo.core.errors import UserError


class InvalidParameter(UserError):
    """Invalid value of a parameter of the request."""

    def __init__(
        self, sentence: str, parameter: str | None = None, status: int = 400, code: str = "invalid_value"
    ) -> None:
        super().__init__(sentence)
        self.parameter = parameter
        self.status = status
        self.code = code


def parameter_error(name: str, problem: str) -> PydanticCustomError:
    """Return the error of a validator about field `name` of the validated object."""
    return PydanticCustomError("parameter", "{problem}", {"name": name, "problem": problem})


@dataclass(frozen=True)
class Neutral:
    """Values that change nothing, besides null, and what to do instead of sending others."""

    words: str
    accepts: Callable[[Any], bool]
    remedy: str = "omit it"


def equal_in_json(value: Any, other: Any) -> bool:
    """Compare values of JSON: 1 equals 1.0, but not true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def neutral_values(*values: Any, remedy: str = "omit it") -> Neutral:
    words = ", ".join(map(json.dumps, values)) or "null only"
    return Neutral(words, lambda given: any(equal_in_json(given, value) for value in values), remedy)


def _is_empty(value: Any) -> bool:
    return isinstance(value, (str, list, dict)) and not value


def _is_bias_of_zero(value: Any) -> bool:
    pairs = value.items() if isinstance(value, dict) else value if isinstance(value, list) else [(0, value)]
    return _is_empty(value) or all(
        isinstance(p, (list, tuple)) and len(p) == 2 and equal_in_json(p[1], 0) for p in pairs
    )


def _is_own_order(value: Any) -> bool:
    if not isinstance(value, list) or any(value.count(name) != 1 for name in ("temperature", "top_k", "top_p")):
        return False
    return bool(value.index("temperature") < value.index("top_p"))


ANY = Neutral("every value", lambda _: True)
EMPTY = Neutral("empty", _is_empty)
OFF, OFF_OR_MINUS_1 = neutral_values(0, False), neutral_values(0, False, -1)
ONE = neutral_values(1)
NO_TOOLS = Neutral("empty", _is_empty, "omit it, and describe functions in the text")
FREE_TEXT = Neutral("empty text or list", lambda value: value in ("", []), "omit it: texts are not constrained")
_THINKING = "set an option of the template with chat_template_kwargs"

_SHARED: tuple[tuple[str, Neutral], ...] = (  # names, separated by spaces
    (
        "user metadata safety_identifier prompt_cache_key prompt_cache_retention request_id rid cache_salt chat_id "
        "session_id id title api_type api_server legacy_api keep_alive ttl",
        ANY,
    ),
    (
        "cache_prompt n_cache_reuse n_keep n_discard parallel_tool_calls include_reasoning stream_reasoning "
        "spaces_between_special_tokens usage speculative.n_max speculative.n_min speculative.p_min",
        ANY,
    ),
    (  # parameters of what is off
        "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold smoothing_curve "
        "dynatemp_exponent dynatemp_low dynatemp_high dynatemp_min dynatemp_max mirostat_tau mirostat_eta "
        "adaptive_decay repeat_last_n penalty_last_n penalize_nl penalty_prompt rep_pen_slope length_penalty "
        "early_stopping negative_prompt",
        ANY,
    ),
    (
        "presence_penalty frequency_penalty top_a dry_multiplier xtc_probability smoothing_factor mirostat "
        "mirostat_mode dynatemp_range dynamic_temperature epsilon_cutoff eta_cutoff penalty_alpha skew min_tokens "
        "min_length min_new_tokens min_keep no_repeat_ngram_size n_probs n_indent max_tokens_second "
        "prompt_lookup_num_tokens priority",
        OFF,
    ),
    (
        "top_n_sigma nsigma adaptive_target repetition_penalty_range rep_pen_range t_max_predict_ms t_max_prompt_ms",
        OFF_OR_MINUS_1,
    ),
    ("repeat_penalty", neutral_values(1, remedy="set repetition_penalty, which counts the whole text")),
    ("tfs tfs_z typical_p encoder_repetition_penalty guidance_scale cfg_scale", ONE),
    ("n best_of num_return_sequences num_beams num_beam_groups", neutral_values(1, remedy="send a request per answer")),
    (
        "use_beam_search ignore_eos ban_eos_token include_stop_str_in_output no_stop_trim temperature_last "
        "auto_max_new_tokens speculative_ngram timings_per_token return_progress return_tokens post_sampling_probs "
        "return_tokens_as_token_ids return_hidden_states store separate_reasoning parse_tool_calls",
        neutral_values(False),
    ),
    ("do_sample", neutral_values(True, remedy="set temperature to 0 for greedy texts")),
    ("skip_special_tokens detokenize", neutral_values(True)),
    ("id_slot slot_id", neutral_values(-1, remedy="omit it: conversations find their caches by content")),
    ("truncate_prompt_tokens", neutral_values(-1, remedy="shorten the prompt: it is never truncated")),
    ("logit_bias", Neutral("empty, biases of 0", _is_bias_of_zero)),
    (
        "samplers sampler_priority",
        Neutral("lists with temperature before top_p", _is_own_order, "omit it: temperature precedes top_k and top_p"),
    ),
    ("sampler_order custom_token_bans banned_strings banned_tokens bad_words allowed_token_ids", EMPTY),
    ("stop_token_ids stop_regex", Neutral("empty", _is_empty, "set stop, which lists texts")),
    ("tools functions", NO_TOOLS),
    ("tool_choice function_call", neutral_values("none", "auto", remedy="omit it, and describe functions in the text")),
    ("response_format", neutral_values({"type": "text"}, remedy="omit it: texts are not constrained")),
    ("format grammar grammar_string guided_grammar guided_regex guided_choice regex ebnf", FREE_TEXT),
    (
        "json_schema guided_json structured_outputs web_search_options",
        neutral_values(remedy="omit it: texts are not constrained"),
    ),
    ("modalities", neutral_values(["text"], remedy="omit it: answers are texts")),
    ("service_tier", neutral_values("auto", "default")),
    ("reasoning_effort reasoning enable_thinking thinking think", Neutral("empty", _is_empty, _THINKING)),
    ("reasoning_format", neutral_values("none")),
    ("verbosity", neutral_values("medium")),
    (
        "files tool_ids features variables documents image_data images lora response_fields logits_processors "
        "vllm_xargs kv_transfer_params mm_processor_kwargs extra_body extra_headers extra_query transforms models "
        "plugins provider options chat_template",
        EMPTY,
    ),
)
_TEXT: tuple[tuple[str, Neutral], ...] = (
    ("suffix", neutral_values("", remedy="omit it: texts are continued at their end")),
    ("add_special_tokens add_bos_token", neutral_values(True, remedy="send token ids")),
)
_CHAT: tuple[tuple[str, Neutral], ...] = (
    (
        "add_special_tokens continue_",
        neutral_values(False, remedy="set add_generation_prompt and continue_final_message"),
    ),
    ("mode", neutral_values("instruct")),
)
_MESSAGE: tuple[tuple[str, Neutral], ...] = (
    ("name id index timestamp metadata options annotations", ANY),
    ("logprobs finish_reason stop_reason token_ids", ANY),
    ("tool_calls function_call", NO_TOOLS),
    (
        "refusal audio reasoning reasoning_content reasoning_details thinking_blocks provider_specific_fields parsed "
        "images files additional_kwargs tool_call_id",
        EMPTY,
    ),
    ("prefix", neutral_values(False, remedy="set continue_final_message")),
)
_PART: tuple[tuple[str, Neutral], ...] = (("cache_control annotations logprobs id index extras", ANY),)

_SUPPORTED: tuple[tuple[str, Neutral], ...] = (
    ("stop prediction stream_options chat_template_kwargs", EMPTY),
    ("seed", neutral_values(-1)),
    ("truncation_length", neutral_values(0, -1)),
    ("logprobs", neutral_values(False)),
)

TABLES: Mapping[str, tuple[tuple[str, Neutral], ...]] = {
    "bodies": _SHARED,
    "supported": _SUPPORTED,
    "/v1/completions": _TEXT,
    "/v1/chat/completions": _CHAT,
    "messages": _MESSAGE,
    "parts": _PART,
}
_OPTIONAL = [row for _, row in _SUPPORTED]
_NEUTRAL = {place: {name: row for names, row in rows for name in names.split()} for place, rows in TABLES.items()}
SYNONYMS: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "sampler_seed": "seed",
    "rep_pen": "repetition_penalty",
    "typical": "typical_p",
    "stopping_strings": "stop",
    "stop_sequence": "stop",
    "num_ctx": "truncation_length",
    "n_ctx": "truncation_length",
    "max_context_length": "truncation_length",
}


def fields_with_effect(values: Mapping[str, Any], *places: str) -> dict[str, Any]:
    """Return the fields with an effect. Raises `parameter_error` for fields that are known and not supported."""
    effects = {}
    for name, value in values.items():
        rows = [_NEUTRAL[place][name] for place in places if name in _NEUTRAL[place]]
        if any(row.accepts(value) for row in rows):
            continue
        if rows and rows[0] not in _OPTIONAL:
            raise parameter_error(name, f"is not supported: {rows[0].remedy}")
        effects[name] = value
    return effects


def rename_synonyms(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename synonyms. Raises `parameter_error` for synonyms with different values."""
    renamed: dict[str, Any] = {}
    for given, value in values.items():
        name = SYNONYMS.get(given, given)
        if name in renamed and not equal_in_json(renamed[name], value):
            raise parameter_error(given, f"is another {name}: give either {name} or {given}")
        renamed[name] = value
    return renamed
