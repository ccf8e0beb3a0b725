"""Estimates of the memory that a model requires, in bytes, made before loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from specdemo.core.errors import UserError
from specdemo.core.formats import format_bytes
from specdemo.models.cache_check import refuse_architecture
from specdemo.models.engines.cuda_graphs import graph_bytes
from specdemo.models.engines.generic import has_encoder
from specdemo.models.engines.llama import KEY_BLOCK, PROMPT_CHUNK
from specdemo.models.engines.llama_weights import can_pack
from specdemo.models.engines.native import FIRST_CAPACITY, NATIVE_CHUNK, kv_dtype, uses_native_engine
from specdemo.models.engines.native_families import transformers_reason, unchecked_parts
from specdemo.models.engines.native_matrix import FLOAT_FORMATS
from specdemo.models.engines.native_weights import planned_bytes
from specdemo.models.gguf_checkpoint import native_bytes
from specdemo.models.hub import Hub, TensorShapes
from specdemo.models.llama_checkpoint import read_config
from specdemo.models.load import configuration, head_apart
from specdemo.models.memory import free_bytes
from specdemo.models.quantization import (
    BLOCK_SIZE,
    kept_wide,
    quantised_layers,
    scale_bytes,
    skeleton,
    stored_quantised,
    unavailable,
)
from specdemo.models.spec import QUANTIZATIONS, SPREAD, ModelSpec, is_gguf, main_device
from specdemo.models.untrusted import converts_errors
from specdemo.native.formats import FORMATS
from specdemo.worker import ReportProgress, ignore_progress

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
_LOGIT_ROWS = 8
_LOGIT_COPIES = 5  # float32 copies: processed, probs, sorted, cumulative, sampling
# `benchmarks/memory.py` measured these values on models of 2 to 300 million parameters.
_LIVE_SHARE = {"float32": 1.2, "bfloat16": 2.0, "float16": 2.0}
_LIVE_SHARE_INT8 = 3.0  # LLM.int8() computes via int32 and float32
_UNPACKED_COPIES = {8: 9, 4: 5}
_RETAINED = 5_000_000
_COMPILED_BYTES = {"float32": 480_000, "bfloat16": 230_000}  # bytes of a oneDNN kernel
_ROW_COUNTS = 8
_SMALLER_FORMATS = ("bf16", "int8", "nf4")


@dataclass(frozen=True)
class MemoryPlan:
    """Estimated bytes of a model, of its KV cache and of temporary memory."""

    spec: ModelSpec
    context: int  # number of tokens
    parameters: int
    weights: int
    kv: int
    keeps_kv: bool  # True if a buffer is retained for the next request
    settled: int  # bytes of masks and compiled kernels that remain after a run
    passing: int  # temporary memory of a pass
    loading: int  # temporary memory of loading

    @property
    def resting(self) -> int:
        return self.weights + self.kv * self.keeps_kv + self.settled

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.settled + self.passing

    @property
    def peak(self) -> int:
        return max(self.total, self.weights + self.loading)


@converts_errors
def plan_spec(
    spec: ModelSpec, context: int, hub: Hub | None = None, report: ReportProgress = ignore_progress
) -> MemoryPlan:
    """Estimate the memory of a resolved spec with a KV cache of `context` tokens. Raises `UserError`."""
    hub = hub or Hub()
    config = read_config(spec, hub, report) or configuration(spec, hub, report)
    shapes = hub.shapes(spec.name, spec.revision) if stored_quantised(config) else None
    plan = plan_config(spec, config, context, shapes, head_apart(spec, hub))
    if is_gguf(spec.name) and uses_native_engine(torch.device(spec.device)):
        plan = replace(plan, weights=native_bytes(spec, hub))
    return plan


def plan_config(
    spec: ModelSpec, config: PretrainedConfig, context: int, shapes: TensorShapes | None = None, apart: bool = False
) -> MemoryPlan:
    """Estimate memory. `shapes`: tensors of a quantized checkpoint; `apart`: see `head_apart`.

    Raises `UserError` for an architecture that gives wrong logits.
    """
    model = skeleton(config, apart)
    lean = spec.device != SPREAD and transformers_reason(model, torch.device(spec.device)) is None
    if lean and uses_native_engine(torch.device(spec.device)):
        return _plan_native(spec, config, context, model, _stored_bits(spec, config))
    if not lean:
        refuse_architecture(type(model), config)
    text = config.get_text_config()
    width = _DTYPE_BYTES[spec.dtype]
    layers = list(text.per_layer_config)
    queries, keys_and_values = (max(map(widths, layers)) for widths in (_query_width, _kv_width))
    capacity = _doubled(context, KEY_BLOCK) if lean else max(context, 1)
    rows = min(max(context, 1), PROMPT_CHUNK) if lean else max(context, 1)
    inner = max(map(_inner_width, layers))
    weights = _weight_sizes(model, spec) if shapes is None else _stored_sizes(model, spec, shapes)
    activations = rows * (4 * text.hidden_size + 2 * (queries + keys_and_values) + 3 * inner) * width
    if lean:
        activations += rows * text.num_attention_heads // text.num_key_value_heads * capacity * width
    settled = _retained(model, spec) if spec.device == "cpu" else activations // 2
    if lean and spec.device.startswith("cuda"):
        settled += graph_bytes(text.vocab_size, width)
    cached = sum(map(_kv_width, config.get_text_config(decoder=True).per_layer_config))
    if has_encoder(config):
        cached *= 2
    return MemoryPlan(
        spec,
        context,
        sum(weight.numel() for weight in model.parameters()),
        weights=sum(weights) + _head_copy(model, spec, lean),
        kv=cached * capacity * width,
        keeps_kv=lean,
        settled=settled,
        passing=_pass_bytes(model, spec, activations, text.vocab_size),
        loading=_loading_bytes(model, spec, lean),
    )


def _stored_bits(spec: ModelSpec, config: PretrainedConfig) -> int | None:
    if stored_quantised(config) is None:
        return QUANTIZATIONS[spec.quantization].bits
    settings = config.quantization_config
    return next((bits for bits in (4, 8) if dict(settings).get(f"load_in_{bits}bit")), None)


def _plan_native(
    spec: ModelSpec, config: PretrainedConfig, context: int, model: PreTrainedModel, bits: int | None
) -> MemoryPlan:
    layers = {id(layer) for layer in quantised_layers(model).values()} if bits else set()
    stored = spec.dtype
    if str(getattr(config, "dtype", None)).removeprefix("torch.") in ("float16", "bfloat16"):
        stored = "bfloat16"  # the conversion is lossless
    coded, plain = FORMATS["INT8" if bits == 8 else "CODE4"], FLOAT_FORMATS[getattr(torch, stored)]
    sizes = planned_bytes(
        unchecked_parts(model), model.get_output_embeddings(), lambda linear: coded if id(linear) in layers else plain
    )
    largest = max(weight.numel() for weight in model.parameters())
    capacity, rows = _doubled(context, FIRST_CAPACITY), min(max(context, 1), NATIVE_CHUNK)
    queries, keys_and_values = _query_width(config), _kv_width(config)
    activations = 2 * config.hidden_size + 3 * queries + keys_and_values + _inner_width(config)
    return MemoryPlan(
        spec,
        context,
        sum(weight.numel() for weight in model.parameters()),
        weights=sizes.total(),
        kv=config.num_hidden_layers * keys_and_values * capacity * kv_dtype(getattr(torch, spec.dtype)).itemsize,
        keeps_kv=True,
        settled=_RETAINED,
        passing=4 * rows * activations + _LOGIT_ROWS * config.vocab_size * 4 * _LOGIT_COPIES,
        loading=3 * largest * _DTYPE_BYTES[stored] + sizes[coded.name],  # both forms coexist
    )


def _query_width(layer: PretrainedConfig) -> int:
    return layer.num_attention_heads * _head_dim(layer)


def _kv_width(layer: PretrainedConfig) -> int:
    if getattr(layer, "kv_lora_rank", None):  # keys are compressed and rotated
        return layer.kv_lora_rank + layer.qk_rope_head_dim
    kv_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return kv_heads * (_head_dim(layer) + (getattr(layer, "v_head_dim", None) or _head_dim(layer)))


def _head_dim(layer: PretrainedConfig) -> int:
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def _inner_width(layer: PretrainedConfig) -> int:
    width = getattr(layer, "intermediate_size", None) or getattr(layer, "n_inner", None) or 4 * layer.hidden_size
    return max(width) if isinstance(width, (list, tuple)) else width


def missing_bytes(plans: Sequence[MemoryPlan]) -> dict[str, tuple[int, int]]:
    """Return (required, free) bytes of devices with too little memory."""
    needed: dict[str, int] = {}
    for plan in plans:
        device = "all devices" if plan.spec.device == SPREAD else plan.spec.device
        needed[device] = needed.get(device, 0) + plan.total
    for device in needed:  # models are loaded one after another
        needed[device] += max((plan.peak - plan.total for plan in plans if plan.spec.device == device), default=0)
    return {device: (count, free) for device, count in needed.items() if count > (free := _free(device))}


def check_memory(plans: Sequence[MemoryPlan], suggest: Sequence[MemoryPlan] = ()) -> None:
    """Raise `UserError` if memory is insufficient. `suggest`: smaller alternatives."""
    for device, (needed, free) in missing_bytes(plans).items():
        largest = max(plans, key=lambda plan: plan.total)
        rest = sum(plan.total for plan in plans if plan is not largest)
        remedy = next(
            (
                f"load it in {other.spec.quantization}, which needs {format_bytes(other.peak + rest)}"
                for other in suggest
                if other.peak + rest <= free
            ),
            "choose a smaller pair, or close other programs",
        )
        names = " and ".join(plan.spec.title for plan in plans)
        weights, kv = sum(plan.weights for plan in plans), sum(plan.kv for plan in plans)
        working = sum(plan.settled + plan.passing for plan in plans)
        raise UserError(
            f"{names} need{'s' if len(plans) == 1 else ''} {format_bytes(needed)} on {device} (weights "
            f"{format_bytes(weights)}, keys and values {format_bytes(kv)}, working space {format_bytes(working)}) and "
            f"{format_bytes(free)} are free: {remedy}"
        )


def smaller(spec: ModelSpec) -> Iterator[ModelSpec]:
    first = _SMALLER_FORMATS.index(spec.quantization) + 1 if spec.quantization in _SMALLER_FORMATS else 0
    for name in _SMALLER_FORMATS[first:]:
        if is_gguf(spec.name) and QUANTIZATIONS[name].bits:
            continue
        if not unavailable(name, main_device(spec)) and not (name == "bf16" and _DTYPE_BYTES[spec.dtype] == 2):
            yield replace(spec, quantization=name, dtype="auto").resolved()


def _free(device: str) -> int:
    if device != "all devices":
        return free_bytes(torch.device(device))
    return free_bytes(torch.device("cpu")) + sum(
        free_bytes(torch.device("cuda", i)) for i in range(torch.cuda.device_count())
    )


def _doubled(context: int, first: int) -> int:
    capacity = first
    while capacity < context:
        capacity *= 2
    return capacity


def _weight_sizes(model: PreTrainedModel, spec: ModelSpec) -> Iterator[int]:
    quantization, width = QUANTIZATIONS[spec.quantization], _DTYPE_BYTES[spec.dtype]
    layers = {id(layer.weight): layer for layer in quantised_layers(model).values()} if quantization.bits else {}
    for name, weight in model.named_parameters():
        layer = layers.get(id(weight))
        if layer is None:
            yield weight.numel() * (4 if spec.dtype == "float16" and kept_wide(model, name) else width)
        elif quantization.bits == 8:
            yield weight.numel() + 4 * weight.shape[0 if isinstance(layer, nn.Linear) else 1]
        else:
            yield weight.numel() // 2 + scale_bytes(weight.numel() // BLOCK_SIZE, quantization.double, spec.device)


def _stored_sizes(model: PreTrainedModel, spec: ModelSpec, shapes: TensorShapes) -> Iterator[int]:
    parameters = {name for name, _ in model.named_parameters()}
    for name, (dtype, shape) in shapes.items():
        cast = name in parameters and dtype in ("F32", "BF16", "F16")
        yield prod(shape) * (_DTYPE_BYTES[spec.dtype] if cast else _STORED_BYTES.get(dtype, 1))


def _head_copy(model: PreTrainedModel, spec: ModelSpec, lean: bool) -> int:
    head, inner = model.get_output_embeddings(), model.get_input_embeddings()
    copied = not lean and _packs(spec) and head is not None and head.weight is inner.weight
    return head.weight.numel() * _DTYPE_BYTES[spec.dtype] if copied else 0


def _packs(spec: ModelSpec) -> bool:
    return spec.device == "cpu" and can_pack(torch.empty(0, dtype=getattr(torch, spec.dtype)))


def _pass_bytes(model: PreTrainedModel, spec: ModelSpec, activations: int, vocab_size: int) -> int:
    width, bits = _DTYPE_BYTES[spec.dtype], QUANTIZATIONS[spec.quantization].bits
    share = _LIVE_SHARE_INT8 if bits == 8 else _LIVE_SHARE[spec.dtype]
    total = int(activations * share) + _LOGIT_ROWS * vocab_size * (width + 4 * _LOGIT_COPIES)
    if bits:
        unpacked_width = max(width, 4) if spec.device == "cpu" else width
        largest = max((layer.weight.numel() for layer in quantised_layers(model).values()), default=0)
        total += largest * unpacked_width * _UNPACKED_COPIES[bits]
    return total


def _retained(model: PreTrainedModel, spec: ModelSpec) -> int:
    if not _packs(spec):
        return _RETAINED
    shapes = {linear.weight.shape for linear in _unquantized_linears(model, spec)}
    return _RETAINED + _COMPILED_BYTES[spec.dtype] * _ROW_COUNTS * len(shapes)


def _loading_bytes(model: PreTrainedModel, spec: ModelSpec, lean: bool) -> int:
    head, inner = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is inner.weight
    sizes = [linear.weight.numel() for linear in _unquantized_linears(model, spec) if linear is not head or not tied]
    if QUANTIZATIONS[spec.quantization].bits:
        sizes += [layer.weight.numel() for layer in quantised_layers(model).values()]
    elif not lean and not _packs(spec):
        sizes = []
    if lean and not QUANTIZATIONS[spec.quantization].bits:
        gated = model.model.layers[0].mlp
        sizes += [gated.gate_proj.weight.numel() + gated.up_proj.weight.numel()]
    return max(sizes, default=0) * _DTYPE_BYTES[spec.dtype]


def _unquantized_linears(model: PreTrainedModel, spec: ModelSpec) -> list[nn.Linear]:
    quantized = quantised_layers(model) if QUANTIZATIONS[spec.quantization].bits else ()
    return [module for name, module in model.named_modules() if type(module) is nn.Linear and name not in quantized]
