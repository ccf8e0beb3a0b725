"""Estimate of the memory that a model requires, in bytes, made before loading.

The memory after a run is within 15 % of the estimate (table `memory` in docs/models.md). A run for which memory is not
sufficient ends with an out-of-memory error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specdemo.core.errors import UserError
from specdemo.core.events import ReportProgress, ignore_progress
from specdemo.core.formats import format_bytes
from specdemo.models.engines.engine import cache_capacity
from specdemo.models.engines.generic import has_encoder
from specdemo.models.engines.native import uses_native_engine
from specdemo.models.engines.native_weights import transformers_reason
from specdemo.models.gguf_checkpoint import gguf_bytes
from specdemo.models.hub import Hub
from specdemo.models.llama_checkpoint import read_config
from specdemo.models.load import configuration
from specdemo.models.memory import free_bytes
from specdemo.models.quantization import kept_wide, quantised_layers, skeleton, stored_bits
from specdemo.models.spec import QUANTIZATIONS, SPREAD, ModelSpec, is_gguf
from specdemo.models.untrusted import converts_errors
from specdemo.native.interface import Format

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_QUANTISED_BYTES = {8: 1.01, 4: 0.56}  # bytes per weight by bits, with scales
_RETAINED_BYTES, _CODE_BYTES = 2_000_000, 1_000_000  # buffers of any model, tables of quantised ones
_WORKING_SHARE = 0.15  # activations, compiled kernels, CUDA graphs
_LOGIT_BYTES = 8 * 5 * 4  # per token of the vocabulary: rows of a draft, copies of sampling, float32
ALL_DEVICES = "all devices"
PLANNED_CONTEXT = 1000  # tokens of a text whose memory is shown before a run


@dataclass(frozen=True)
class MemoryPlan:
    """Estimated bytes of a model, of its KV cache and of temporary memory."""

    spec: ModelSpec
    config: PretrainedConfig
    context: int  # number of tokens
    weights: int
    kv: int  # keys, values and hidden states
    retained: int  # buffers that remain after a run
    working: int  # temporary memory of loading and of passes
    native: bool  # computed by the native engine

    @property
    def device(self) -> str:
        return ALL_DEVICES if self.spec.device == SPREAD else self.spec.device

    @property
    def position(self) -> int:
        """Bytes of a token in the cache."""
        return self.kv // cache_capacity(self.context)

    @property
    def after_run(self) -> int:
        return self.weights + self.kv + self.retained

    @property
    def total(self) -> int:
        return self.after_run + self.working


@converts_errors
def plan_spec(
    spec: ModelSpec, context: int, hub: Hub | None = None, report: ReportProgress = ignore_progress, taps: int = 0
) -> MemoryPlan:
    """Estimate the memory of a resolved spec with a cache of `context` tokens. Raises `UserError`."""
    hub = hub or Hub()
    config = read_config(spec, hub, report) or configuration(spec, hub, report)
    return plan_config(spec, config, context, taps, gguf_bytes(spec, hub) if is_gguf(spec.name) else None)


def plan_config(
    spec: ModelSpec, config: PretrainedConfig, context: int, taps: int = 0, stored: Counter[Format] | None = None
) -> MemoryPlan:
    """Estimate memory. `stored`: bytes of the weights, if they do not follow from the configuration."""
    model, bits = skeleton(config), QUANTIZATIONS[spec.quantization].bits or stored_bits(config)
    device = torch.device("cpu" if spec.device == SPREAD else spec.device)
    native = spec.device != SPREAD and uses_native_engine(device) and transformers_reason(model, device) is None
    width = getattr(torch, spec.dtype).itemsize
    halved = str(getattr(config, "dtype", None)).removeprefix("torch.") in ("float16", "bfloat16")
    weights = stored.total() if stored else _weight_bytes(spec, model, bits, 2 if native and halved else width)
    coded = bits is not None or any(form.is_coded for form in stored or ())
    text = config.get_text_config(decoder=True)
    position = sum(map(_kv_values, text.per_layer_config)) * (2 if native and coded else width)
    position = position * (2 if has_encoder(config) else 1) + 4 * taps * text.hidden_size
    kv = cache_capacity(context) * position
    sizes = [weight.numel() for weight in model.parameters()]
    converted = sum(sizes) * bits // 8 if bits else max(sizes) * width
    working = int(_WORKING_SHARE * (weights + kv)) + text.vocab_size * _LOGIT_BYTES + converted
    retained = _RETAINED_BYTES + _CODE_BYTES * coded
    return MemoryPlan(spec, config, context, weights, kv, retained, working, native)


def _weight_bytes(spec: ModelSpec, model: PreTrainedModel, bits: int | None, width: int) -> int:
    quantised = {id(layer.weight) for layer in quantised_layers(model).values()} if bits else set()
    total = 0.0
    for name, weight in model.named_parameters():
        if bits and id(weight) in quantised:
            total += weight.numel() * _QUANTISED_BYTES[bits]
        else:
            wide = spec.dtype == "float16" and kept_wide(model, name)
            total += weight.numel() * (4 if wide else width)
    return int(total)


def _kv_values(layer: PretrainedConfig) -> int:
    """Return the values of keys and values of a position."""
    if getattr(layer, "kv_lora_rank", None):  # keys are compressed and rotated
        return layer.kv_lora_rank + layer.qk_rope_head_dim
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return heads * (head_dim + (getattr(layer, "v_head_dim", None) or head_dim))


def missing_bytes(plans: Sequence[MemoryPlan]) -> dict[str, tuple[int, int]]:
    """Return (required, free) bytes of devices with too little memory."""
    needed: dict[str, int] = {}
    for plan in plans:
        needed[plan.device] = needed.get(plan.device, 0) + plan.total
    return {device: (count, free) for device, count in needed.items() if count > (free := free_on(device))}


def check_memory(plans: Sequence[MemoryPlan]) -> None:
    """Raise `UserError` if memory is insufficient."""
    for device, (needed, free) in missing_bytes(plans).items():
        names = " and ".join(plan.spec.title for plan in plans)
        weights = sum(plan.weights for plan in plans)
        kv = sum(plan.kv for plan in plans)
        working = sum(plan.total for plan in plans) - weights - kv
        raise UserError(
            f"{names} need{'s' if len(plans) == 1 else ''} {format_bytes(needed)} on {device} (weights "
            f"{format_bytes(weights)}, keys and values {format_bytes(kv)}, working space {format_bytes(working)}) and "
            f"{format_bytes(free)} are free: choose a smaller pair or quantization, or close other programs"
        )


def free_on(device: str) -> int:
    """Return the free bytes of a device, or of `ALL_DEVICES`."""
    if device != ALL_DEVICES:
        return free_bytes(torch.device(device))
    return free_bytes(torch.device("cpu")) + sum(
        free_bytes(torch.device("cuda", i)) for i in range(torch.cuda.device_count())
    )
