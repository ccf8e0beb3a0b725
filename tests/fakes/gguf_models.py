"""GGUF files of tiny models, written like the converter of llama.cpp."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from fakes.tiny_models import CONFIGS, byte_level_tokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PRE = {"llama": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2"}


def width_for(kind: str | Mapping[str, str]) -> int:
    return 256 if isinstance(kind, str) and kind.endswith("K") else 64


def tiny_for_gguf(
    architecture: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0, width: int = 64, **changes: Any
) -> PreTrainedModel:
    """Random model with wide rows, biases where the architecture has some, and clearly different distributions."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 256,
        "head_dim": width // 4,
    }
    settings = {**CONFIGS[architecture].to_dict(), **sizes, "vocab_size": len(tokenizer), **changes}
    model = AutoModelForCausalLM.from_config(type(CONFIGS[architecture])(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def stored_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def paired(values: np.ndarray, heads: int) -> np.ndarray:
    """Order of rotated components in llama.cpp."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    kind: str | Mapping[str, str] = "F32",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a model; return its dequantised weights under the names of `transformers`.

    `kind`: type of all matrices, or types by GGUF name with "" as the default; `metadata`: other values, None deletes;
    `tensors`: other float32 tensors, None deletes.
    """
    config, architecture = model.config, model.config.model_type
    writer = GGUFWriter(path, architecture)
    values = {**described(config), **vocabulary(tokenizer, PRE[architecture]), **(metadata or {})}
    for key, value in values.items():
        add(writer, key.replace("{arch}", architecture), value)
    kinds = {"": kind} if isinstance(kind, str) else kind
    weights = {}
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        stored = stored_name(name)
        if (tied and name == "lm_head.weight") or (tensors or {}).get(stored, 0) is None:
            continue
        array = (tensors or {}).get(stored, weight.float().numpy())
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        count = heads.get(stored.split(".")[-2]) if architecture == "llama" else None
        array = paired(array, count) if count else array
        qtype = GGMLQuantizationType[(kinds.get(stored) or kinds[""]) if array.ndim > 1 else "F32"]
        data = quantize(np.ascontiguousarray(array), qtype)
        writer.add_tensor(stored, data, raw_dtype=qtype)
        restored = gguf.dequantize(data, qtype).reshape(array.shape)
        if count:
            restored = restored.reshape(count, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        weights[name] = torch.from_numpy(restored.copy())
    for name, array in (tensors or {}).items():
        if array is not None and name not in map(stored_name, model.state_dict()):
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, (list, np.ndarray)):
        writer.add_array(key, list(value))
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def described(config: Any) -> dict[str, Any]:
    return {
        "{arch}.context_length": config.max_position_embeddings,
        "{arch}.embedding_length": config.hidden_size,
        "{arch}.block_count": config.num_hidden_layers,
        "{arch}.feed_forward_length": config.intermediate_size,
        "{arch}.attention.head_count": config.num_attention_heads,
        "{arch}.attention.head_count_kv": config.num_key_value_heads,
        "{arch}.attention.key_length": config.head_dim,
        "{arch}.attention.value_length": config.head_dim,
        "{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def vocabulary(tokenizer: PreTrainedTokenizerFast, pre: str) -> dict[str, Any]:
    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    special, tokens = set(tokenizer.all_special_ids), tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    sentence_piece = state["byte_fallback"]
    types = [
        TokenType.CONTROL if i in special else TokenType.BYTE if token.startswith("<0x") else TokenType.NORMAL
        for i, token in enumerate(tokens)
    ]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["merges"]]
    ranks = {merge.replace(" ", ""): -float(i + 1) for i, merge in enumerate(merges)}
    scores = {"tokenizer.ggml.scores": [ranks.get(token, -1e6) for token in tokens]}
    return {
        "tokenizer.ggml.model": "llama" if sentence_piece else "gpt2",
        "tokenizer.ggml.pre": "default" if sentence_piece else pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        **(scores if sentence_piece else {"tokenizer.ggml.merges": merges}),
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.unknown_token_id": tokenizer.unk_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def save_gguf(path: Path, architecture: str = "llama", kind: str | Mapping[str, str] = "F32", **options: Any) -> Path:
    """Write a random model with the tokenizer of the tests."""
    tokenizer = byte_level_tokenizer()
    write_gguf(path, tiny_for_gguf(architecture, tokenizer, width=width_for(kind)), tokenizer, kind, **options)
    return path


# --- quantisation to Q4_K and Q6_K; the package gguf only decodes them ---


def quantize(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind.name == "Q4_K":
        return _q4_k(values.reshape(-1, 8, 32)).reshape(*values.shape[:-1], -1)
    if kind.name == "Q6_K":
        return _q6_k(values.reshape(-1, 16, 16)).reshape(*values.shape[:-1], -1)
    return gguf.quantize(values, kind)


def _factor(numbers: np.ndarray, limit: int) -> np.ndarray:
    return (np.abs(numbers).max(1, keepdims=True) / limit).astype(np.float16)


def _q4_k(groups: np.ndarray) -> np.ndarray:
    minima = np.maximum(-groups.min(2), 0)
    steps = (groups.max(2) + minima) / 15
    factors = _factor(steps, 63), _factor(minima, 63)
    scale, minimum = (
        (x / d.astype(np.float32)).round().astype(np.uint8) for x, d in zip((steps, minima), factors, strict=True)
    )
    step, offset = (q * d.astype(np.float32) for q, d in zip((scale, minimum), factors, strict=True))
    codes = ((groups + offset[..., None]) / step[..., None]).round().clip(0, 15).astype(np.uint8)
    data = codes[:, ::2] | codes[:, 1::2] << 4
    packed = (
        scale[:, :4] | scale[:, 4:] >> 4 << 6,
        minimum[:, :4] | minimum[:, 4:] >> 4 << 6,
        scale[:, 4:] & 15 | minimum[:, 4:] << 4,
    )
    return np.concatenate([*(d.view(np.uint8) for d in factors), *packed, data.reshape(len(data), -1)], 1)


def _q6_k(groups: np.ndarray) -> np.ndarray:
    steps = np.abs(groups).max(2) / 31
    factor = _factor(steps, 127)
    scale = (steps / factor.astype(np.float32)).round().astype(np.int8)
    step = scale * factor.astype(np.float32)
    codes = ((groups / step[..., None]).round().clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate((codes[:, :, 0] & 15 | codes[:, :, 2] << 4, codes[:, :, 1] & 15 | codes[:, :, 3] << 4), -1)
    high = sum(codes[:, :, i] >> 4 << 2 * i for i in range(4))
    parts = (low, high, scale.view(np.uint8), factor.view(np.uint8))
    return np.concatenate([part.reshape(len(codes), -1) for part in parts], 1)
