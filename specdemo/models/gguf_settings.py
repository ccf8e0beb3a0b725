"""Conversion of the settings of a GGUF file to the format of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isclose
from pathlib import Path
from typing import Any, NoReturn

from specdemo.core.errors import UserError, plain_text
from specdemo.models.gguf_file import GgufFile, GgufTensor, read_gguf_header
from specdemo.models.gguf_tokenizer import VOCABULARY_KEY, GgufTokenizer, read_gguf_tokenizer
from specdemo.models.untrusted import check_model_config

_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_INTERLEAVED = ("llama", "mistral")  # order of the rotated values of a head
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
ROTARY_FACTORS = "rope_freqs.weight"
_NEUTRAL: dict[str, tuple[float, ...]] = {  # keys that change what a model computes, with the values that do not
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1,),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_group_count", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale"), (0,)),
    "attention.output_scale": (0,),
}


@dataclass(frozen=True)
class GgufSettings:
    """Configuration and tokenizer of a file in the form of `transformers`, and its tensors."""

    config: Mapping[str, Any]
    tokenizer: GgufTokenizer
    tensors: Mapping[str, GgufTensor]


def gguf_settings(name: str, path: Path) -> GgufSettings:
    """Read the header of a file, again only after a change. Raises `UserError`."""
    state = path.stat()
    return _converted(name, path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=64)
def _converted(name: str, path: Path, size: int, changed: int) -> GgufSettings:
    file = read_gguf_header(name, path)
    config = _configuration(file)
    return GgufSettings(config, read_gguf_tokenizer(file), file.tensors)


def _configuration(file: GgufFile) -> dict[str, Any]:
    if file.value("split.count", int, 1) > 1:
        raise UserError(f"{file.name} is a part of a model: join the parts with llama-gguf-split --merge")
    if (content := file.value("general.type", str, "model")) != "model":
        raise file.refusal(f"it contains no model, but {plain_text(content, 40)!r}")
    kind = file.value("general.architecture", str)
    if kind not in _ARCHITECTURES:
        raise UserError(
            f"{file.name} contains a model of the architecture {plain_text(kind, 40)!r}, and GGUF files of "
            f"{', '.join(_ARCHITECTURES)} are supported: choose another file, or the safetensors checkpoint"
        )
    rows, tokens = _rows(file), len(file.value(VOCABULARY_KEY, list))
    if rows != tokens:
        raise file.refusal(f"its vocabulary has {tokens:,} tokens, and the model has {rows:,}")
    wide = any(tensor.kind == "F32" and len(tensor.shape) > 1 for tensor in file.tensors.values())
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": rows,
        **_sizes(file, kind),
        "rms_norm_eps": file.value(f"{kind}.attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "rope_parameters": _rope(file, kind),
        "interleaved": kind in _INTERLEAVED,
        "biased": [part[0] for part in ("q", "k", "v", "output") if f"blk.0.attn_{part}.bias" in file.tensors],
        "normed_heads": kind == "qwen3",
        "dtype": "float32" if wide else "bfloat16",
    }
    check_model_config(file.name, config)
    _check_computation(file, kind, config)
    return config


def _sizes(file: GgufFile, kind: str) -> dict[str, int]:
    layers = file.value(f"{kind}.block_count", int)

    def number(name: str, default: int | None = None) -> int:
        return file.value(f"{kind}.{name}", int, default)

    def of_layers(name: str, default: int | None = None) -> int:
        return file.value(f"{kind}.{name}", int, default, layers)

    width, heads = number("embedding_length"), of_layers("attention.head_count")
    head_dim, values = (number(f"attention.{name}_length", width // max(heads, 1)) for name in ("key", "value"))
    if values != head_dim:
        raise file.refusal(f"its heads have {head_dim:,} values in keys and {values:,} in values")
    if (rotated := number("rope.dimension_count", head_dim)) != head_dim:
        raise file.refusal(f"it rotates {rotated:,} of the {head_dim:,} values of a head")
    return {
        "hidden_size": width,
        "intermediate_size": of_layers("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": of_layers("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
    }


def _check_computation(file: GgufFile, kind: str, config: Mapping[str, Any]) -> None:
    """Raise `UserError` for keys that change the computation of a model."""
    neutral = {**_NEUTRAL, "attention.scale": (0, config["head_dim"] ** -0.5)}
    for name, values in neutral.items():
        stored = file.metadata.get(f"{kind}.{name}", values[0])
        for value in stored if isinstance(stored, list) else [stored]:
            if not (isinstance(value, (int, float)) and any(isclose(value, x, rel_tol=1e-6) for x in values)):
                _refuse_key(file, name, stored)
    window = file.value(f"{kind}.attention.sliding_window", int, 0, config["num_hidden_layers"])
    if 0 < window < config["max_position_embeddings"]:
        _refuse_key(file, "attention.sliding_window", window)
    if kind not in _INTERLEAVED and ROTARY_FACTORS in file.tensors:
        _refuse_key(file, ROTARY_FACTORS, "in a model without such factors")


def _refuse_key(file: GgufFile, name: str, stored: object) -> NoReturn:
    shown = plain_text(str(stored), 40)
    raise UserError(f"{file.name} sets {name} ({shown}), which is not supported: choose another file")


def _rows(file: GgufFile) -> int:
    if not file.tensors:
        raise file.refusal("it contains a vocabulary only, without a model")
    if _EMBEDDING not in file.tensors:
        raise file.refusal(f"the tensor {_EMBEDDING} is missing")
    return file.tensors[_EMBEDDING].shape[0]


def _rope(file: GgufFile, kind: str) -> dict[str, Any]:
    theta = file.value(f"{kind}.rope.freq_base", float, 10_000.0)
    scaling = file.value(f"{kind}.rope.scaling.type", str, "linear")
    legacy = file.value(f"{kind}.rope.scale_linear", float, 0.0)
    factor = file.value(f"{kind}.rope.scaling.factor", float, legacy) or 1.0
    if scaling == "none" or (factor == 1 and scaling in ("linear", "yarn")):
        return {"rope_type": "default", "rope_theta": theta}
    if scaling != "linear":
        raise UserError(
            f"{file.name} has a rotary embedding of kind {plain_text(scaling, 40)!r}, and none and linear are "
            "supported: choose another file, or the safetensors checkpoint"
        )
    return {"rope_type": scaling, "rope_theta": theta, "factor": factor}
