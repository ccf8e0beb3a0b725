"""What a model will take, before any of its weights are read: weights as they will be kept, keys and values, the rest.

Weights are counted from the configuration (a model without weights) and, where a checkpoint is quantised already, from
the headers of its safetensors files. Bytes throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from specdemo.core.errors import UserError
from specdemo.models.engines.encoder_decoder import has_encoder
from specdemo.models.engines.llama import BLOCK as KEYS
from specdemo.models.engines.llama import CHUNK
from specdemo.models.engines.llama_weights import unsupported_reason
from specdemo.models.engines.packed_linear import can_pack
from specdemo.models.hub import Hub, Shapes
from specdemo.models.load import configuration, head_apart
from specdemo.models.load_errors import format_bytes
from specdemo.models.memory import free_bytes
from specdemo.models.quantization import BLOCK, kept_wide, quantised_layers, skeleton, stored_quantised, unavailable
from specdemo.models.spec import QUANTIZATIONS, SPREAD, ModelSpec, main_device
from specdemo.worker import ReportProgress, ignore_progress

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOATS = ("F32", "BF16", "F16")
STORED = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # bytes of a value; all else has 1
ROWS = 8  # of logits that a round holds: a draft of usual length
LAWS = 5  # copies of those in float32: processed, as a law, sorted, accumulated, drawn from
# How much of its activations a pass holds at once, how often a quantised layer's weight is there unpacked, and what
# stays of a run, was measured with `bench/room.py` on models of 2 to 300 million parameters.
AT_ONCE = {"float32": 1.2, "bfloat16": 2.0, "float16": 2.0}
AT_ONCE_INT8 = 3.0  # LLM.int8() goes by way of int32 and float32
UNPACKED = {8: 9, 4: 5}  # by bits
SETTLED = 5_000_000
COMPILED = {"float32": 480_000, "bfloat16": 230_000}  # by oneDNN, for a product of so many rows,
ROW_COUNTS = 8  # of which a run has about so many
SMALLER = ("bf16", "int8", "nf4")  # what is suggested, in this order


@dataclass(frozen=True)
class MemoryPlan:
    """What one model takes where. `loading`: the most that is held besides, and only while weights are read."""

    spec: ModelSpec
    context: int  # tokens
    parameters: int  # numbers, not bytes
    weights: int
    kv: int
    keeps_kv: bool  # between two runs: the buffer waits for the next request
    settled: int  # what stays beside them once it has run: masks, compiled kernels
    passing: int  # the most that a pass takes while it runs: activations, logits, masks
    loading: int

    @property
    def resting(self) -> int:
        """Between two runs."""
        return self.weights + self.kv * self.keeps_kv + self.settled

    @property
    def total(self) -> int:
        """While it runs."""
        return self.weights + self.kv + self.settled + self.passing

    @property
    def peak(self) -> int:
        """The most at any time."""
        return max(self.total, self.weights + self.loading)


def plan_spec(
    spec: ModelSpec, context: int, hub: Hub | None = None, tell: ReportProgress = ignore_progress
) -> MemoryPlan:
    """What `spec`, resolved, takes with room for `context` tokens.

    Fetches the configuration if need be. Raises `UserError` for what cannot be loaded at all.
    """
    hub = hub or Hub()
    config = configuration(spec, hub, tell)
    shapes = hub.shapes(spec.name, spec.revision) if stored_quantised(config) else None
    return plan_config(spec, config, context, shapes, head_apart(spec, hub))


def plan_config(
    spec: ModelSpec, config: PretrainedConfig, context: int, shapes: Shapes | None = None, apart: bool = False
) -> MemoryPlan:
    """The same from what is known; `shapes`: of the files, for a checkpoint that is quantised already.

    `apart`: the head is no copy of the embeddings (see `head_apart`).
    """
    model = skeleton(config, apart)
    lean = unsupported_reason(model) is None and spec.device != SPREAD
    text = config.get_text_config()
    width = WIDTH[spec.dtype]
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    room = _room(context, KEYS) if lean else max(context, 1)  # what is reserved and never written takes nothing
    rows = min(max(context, 1), CHUNK) if lean else max(context, 1)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    parts = _parts(model, spec) if shapes is None else _stored(model, spec, shapes)
    activations = rows * (4 * text.hidden_size + 2 * (heads + 2 * kv_heads) * head_dim + 3 * inner) * width
    if lean:
        activations += rows * heads // kv_heads * room * width  # the mask of a prompt's piece
    layers_read = config.get_text_config(decoder=True).num_hidden_layers
    if has_encoder(config):
        layers_read *= 2  # a decoder's own, and those of what the encoder read
    bits = QUANTIZATIONS[spec.quantization].bits
    share = AT_ONCE_INT8 if bits == 8 else AT_ONCE[spec.dtype]
    passing = int(activations * share) + ROWS * text.vocab_size * (width + 4 * LAWS)
    if bits:
        wide = max(width, 4) if spec.device == "cpu" else width  # what they are unpacked to
        largest = max((layer.weight.numel() for layer in quantised_layers(model).values()), default=0)
        passing += largest * wide * UNPACKED[bits]
    return MemoryPlan(
        spec,
        context,
        sum(weight.numel() for weight in model.parameters()),
        weights=sum(parts) + _copies(model, spec, lean),
        kv=2 * layers_read * kv_heads * head_dim * room * width,
        keeps_kv=lean,
        settled=_settled(model, spec) if spec.device == "cpu" else activations // 2,
        passing=passing,
        loading=_while_loading(model, spec, lean),
    )


def missing_bytes(plans: Sequence[MemoryPlan]) -> dict[str, tuple[int, int]]:
    """What these need together and what is free, for every device where that is too little."""
    needed: dict[str, int] = {}
    for one in plans:
        where = "all devices" if one.spec.device == SPREAD else one.spec.device
        needed[where] = needed.get(where, 0) + one.total
    for where in needed:
        here = [one for one in plans if one.spec.device == where]
        needed[where] += max((one.peak - one.total for one in here), default=0)  # they are loaded one after another
    return {where: (least, free) for where, least in needed.items() if least > (free := _free(where))}


def check_memory(plans: Sequence[MemoryPlan], suggest: Sequence[MemoryPlan] = ()) -> None:
    """Raise `UserError` with numbers where memory does not suffice; `suggest`: what would be tried instead."""
    for where, (needed, free) in missing_bytes(plans).items():
        heavy = max(plans, key=lambda one: one.total)
        for other in suggest:
            rest = sum(one.total for one in plans if one is not heavy)
            if other.peak + rest <= free:
                way = f"load it in {other.spec.quantization}, which needs {format_bytes(other.peak + rest)}"
                break
        else:
            way = "choose a smaller pair, or end what else takes memory"
        names = " and ".join(one.spec.title for one in plans)
        raise UserError(
            f"{names} need{'s' if len(plans) == 1 else ''} {format_bytes(needed)} on {where} (weights "
            f"{format_bytes(sum(one.weights for one in plans))}, keys and values {format_bytes(sum(one.kv for one in plans))}, working "
            f"space {format_bytes(sum(one.settled + one.passing for one in plans))}) and {format_bytes(free)} are free: {way}"
        )


def smaller(spec: ModelSpec) -> Iterator[ModelSpec]:
    """The same model in ways that take less, as far as they can be had here; `spec` is resolved."""
    own = SMALLER.index(spec.quantization) + 1 if spec.quantization in SMALLER else 0
    for name in SMALLER[own:]:
        if not unavailable(name, main_device(spec)) and not (name == "bf16" and WIDTH[spec.dtype] == 2):
            yield replace(spec, quantization=name, dtype="auto").resolved()


def _free(where: str) -> int:
    if where != "all devices":
        return free_bytes(torch.device(where))
    return free_bytes(torch.device("cpu")) + sum(
        free_bytes(torch.device("cuda", i)) for i in range(torch.cuda.device_count())
    )


def _room(context: int, first: int) -> int:
    """Positions that a cache which doubles from `first` has taken once it holds `context`."""
    room = first
    while room < context:
        room *= 2
    return room


def _parts(model: PreTrainedModel, spec: ModelSpec) -> Iterator[int]:
    """Bytes of each tensor as it is kept, tied ones once."""
    known, width = QUANTIZATIONS[spec.quantization], WIDTH[spec.dtype]
    layers = {id(layer.weight): layer for layer in quantised_layers(model).values()} if known.bits else {}
    for name, weight in model.named_parameters():
        layer = layers.get(id(weight))
        if layer is None:
            yield weight.numel() * (4 if spec.dtype == "float16" and kept_wide(model, name) else width)
        elif known.bits == 8:
            yield weight.numel() + 4 * weight.shape[0 if isinstance(layer, nn.Linear) else 1]
        else:
            blocks = weight.numel() // BLOCK
            yield weight.numel() // 2 + (blocks + blocks // BLOCK if known.double else 4 * blocks)


def _stored(model: PreTrainedModel, spec: ModelSpec, shapes: Shapes) -> Iterator[int]:
    """Bytes of each tensor of a checkpoint that is quantised already: what the model names itself is cast."""
    own = {name for name, _ in model.named_parameters()}
    for name, (dtype, shape) in shapes.items():
        cast = name in own and dtype in FLOATS
        yield prod(shape) * (WIDTH[spec.dtype] if cast else STORED.get(dtype, 1))


def _copies(model: PreTrainedModel, spec: ModelSpec, lean: bool) -> int:
    """Bytes of a tied head that is laid out, or has a norm's gain folded into it, on its own."""
    head, inner = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not inner.weight:
        return 0
    folds = lean and spec.dtype == "float32"
    return head.weight.numel() * WIDTH[spec.dtype] if _packs(spec) or folds else 0


def _packs(spec: ModelSpec) -> bool:
    return spec.device == "cpu" and can_pack(torch.empty(0, dtype=getattr(torch, spec.dtype)))


def _settled(model: PreTrainedModel, spec: ModelSpec) -> int:
    """What stays of a run on a CPU: the products that oneDNN has compiled, one for every shape, are most of it."""
    if not _packs(spec):
        return SETTLED
    return SETTLED + COMPILED[spec.dtype] * ROW_COUNTS * len({linear.weight.shape for linear in _plain(model, spec)})


def _while_loading(model: PreTrainedModel, spec: ModelSpec, lean: bool) -> int:
    """What is held besides, at worst: a matrix that is quantised or laid out anew, or what it is made from."""
    head, inner = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is inner.weight
    layers = _plain(model, spec)
    sizes = [linear.weight.numel() for linear in layers if linear is not head or not tied]
    if QUANTIZATIONS[spec.quantization].bits:
        sizes += [layer.weight.numel() for layer in quantised_layers(model).values()]
    elif not lean and not _packs(spec):
        sizes = []
    if lean and spec.dtype == "float32":  # a norm's gain is multiplied into what follows it
        sizes += [head.weight.numel()]
    if lean and not QUANTIZATIONS[spec.quantization].bits:  # two matrices are joined
        gated = model.model.layers[0].mlp
        joined = gated.gate_proj.weight.numel() + gated.up_proj.weight.numel()
        sizes += [joined * 2 if spec.dtype == "float32" else joined]
    return max(sizes, default=0) * WIDTH[spec.dtype]


def _plain(model: PreTrainedModel, spec: ModelSpec) -> list[nn.Linear]:
    """The linear layers that are not quantised."""
    taken = quantised_layers(model) if QUANTIZATIONS[spec.quantization].bits else ()
    return [module for name, module in model.named_modules() if type(module) is nn.Linear and name not in taken]
