"""Estimates of the memory that a model requires, in bytes, made before loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specdemo.core.errors import UserError
from specdemo.core.formats import format_bytes
from specdemo.models.cache_check import refuse_architecture
from specdemo.models.engines.cuda_graphs import PLANNED_ROWS, graph_bytes
from specdemo.models.engines.engine import doubled
from specdemo.models.engines.generic import has_encoder
from specdemo.models.engines.llama import PROMPT_CHUNK
from specdemo.models.engines.llama_weights import can_pack
from specdemo.models.engines.native import NATIVE_CHUNK, uses_native_engine
from specdemo.models.engines.native_cache import padded_dim
from specdemo.models.engines.native_families import transformers_reason, unchecked_parts
from specdemo.models.engines.native_matrix import FLOAT_FORMATS
from specdemo.models.engines.native_weights import kv_dtype, planned_bytes
from specdemo.models.gguf_checkpoint import stored_formats
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
from specdemo.native.formats import FORMATS, Format
from specdemo.worker import ReportProgress, ignore_progress

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
_LOGIT_ROWS = 8
_LOGIT_COPIES = 5  # float32 copies: processed, probs, sorted, cumulative, sampling
# `benchmarks/memory.py` of commit db6d280 measured these values on models of 2 to 300 million parameters.
_LIVE_SHARE = {"float32": 1.2, "bfloat16": 2.0, "float16": 2.0}
_LIVE_SHARE_INT8 = 3.0  # LLM.int8() computes via int32 and float32
_UNPACKED_COPIES = {8: 9, 4: 5}
_RETAINED = 5_000_000
ALL_DEVICES = "all devices"
_COMPILED_BYTES = {"float32": 480_000, "bfloat16": 230_000}  # bytes of a oneDNN kernel
_ROW_COUNTS = 8
_SMALLER_FORMATS = ("bf16", "int8", "nf4")


@dataclass(frozen=True)
class MemoryPlan:
    """Estimated bytes of a model, of its KV cache and of temporary memory."""

    spec: ModelSpec
    context: int  # number of tokens
    taps: int  # hidden states per position
    parameters: int
    weights: int
    kv: int  # keys, values and hidden states
    keeps_kv: bool  # True if a buffer is retained for the next request
    settled: int  # bytes of masks and compiled kernels that remain after a run
    passing: int  # temporary memory of a pass
    loading: int  # temporary memory of loading

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.settled + self.passing

    @property
    def peak(self) -> int:
        return max(self.total, self.weights + self.loading)


@converts_errors
def plan_spec(
    spec: ModelSpec, context: int, hub: Hub | None = None, report: ReportProgress = ignore_progress, taps: int = 0
) -> MemoryPlan:
    """Estimate the memory of a resolved spec with a cache of `context` tokens. Raises `UserError`."""
    hub = hub or Hub()
    config = read_config(spec, hub, report) or configuration(spec, hub, report)
    shapes = hub.shapes(spec.name, spec.revision) if stored_quantised(config) else None
    formats = stored_formats(spec, hub) if is_gguf(spec.name) else None
    return plan_config(spec, config, context, taps, shapes, head_apart(spec, hub), formats)


def plan_config(
    spec: ModelSpec,
    config: PretrainedConfig,
    context: int,
    taps: int = 0,
    shapes: TensorShapes | None = None,
    apart: bool = False,
    formats: Callable[[str], Format] | None = None,
) -> MemoryPlan:
    """Estimate memory; `shapes`: tensors of a quantized checkpoint; `formats`: number formats of a GGUF file by module.

    Raises `UserError` for an architecture that gives wrong logits.
    """
    model = skeleton(config, apart)
    fused = spec.device != SPREAD and transformers_reason(model, torch.device(spec.device)) is None
    native = fused and uses_native_engine(torch.device(spec.device))
    if not fused:
        refuse_architecture(type(model), config)
    planner = _Planner(spec, config, model, fused)
    weights, position, *working = planner.native(context, formats) if native else planner.torch(context, taps, shapes)
    kv = doubled(context) * (position + 4 * taps * planner.text.hidden_size)
    return MemoryPlan(spec, context, taps, sum(map(Tensor.numel, model.parameters())), weights, kv, fused, *working)


class _Planner:
    """Table of bytes of an engine: weights, position, settled, pass, loading."""

    def __init__(self, spec: ModelSpec, config: PretrainedConfig, model: PreTrainedModel, fused: bool) -> None:
        self.spec, self.config = spec, config
        self.model, self.fused = model, fused
        self.text, self.width = config.get_text_config(), _DTYPE_BYTES[spec.dtype]
        self.logit_bytes = _LOGIT_ROWS * self.text.vocab_size * 4 * _LOGIT_COPIES
        self.bits = QUANTIZATIONS[spec.quantization].bits
        if stored_quantised(config) is not None:
            stored = dict(config.quantization_config)
            self.bits = next((bits for bits in (4, 8) if stored.get(f"load_in_{bits}bit")), None)
        self.quantised = quantised_layers(model) if self.bits else {}
        self.linears = [
            module for name, module in model.named_modules() if type(module) is nn.Linear and name not in self.quantised
        ]
        self.head = model.get_output_embeddings()
        self.tied = self.head is not None and self.head.weight is model.get_input_embeddings().weight
        self.packs = spec.device == "cpu" and can_pack(torch.empty(0, dtype=getattr(torch, spec.dtype)))

    def row(self, hidden: int, queries: int, keys_and_values: int, inner: int) -> int:
        """Return the values of a row; arguments: number of buffers of each width."""
        counts = {_query_width: queries, _kv_width: keys_and_values, _inner_width: inner}
        layers = self.text.per_layer_config
        return hidden * self.text.hidden_size + sum(n * max(map(width, layers)) for width, n in counts.items())

    def native(self, context: int, formats: Callable[[str], Format] | None) -> tuple[int, ...]:
        stored = self.spec.dtype
        if str(getattr(self.config, "dtype", None)).removeprefix("torch.") in ("float16", "bfloat16"):
            stored = "bfloat16"  # the conversion is lossless
        coded, plain = FORMATS["INT8" if self.bits == 8 else "CODE4"], FLOAT_FORMATS[getattr(torch, stored)]
        choose = formats or (lambda name: coded if name in self.quantised else plain)
        names = {id(module): name for name, module in self.model.named_modules()}
        sizes = planned_bytes(unchecked_parts(self.model), self.head, lambda module: choose(names[id(module)]))
        values = self.config.num_hidden_layers * 2 * _kv_heads(self.config) * padded_dim(_head_dim(self.config))
        position = values * kv_dtype(getattr(torch, self.spec.dtype), sizes).itemsize
        passing = 4 * max(1, min(context, NATIVE_CHUNK)) * self.row(2, 3, 1, 1) + self.logit_bytes
        largest = max(map(Tensor.numel, self.model.parameters()))
        loading = 3 * largest * _DTYPE_BYTES[stored] + sizes[coded.name]  # both forms coexist
        return sizes.total(), position, _RETAINED, passing, loading

    def torch(self, context: int, taps: int, shapes: TensorShapes | None) -> tuple[int, ...]:
        spec, text = self.spec, self.text
        rows = max(1, min(context, PROMPT_CHUNK) if self.fused else context)
        activations = rows * (self.row(4, 2, 2, 3) + 3 * taps * text.hidden_size * (not self.fused))
        if self.fused:
            activations += rows * text.num_attention_heads // _kv_heads(text) * doubled(context)
        activations *= self.width
        settled = activations // 2
        if spec.device == "cpu":
            kernels = len({linear.weight.shape for linear in self.linears}) if self.packs else 0
            settled = _RETAINED + _COMPILED_BYTES.get(spec.dtype, 0) * _ROW_COUNTS * kernels
        elif self.fused and spec.device.startswith("cuda"):
            settled += graph_bytes(PLANNED_ROWS, text.vocab_size, self.width)
        weights = sum(self._weight_sizes() if shapes is None else self._stored_sizes(shapes))
        if self.tied and self.packs and not self.fused:
            weights += self.head.weight.numel() * self.width
        cached = sum(map(_kv_width, self.config.get_text_config(decoder=True).per_layer_config))
        position = (2 if has_encoder(self.config) else 1) * cached * self.width
        return weights, position, settled, self._pass_bytes(activations), self._loading_bytes()

    def _weight_sizes(self) -> Iterator[int]:
        spec = self.spec
        layers = {id(layer.weight): layer for layer in self.quantised.values()}
        for name, weight in self.model.named_parameters():
            layer = layers.get(id(weight))
            if layer is None:
                yield weight.numel() * (4 if spec.dtype == "float16" and kept_wide(self.model, name) else self.width)
            elif self.bits == 8:
                yield weight.numel() + 4 * weight.shape[0 if isinstance(layer, nn.Linear) else 1]
            else:
                yield weight.numel() // 2 + scale_bytes(weight.numel() // BLOCK_SIZE, spec.device)

    def _stored_sizes(self, shapes: TensorShapes) -> Iterator[int]:
        parameters = {name for name, _ in self.model.named_parameters()}
        for name, (dtype, shape) in shapes.items():
            cast = name in parameters and dtype in ("F32", "BF16", "F16")
            yield prod(shape) * (self.width if cast else _STORED_BYTES.get(dtype, 1))

    def _pass_bytes(self, activations: int) -> int:
        share = _LIVE_SHARE_INT8 if self.bits == 8 else _LIVE_SHARE[self.spec.dtype]
        total = int(activations * share) + self.logit_bytes + _LOGIT_ROWS * self.text.vocab_size * self.width
        if self.bits:
            unpacked_width = max(self.width, 4) if self.spec.device == "cpu" else self.width
            largest = max((layer.weight.numel() for layer in self.quantised.values()), default=0)
            total += largest * unpacked_width * _UNPACKED_COPIES[self.bits]
        return total

    def _loading_bytes(self) -> int:
        linears = self.linears if self.bits or self.fused or self.packs else []
        layers = [*(linear for linear in linears if not (linear is self.head and self.tied)), *self.quantised.values()]
        sizes = [layer.weight.numel() for layer in layers]
        if self.fused and not self.bits:
            gated = self.model.model.layers[0].mlp
            sizes += [gated.gate_proj.weight.numel() + gated.up_proj.weight.numel()]
        return max(sizes, default=0) * self.width


def _query_width(layer: PretrainedConfig) -> int:
    return layer.num_attention_heads * _head_dim(layer)


def _kv_width(layer: PretrainedConfig) -> int:
    if getattr(layer, "kv_lora_rank", None):  # keys are compressed and rotated
        return layer.kv_lora_rank + layer.qk_rope_head_dim
    return _kv_heads(layer) * (_head_dim(layer) + (getattr(layer, "v_head_dim", None) or _head_dim(layer)))


def _kv_heads(layer: PretrainedConfig) -> int:
    return getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads


def _head_dim(layer: PretrainedConfig) -> int:
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def _inner_width(layer: PretrainedConfig) -> int:
    width = getattr(layer, "intermediate_size", None) or getattr(layer, "n_inner", None) or 4 * layer.hidden_size
    return max(width) if isinstance(width, (list, tuple)) else width


def missing_bytes(plans: Sequence[MemoryPlan]) -> dict[str, tuple[int, int]]:
    """Return (required, free) bytes of devices with too little memory."""
    needed: dict[str, int] = {}
    for plan in plans:
        device = ALL_DEVICES if plan.spec.device == SPREAD else plan.spec.device
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
    if device != ALL_DEVICES:
        return free_bytes(torch.device(device))
    return free_bytes(torch.device("cpu")) + sum(
        free_bytes(torch.device("cuda", i)) for i in range(torch.cuda.device_count())
    )
