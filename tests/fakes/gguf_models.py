"""GGUF files of tiny models, written like the converter of llama.cpp."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from fakes.tiny_models import CONFIGS, byte_level_tokenizer

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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    others = dict(tensors or {})
    for name, weight in model.state_dict().items():
        stored = names.get_name(name, (".weight", ".bias"))
        array = others.pop(stored, weight.float().numpy())
        if (tied and name == "lm_head.weight") or array is None:
            continue
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
    for name, array in others.items():
        if array is not None:
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
    if isinstance(value, np.ndarray):
        value = list(value)
    kind = GGUFValueType.get_type(value)
    is_unsigned = kind == GGUFValueType.INT32 and value >= 0
    writer.add_key_value(key, value, GGUFValueType.UINT32 if is_unsigned else kind)


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
    tokenizer = byte_level_tokenizer()
    write_gguf(path, tiny_for_gguf(architecture, tokenizer, width=width_for(kind)), tokenizer, kind, **options)
    return path


SPREADS = {"Q4_K": 257, "Q6_K": 1365}  # standard deviations of random blocks with the scale 1


def quantize(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantise values, or return random blocks of the same spread for types that the package gguf only decodes."""
    if kind.name not in SPREADS:
        return gguf.quantize(values, kind)
    count, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(zlib.crc32(values.tobytes()))
    blocks = random.integers(0, 256, (values.size // count, size), np.uint8)
    scale = np.float16(values.std() / SPREADS[kind.name])
    if kind.name == "Q4_K":
        minimum = 7.5 * scale  # the mean of the values is 0
        blocks[:, :4] = np.array([scale, minimum], np.float16).view(np.uint8)
    else:
        blocks[:, -2:] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)
