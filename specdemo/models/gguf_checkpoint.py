"""Loading of GGUF files into the native engine or as ordinary weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdemo.core.errors import UserError
from specdemo.core.events import Loading, ReportProgress, ignore_progress
from specdemo.models.engines.gguf_linear import FLOATS, GgufLinear, common_dtype, dequantised, keeps_values
from specdemo.models.engines.native import uses_native_engine
from specdemo.models.engines.native_matrix import FLOAT_FORMATS
from specdemo.models.gguf_file import GgufTensor
from specdemo.models.gguf_settings import ROTARY_FACTORS, gguf_settings
from specdemo.models.gguf_tokenizer import GUESSES
from specdemo.models.hub import Hub
from specdemo.models.llama_checkpoint import LlamaConfig, LlamaForCausalLM, rotary_angles
from specdemo.models.spec import QUANTIZATIONS, SPREAD, ModelSpec, find_device
from specdemo.models.untrusted import check_tensors
from specdemo.native.interface import FORMATS, QUANTISED_GGUF, Format

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
    factors = tensors.get(ROTARY_FACTORS)
    if factors and (factors.shape, factors.kind) != ((config.head_dim // 2,), "F32"):
        wanted[ROTARY_FACTORS] = (config.head_dim // 2,)
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
    """Return the types of a matrix and of those that are joined with it."""
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
    note, done = _note(kinds, dtypes, spec), 0

    def notify() -> None:
        nonlocal done
        done += 1
        text = f"reading {spec.title}, weight {done:,} of {len(kinds):,}"
        report(Loading(f"{text} ({note})" if note else text, done, len(kinds)))

    for name in names:
        module, _, part = name.rpartition(".")
        tensor = tensors[_stored_name(name)]
        rows = _ordered(config, module, _bytes(data, tensor).view(tensor.shape[0], -1))
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
    if ROTARY_FACTORS in tensors:
        factors = _bytes(data, tensors[ROTARY_FACTORS]).view(torch.float32).to(device, copy=True) * factors
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


def _ordered(config: LlamaConfig, module: str, rows: Tensor) -> Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(module.rpartition(".")[2])
    if not (config.interleaved and count):
        return rows
    return rows.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
