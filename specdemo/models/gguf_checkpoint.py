"""Loading of GGUF files: conversion of their settings, weights for the native engine or as ordinary ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isclose, prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdemo.core.errors import UserError, plain_text
from specdemo.core.events import Loading, ReportProgress, ignore_progress
from specdemo.models.engines.gguf_linear import FLOATS, GgufLinear, common_dtype, dequantised, keeps_values
from specdemo.models.engines.native import uses_native_engine
from specdemo.models.engines.native_matrix import FLOAT_FORMATS
from specdemo.models.gguf_file import GgufFile, GgufTensor, read_gguf_header
from specdemo.models.gguf_tokenizer import GUESSES, VOCABULARY_KEY, GgufTokenizer, read_gguf_tokenizer
from specdemo.models.hub import Hub
from specdemo.models.llama_checkpoint import LlamaConfig, LlamaForCausalLM, rotary_angles
from specdemo.models.spec import QUANTIZATIONS, SPREAD, ModelSpec, find_device
from specdemo.models.untrusted import check_model_config, check_tensors
from specdemo.native.interface import FORMATS, QUANTISED_GGUF, Format

_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_INTERLEAVED = ("llama", "mistral")  # order of the rotated values of a head
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ROTARY_FACTORS = "rope_freqs.weight"
_NEUTRAL: dict[str, tuple[float, ...]] = {  # keys that change what a model computes, with the values that do not
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1,),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_group_count", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale"), (0,)),
    "attention.output_scale": (0,),
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "rope_freqs": "rope_freqs",
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
_JOINED = (("q_proj", "k_proj"), ("gate_proj", "up_proj"))  # joined matrices have one type
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")


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
    if not file.tensors:
        raise file.refusal("it contains a vocabulary only, without a model")
    if _EMBEDDING not in file.tensors:
        raise file.refusal(f"the tensor {_EMBEDDING} is missing")
    rows, tokens = file.tensors[_EMBEDDING].shape[0], len(file.value(VOCABULARY_KEY, list))
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
    if kind not in _INTERLEAVED and _ROTARY_FACTORS in file.tensors:
        _refuse_key(file, _ROTARY_FACTORS, "in a model without such factors")


def _refuse_key(file: GgufFile, name: str, stored: object) -> NoReturn:
    shown = plain_text(str(stored), 40)
    raise UserError(f"{file.name} sets {name} ({shown}), which is not supported: choose another file")


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


def gguf_config(spec: ModelSpec, hub: Hub, report: ReportProgress = ignore_progress) -> LlamaConfig:
    if QUANTIZATIONS[spec.quantization].bits:
        raise UserError(
            f"{spec.name} is a GGUF file, which runs in its own format: choose quantization none, or another file"
        )
    if spec.device == SPREAD:
        raise UserError(f"{spec.name} is a GGUF file, which runs on a single device: choose cpu or cuda")
    settings = gguf_settings(spec.name, hub.weights(spec.name, spec.revision, report))
    config = LlamaConfig.from_dict(deepcopy(dict(settings.config)))
    _check_shapes(spec.name, config, settings.tensors)
    activation_bits(spec, settings.tensors)
    return config


def gguf_tokenizer(spec: ModelSpec, hub: Hub) -> PreTrainedTokenizerBase:
    settings = gguf_settings(spec.name, hub.weights(spec.name, spec.revision)).tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=settings.rules, **settings.options)


def activation_bits(spec: ModelSpec, tensors: Mapping[str, GgufTensor]) -> str:
    """Return the bits of the inputs of quantised weights. Raises `UserError` if 8 bits are chosen and not available."""
    if spec.activations == "16":
        return "16"
    reason = ""
    kinds = {tensor.kind for tensor in tensors.values()}
    if not kinds & {*QUANTISED_GGUF} or spec.dtype != "float32":
        reason = f"{spec.title} in {spec.dtype} has no matrices in {', '.join(QUANTISED_GGUF)}"
    elif not uses_native_engine(find_device(spec.device)):
        reason = f"the native engine does not run {spec.title} on {spec.device}"
    if reason and spec.activations == "8":
        raise UserError(f"8-bit activations are not available ({reason}): choose activations auto or 16")
    return "16" if reason else "8"


def _check_shapes(name: str, config: LlamaConfig, tensors: Mapping[str, GgufTensor]) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    wanted = {_stored_name(key): tuple(weight.shape) for key, weight in model.named_parameters()}
    factors = tensors.get(_ROTARY_FACTORS)
    if factors and (factors.shape, factors.kind) != ((config.head_dim // 2,), "F32"):
        wanted[_ROTARY_FACTORS] = (config.head_dim // 2,)
    wrong = {
        "missing_keys": wanted.keys() - tensors.keys(),
        "unexpected_keys": {key for key in tensors.keys() - wanted.keys() if not _IGNORED.fullmatch(key)},
        "mismatched_keys": [(key,) for key in wanted.keys() & tensors.keys() if tensors[key].shape != wanted[key]],
    }
    check_tensors(name, model, wrong, {})
    vectors = [key for key, shape in wanted.items() if len(shape) == 1 and tensors[key].kind not in FLOATS]
    if vectors:
        raise UserError(f"{vectors[0]} of {name} is {tensors[vectors[0]].kind}, not F32: choose another file")


def read_gguf(
    spec: ModelSpec, hub: Hub, report: ReportProgress = ignore_progress
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load a resolved spec: stored matrices for the native engine, otherwise weights."""
    config, path = gguf_config(spec, hub, report), hub.weights(spec.name, spec.revision)
    settings = gguf_settings(spec.name, path)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**settings.tokenizer.generation)
    spec = replace(spec, activations=activation_bits(spec, settings.tensors))
    note = _fill(model, spec, path, settings.tensors, report)
    tokenizer = gguf_tokenizer(spec, hub)
    model.note = ", ".join(filter(None, [note, *tokenizer.init_kwargs[GUESSES]]))
    model.activations = spec.activations
    return model.train(False).requires_grad_(False), tokenizer


def _stored_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    return f"blk.{layer[1]}.{_NAMES[layer[2]]}.{kind}" if layer else f"{_NAMES[module]}.{kind}"


def _joined_kinds(name: str, tensors: Mapping[str, GgufTensor]) -> set[str]:
    """Return the types of a matrix and of the matrices that are joined with it."""
    path, _, part = name.rpartition(".")
    parent, _, child = path.rpartition(".")
    names = next((group for group in _JOINED if child in group), (child,))
    return {tensors[_stored_name(f"{parent}.{other}.{part}".lstrip("."))].kind for other in names}


def gguf_bytes(spec: ModelSpec, hub: Hub) -> Counter[Format]:
    """Return the bytes of the weights of a GGUF file in memory by number format."""
    native, dtype = uses_native_engine(find_device(spec.device)), getattr(torch, spec.dtype)
    total: Counter[Format] = Counter()
    for tensor in gguf_settings(spec.name, hub.weights(spec.name, spec.revision)).tensors.values():
        rows, columns = prod(tensor.shape[:-1]), tensor.shape[-1]
        stored = common_dtype({tensor.kind}, dtype) if native else dtype
        form = FORMATS[tensor.kind] if stored is None else FLOAT_FORMATS[stored]
        total[form] += form.matrix_bytes(rows, columns, block=1)
    return total


def _fill(
    model: LlamaForCausalLM, spec: ModelSpec, path: Path, tensors: Mapping[str, GgufTensor], report: ReportProgress
) -> str:
    """Set the weights of a model on the meta device; return a note about their formats."""
    config, dtype = model.config, getattr(torch, spec.dtype)
    device = find_device(spec.device)
    native, data = uses_native_engine(device), np.memmap(path, np.uint8, "c")
    names = [name for name, _ in model.named_parameters()]
    kinds = {name: _joined_kinds(name, tensors) for name in names if len(tensors[_stored_name(name)].shape) > 1}
    dtypes = {name: common_dtype(kinds[name], dtype) if native else dtype for name in kinds}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    note, done = _note(kinds, dtypes, spec), 0

    def notify() -> None:
        nonlocal done
        done += 1
        text = f"reading {spec.title}, weight {done:,} of {len(kinds):,}"
        report(Loading(f"{text} ({note})" if note else text, done, len(kinds)))

    for name in names:
        module, _, part = name.rpartition(".")
        tensor = tensors[_stored_name(name)]
        rows = _bytes(data, tensor).view(tensor.shape[0], -1)
        if config.interleaved and (count := heads.get(module.rpartition(".")[2])):
            rows = rows.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        if name in kinds and native:
            linear = GgufLinear(tensor.kind, rows, tensor.shape[1], dtypes[name], notify, spec.activations == "8")
            model.set_submodule(module, linear)
            continue
        rows = rows.view(prod(tensor.shape[:-1]), -1)
        values = dequantised(tensor.kind, rows, tensor.shape[-1], dtypes.get(name) or dtype).view(tensor.shape)
        setattr(model.get_submodule(module), part, nn.Parameter(values.to(device), requires_grad=False))
        if name in kinds:
            notify()
    body, rope = model.model, config.rope_parameters
    if config.tie_word_embeddings and native:
        model.lm_head = body.embed_tokens
    elif config.tie_word_embeddings:
        model.lm_head.weight = body.embed_tokens.weight
    factors = rope.get("factor", 1.0)
    if _ROTARY_FACTORS in tensors:
        factors = _bytes(data, tensors[_ROTARY_FACTORS]).view(torch.float32).to(device, copy=True) * factors
    body.rotary_emb = rotary_angles(config.head_dim, rope["rope_theta"], factors)
    return note


def _bytes(data: np.memmap[Any, Any], tensor: GgufTensor) -> Tensor:
    return torch.from_numpy(data[tensor.start : tensor.start + tensor.nbytes])


def _note(kinds: Mapping[str, set[str]], dtypes: Mapping[str, torch.dtype | None], spec: ModelSpec) -> str:
    """Describe formats that are not read as they are, and 8-bit activations."""
    groups: dict[torch.dtype | None, set[str]] = {}
    for name, dtype in dtypes.items():
        if shown := {kind for kind in kinds[name] if dtype is None or not keeps_values(kind, dtype)}:
            groups.setdefault(dtype, set()).update(shown)
    notes = []
    for dtype, shown in sorted(groups.items(), key=str):
        suffix = f" expanded to {str(dtype).removeprefix('torch.')}" if dtype else ""
        notes.append(" and ".join(sorted(shown)) + suffix)
    narrow = f"{spec.activations}-bit activations, as llama.cpp"
    return ", ".join([*notes, narrow] if spec.activations == "8" else notes)
