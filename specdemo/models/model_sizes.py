"""Limits of the configurations of supported families, and contradictions between their sizes.

They are checked before anything is built. The limits exceed those of all published models. With them, sizes and their
sums in C are below 2^31.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdemo.core.errors import UserError, plain_text

MAX_INT32 = (1 << 31) - 1
MAX_HEADS, MAX_HEAD_DIM = 4_096, 4_096
MAX_HEADS_WIDTH = 1 << 18
_MAX_TOKEN_IDS = 1_000
_SMALLEST_FLOAT = 1e-38

_ROTATES_WHOLE_HEADS = ("llama", "mistral", "qwen2", "qwen3", "gemma2")  # names of model types
FAMILIES = (*_ROTATES_WHOLE_HEADS, "gpt2", "gpt_neox", "t5")

# All names that `transformers` accepts for a value
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_HEAD_DIM = ("head_dim", "d_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_POSITIVE = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "rotary_emb_base", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "factor", "attention_factor", "low_freq_factor"),
    *("high_freq_factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
)
_LIMITS: tuple[tuple[tuple[str, ...], float, float], ...] = (  # names, least and largest value; integers are whole
    (_LAYERS, 1, 1_000),
    ((*_HEADS, "num_key_value_heads"), 1, MAX_HEADS),
    (_HEAD_DIM, 1, MAX_HEAD_DIM),
    (_WIDTH, 1, 65_536),
    (("intermediate_size", "n_inner", "d_ff"), 1, 1 << 20),
    (("vocab_size",), 1, 4_000_000),
    (("max_position_embeddings", "n_positions", "n_ctx", "num_labels"), 1, 1 << 24),
    (("sliding_window",), 0, MAX_INT32),
    (_POSITIVE, _SMALLEST_FLOAT, 1 / _SMALLEST_FLOAT),
    (("partial_rotary_factor", "rotary_pct"), _SMALLEST_FLOAT, 1),
)
_TOKEN_IDS = ("bos", "eos", "pad", "sep", "decoder_start", "forced_bos", "forced_eos")


def check_model_config(label: str, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` for the first value of a configuration that is invalid or contradicts others."""
    check_special_tokens(label, settings)
    ropes = [settings.get(name) for name in ("rope_parameters", "rope_scaling")]
    if not all(rope is None or isinstance(rope, dict) for rope in ropes):
        raise UserError(f"{label} has a rotary embedding that is no object: choose another model")
    for part in (settings, *filter(None, ropes)):
        for names, least, most in _LIMITS:
            kinds = (int,) if isinstance(least, int) else (int, float)
            for name in names:
                value = part.get(name)
                if value is not None and not (type(value) in kinds and least <= value <= most):
                    reason = f"{name} is {shown(value)}, not a number from {least:,} to {most:,}"
                    raise UserError(f"{label} is invalid ({reason}): choose another model")
    if problem := next(_contradictions(settings), ""):
        raise UserError(f"{label} {problem}: choose another model")


def check_special_tokens(label: str, settings: Mapping[str, Any]) -> None:
    for name in (f"{name}_token_id" for name in _TOKEN_IDS):
        value = settings.get(name)
        ids = value if isinstance(value, list) else [value]
        if value is not None and not (
            len(ids) <= _MAX_TOKEN_IDS and all(type(token) is int and -100 <= token <= MAX_INT32 for token in ids)
        ):
            raise UserError(f"{label} is invalid ({name} is {shown(value)}, not a token id): choose another model")


def _first(settings: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((settings[name] for name in names if settings.get(name)), None)


def _contradictions(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield contradictions between sizes."""
    width, heads = _first(settings, _WIDTH), _first(settings, _HEADS)
    dim = _first(settings, _HEAD_DIM)
    kind = settings.get("model_type")
    if dim is None and width and heads:
        dim = width // heads
    if heads and dim and heads * dim > MAX_HEADS_WIDTH:
        yield f"has {heads:,} heads of {dim:,} values, together more than {MAX_HEADS_WIDTH:,}"
    rotated = _rotated(settings, dim) if dim else None
    if rotated is None:
        return
    if rotated < 2 or rotated % 2:
        yield f"rotates {rotated:,} values of a head, not an even number from 2"
    if kind in _ROTATES_WHOLE_HEADS and rotated != dim:
        yield f"rotates {rotated:,} of the {dim:,} values of a head, and its architecture rotates all"


def _rotated(settings: Mapping[str, Any], head_dim: int) -> int | None:
    """Return the rotated values of a head as computed by `transformers`."""
    rope, kind = settings.get("rope_scaling") or settings.get("rope_parameters") or {}, settings.get("model_type")
    share = rope.get("partial_rotary_factor")
    if kind == "gpt_neox":
        return int(head_dim * (share or settings.get("rotary_pct") or 0.25))
    if kind not in _ROTATES_WHOLE_HEADS:
        return None
    if (rope.get("rope_type") or rope.get("type") or "default") == "default":
        return head_dim
    return int(head_dim * (share or settings.get("partial_rotary_factor") or 1))


def shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return plain_text(repr(value), 40)
