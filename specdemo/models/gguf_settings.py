"""Conversion of the settings of a GGUF file to the format of `transformers`."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from specdemo.core.errors import UserError, check_temporary_folder, plain_text
from specdemo.models.gguf_file import GgufFile, GgufTensor, read_gguf_header
from specdemo.models.gguf_tokenizer import VOCABULARY_KEY, tokenizer_settings
from specdemo.models.model_sizes import ModelSizes

_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_OTHER_MODELS = (
    *("expert_count", "attention.scale", "attention.sliding_window", "logit_scale", "embedding_scale"),
    *("residual_scale", "attn_logit_softcapping", "final_logit_softcapping", "rope.scaling.attn_factor"),
)

_converting = Lock()


def settings_folder(name: str, path: Path) -> Path:
    """Return a directory, deleted at exit."""
    return Path(_converted_once(name, path)[0].name)


def stored_tensors(name: str, path: Path) -> dict[str, GgufTensor]:
    return _converted_once(name, path)[1]


def _converted_once(name: str, path: Path) -> tuple[TemporaryDirectory[str], dict[str, GgufTensor]]:
    state = path.stat()
    with _converting:  # a second directory would be deleted while it is read
        return _converted(name, path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=64)
def _converted(name: str, path: Path, size: int, changed: int) -> tuple[TemporaryDirectory[str], dict[str, GgufTensor]]:
    file = read_gguf_header(name, path)
    settings = {"config.json": _configuration(file), **tokenizer_settings(file)}
    check_temporary_folder()
    folder = TemporaryDirectory(prefix="specdemo-gguf-", ignore_cleanup_errors=True)
    for title, content in settings.items():
        (Path(folder.name) / title).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    return folder, file.tensors


def _configuration(file: GgufFile) -> dict[str, Any]:
    kind = file.value("general.architecture", str)
    if kind not in _ARCHITECTURES:
        raise UserError(
            f"{file.name} contains a model of the architecture {plain_text(kind, 40)!r}, and GGUF files of "
            f"{', '.join(_ARCHITECTURES)} are supported: choose another file, or the safetensors checkpoint"
        )
    if file.value("split.count", int, 1) > 1:
        raise UserError(f"{file.name} is a part of a model: join the parts with llama-gguf-split --merge")
    if unknown := [name for name in _OTHER_MODELS if file.metadata.get(f"{kind}.{name}")]:
        raise UserError(f"{file.name} sets {unknown[0]}, which is not supported: choose another file")

    rows, tokens = _rows(file), len(file.value(VOCABULARY_KEY, list))
    if rows != tokens:
        raise file.refusal(f"its vocabulary has {tokens:,} tokens, and the model has {rows:,}")
    sizes = _sizes(file, kind, rows)
    wide = any(tensor.kind == "F32" and len(tensor.shape) > 1 for tensor in file.tensors.values())
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": rows,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.positions,
        "rms_norm_eps": file.value(f"{kind}.attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "rope_parameters": _rope(file, kind),
        "interleaved": kind in ("llama", "mistral"),
        "biased": [part for part in ("q", "k", "v", "output") if f"blk.0.attn_{part}.bias" in file.tensors],
        "normed_heads": "blk.0.attn_q_norm.weight" in file.tensors,
        "dtype": "float32" if wide else "bfloat16",
    }


def _sizes(file: GgufFile, kind: str, rows: int) -> ModelSizes:
    def number(name: str, default: int | None = None) -> int:
        return file.value(f"{kind}.{name}", int, default)

    width, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", width // max(heads, 1))
    if (values := number("attention.value_length", head_dim)) != head_dim:
        raise file.refusal(f"attention.value_length is {values:,}, and its heads have {head_dim:,} values")
    sizes = ModelSizes(
        width=width,
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        rotated=number("rope.dimension_count", head_dim),
        rotates_whole_heads=True,
        inner=number("feed_forward_length"),
        layers=number("block_count"),
        vocab_size=rows,
        positions=number("context_length"),
    )
    sizes.check(file.name)
    return sizes


def _rows(file: GgufFile) -> int:
    if _EMBEDDING not in file.tensors:
        raise file.refusal(f"the tensor {_EMBEDDING} is missing")
    return file.tensors[_EMBEDDING].shape[0]


def _rope(file: GgufFile, kind: str) -> dict[str, Any]:
    theta = file.value(f"{kind}.rope.freq_base", float, 10_000.0)
    scaling = file.value(f"{kind}.rope.scaling.type", str, "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling != "linear":
        raise UserError(
            f"{file.name} has a rotary embedding of kind {plain_text(scaling, 40)!r}, and none and linear are "
            "supported: choose another file, or the safetensors checkpoint"
        )
    return {"rope_type": scaling, "rope_theta": theta, "factor": file.value(f"{kind}.rope.scaling.factor", float)}
