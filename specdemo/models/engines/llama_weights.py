"""Weights of the Llama family for torch, packed linear layers, and model variants."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdemo.core.errors import UserError
from specdemo.models.engines.engine import FusedWeights
from specdemo.models.engines.generic import has_encoder, has_window
from specdemo.models.engines.row_linear import can_join, float_linear, joined_outputs, kernels_missing
from specdemo.models.memory import is_mapped, weight_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        # oneDNN cannot pack bfloat16 on CPUs without AVX-512 or AVX-NE-CONVERT
        and (
            weight.dtype == torch.float32
            or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )
        and torch.backends.mkldnn.is_available()
        and platform.machine().lower() in ("x86_64", "amd64")
    )


class PackedLinear(nn.Module):
    """A frozen linear layer packed for oneDNN: `[..., in]` to `[..., out]`.

    `nn.Linear` repacks its weight for every product of several rows.
    """

    weight: Tensor | None = None  # T5 inspects this attribute

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.nbytes = weight.numel() * weight.element_size()
        # Packed weights are neither parameters nor buffers: they cannot be moved or saved.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = bias

    def forward(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(rows, self.packed, self.bias, "none", [], "")


def pack(model: nn.Module) -> None:
    """Pack linear layers except quantized layers (subclasses) and layers in another dtype, whose weight T5 inspects."""
    dtype = next(model.parameters()).dtype
    for name, child in list(model.named_modules()):
        if type(child) is nn.Linear and child.weight.dtype == dtype and can_pack(child.weight):
            model.set_submodule(name, PackedLinear(child.weight, child.bias))
            child.weight = None  # type: ignore[assignment]


def unpack(model: nn.Module) -> None:
    for name, child in list(model.named_modules()):
        if isinstance(child, PackedLinear):
            weight = child.packed.to_dense()
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.bias = child.bias  # type: ignore[assignment]
            model.set_submodule(name, linear)


LLAMA_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # angles depend only on the position

RowFunction = Callable[[Tensor], Tensor]


def is_spread(model: PreTrainedModel) -> bool:
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Return the limit of `LlamaWeights`, if any."""
    config = model.config
    if type(model).__name__ not in LLAMA_FAMILY:
        return f"{type(model).__name__} is not in {', '.join(LLAMA_FAMILY)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if has_window(model):
        return "it has a sliding window"
    if is_spread(model):
        return "it is spread over several devices"
    if (kind := config.rope_parameters["rope_type"]) not in ROPE_TYPES:
        return f"its rotary embedding is of kind {kind}"
    return None


@dataclass(frozen=True)
class LlamaLayer:
    """Functions of one layer on rows `[n, width]`."""

    input_norm: RowFunction
    qkv: RowFunction
    norm_heads: RowFunction | None  # norm of queries and keys `[n, heads, dim]`
    out: RowFunction
    mlp_norm: RowFunction
    gate_up: RowFunction
    down: RowFunction


class LlamaWeights(FusedWeights):
    """Fused weights for torch. Raises `ValueError` for an `unsupported_reason`."""

    def __init__(self, model: PreTrainedModel, consume: bool = False) -> None:
        """`consume`: release each matrix of `model` when joined."""
        if reason := unsupported_reason(model):
            raise ValueError(reason)
        super().__init__(model, model.model.rotary_emb)
        body = model.model
        self._parts: list[nn.Module | Tensor] = []
        self._last_variant: tuple[list[int], LlamaWeights] | None = None  # last variant, with its graphs
        self.graphs = True
        self.graph_failure = ""
        self._consume = consume
        self.embedding: Tensor = self._count(unmapped(body.embed_tokens.weight))
        for layer in body.layers:
            self.layers.append(self._layer(layer))
        self.final_norm = self._norm(body.norm)
        tied = model.lm_head.weight is body.embed_tokens.weight
        plain = type(model.lm_head) is nn.Linear
        self._output = self.embedding if tied else self._count(unmapped(model.lm_head.weight)) if plain else None
        self.lm_head = self._linear([model.lm_head]) if self._output is None else self._product(self._output)

    @property
    def recordable(self) -> bool:
        """True if passes can be CUDA graphs; LLM.int8() with a threshold synchronises with the host."""
        states = (getattr(module, "state", None) for module in self.modules())
        return self.device.type == "cuda" and not any(getattr(state, "threshold", 0) > 0 for state in states)

    def stop_recording(self, error: RuntimeError) -> None:
        self.graphs = False
        self.graph_failure = next(iter(str(error).splitlines()), type(error).__name__)

    def modules(self) -> list[nn.Module]:
        return [part for part in self._parts if isinstance(part, nn.Module)]

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(nn.ModuleList(self.modules())) + sum(
            part.numel() * part.element_size() for part in self._parts if isinstance(part, Tensor)
        )

    def with_layers(self, selected: Sequence[int]) -> LlamaWeights:
        if self._last_variant and self._last_variant[0] == list(selected):
            return self._last_variant[1]
        variant = super().with_layers(selected)
        if self.recordable:
            self._last_variant = list(selected), variant
            variant.temporary = False
        return variant

    def _variant(self) -> LlamaWeights:
        variant = super()._variant()
        variant._last_variant = None
        return variant

    def drop_variants(self) -> None:
        self._last_variant = None

    def embed(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.embedding)
        return rows if self.channel_scale is None else rows * self.channel_scale

    def embedding_rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def output_rows(self, ids: Tensor | None) -> Tensor:
        if self._output is None:
            raise UserError("the output matrix of the target is quantised: choose quantization none, or another method")
        return self._output if ids is None else F.embedding(ids, self._output)

    def rotation(self, token_positions: Tensor) -> Tensor:
        """Return cosines and signed sines for `apply_rope`, `[2, n, 1, dim]`."""
        cos, sin = self._angles(self.embedding, token_positions[None])
        sin[..., : self.head_dim // 2].neg_()
        return torch.cat((cos, sin))[:, :, None]

    def apply_rope(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate `heads` `[n, heads, dim]` in place (RoPE, 2104.09864)."""
        rotated = heads.roll(self.head_dim // 2, -1).mul_(sin)
        heads.mul_(cos).add_(rotated)

    def _count(self, part: Tensor) -> Tensor:
        self._parts.append(part)
        return part

    def _layer(self, layer: Any) -> LlamaLayer:
        attention, gated = layer.self_attn, layer.mlp
        norm_heads = None
        if hasattr(attention, "q_norm"):
            gains = [attention.q_norm.weight.expand(self.heads, -1), attention.k_norm.weight.expand(self.kv_heads, -1)]
            norm_heads = head_norm(torch.cat(gains), attention.q_norm.variance_epsilon)
        return LlamaLayer(
            self._norm(layer.input_layernorm),
            self._linear([attention.q_proj, attention.k_proj, attention.v_proj]),
            norm_heads,
            self._linear([attention.o_proj]),
            self._norm(layer.post_attention_layernorm),
            self._linear([gated.gate_proj, gated.up_proj]),
            self._linear([gated.down_proj]),
        )

    def _norm(self, norm: Any) -> RowFunction:
        return rms_norm(norm.variance_epsilon, self._count(unmapped(norm.weight)))

    def _linear(self, linears: list[Any]) -> RowFunction:
        if can_join(linears):
            matrix = joined_outputs(linears)
            if self._consume and len(linears) > 1:
                for linear in linears:
                    linear.release()
            self._parts.append(matrix)
            return matrix
        if any(type(linear) is not nn.Linear for linear in linears):
            self._parts.extend(linears)
            if len(linears) == 1:
                return linears[0]
            return lambda rows: torch.cat([linear(rows) for linear in linears], dim=-1)
        joined = len(linears) > 1
        weight = torch.cat([linear.weight for linear in linears]) if joined else unmapped(linears[0].weight)
        biases = [linear.bias for linear in linears]
        bias = None
        if any(part is not None for part in biases):
            sizes = [linear.out_features for linear in linears]
            parts = zip(biases, sizes, strict=True)
            bias = torch.cat([weight.new_zeros(size) if part is None else part for part, size in parts])
        if self._consume:
            for linear in linears:
                linear.weight = None
        self._count(weight)
        return self._product(weight, bias)

    def _product(self, weight: Tensor, bias: Tensor | None = None) -> RowFunction:
        if not kernels_missing(self.device, weight.dtype):
            return float_linear(weight, bias)
        return partial(F.linear, weight=weight, bias=bias)


def unmapped(weight: Tensor) -> Tensor:
    """Copy a memory-mapped weight, so that the file can be closed."""
    return weight.clone() if is_mapped(weight) else weight


def rms_norm(eps: float, gain: Tensor) -> RowFunction:
    """RMSNorm (1910.07467) with the rounding of `transformers`: the gain is applied in the model's dtype."""
    return lambda rows: F.rms_norm(rows, rows.shape[-1:], None, eps).mul_(gain)  # the norm is one kernel on CUDA


def head_norm(gain: Tensor, eps: float) -> RowFunction:
    """RMSNorm of query and key heads, which have a row in `gain`, not of value heads."""
    norm, count = rms_norm(eps, gain), len(gain)
    return lambda rows: torch.cat((norm(rows[:, :count]), rows[:, count:]), 1)


def layer_count(model: PreTrainedModel | FusedWeights) -> int:
    return model.config.get_text_config().num_hidden_layers


def with_layers(model: PreTrainedModel | FusedWeights, selected: Sequence[int]) -> PreTrainedModel | FusedWeights:
    """Return the model restricted to the layers `selected`, sharing all weights.

    Raises `UserError` for invalid layers and encoder-decoders. `transformers` models need layer 0, which counts cached
    positions.
    """
    if has_encoder(model.config):
        raise UserError(
            f"{type(model).__name__} has an encoder, and self-speculation is for decoders: choose method nasd"
        )
    count = layer_count(model)
    if not selected or not set(selected) < set(range(count)):
        raise UserError(f"self-speculation needs a proper subset of layers 0 to {count - 1}, not {list(selected)}")
    if isinstance(model, FusedWeights):
        return model.with_layers(selected)
    if 0 not in selected:
        raise UserError(f"{type(model).__name__} cannot omit layer 0: include it")
    return _with_layers(model, selected, count)


def _with_layers(model: Any, selected: Sequence[int], count: int) -> Any:
    variant = copy.copy(model)
    variant._modules = dict(model._modules)
    for name, child in model._modules.items():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            variant._modules[name] = nn.ModuleList([child[i] for i in selected])
            return variant
    for name, child in model._modules.items():
        if child is not None and any(
            isinstance(inner, nn.ModuleList) and len(inner) == count for inner in child.modules()
        ):
            variant._modules[name] = _with_layers(child, selected, count)
            return variant
    raise UserError(f"{type(model).__name__} has no list of {count} layers: choose another method")


def with_dropout(model: PreTrainedModel | FusedWeights, seed: int, share: float = 0.1) -> FusedWeights:
    """Apply a dropout mask to the embedding channels, equal for all positions (1512.05287, section 4)."""
    if not isinstance(model, FusedWeights):
        raise UserError(f"dropout needs a drafter of the Llama family, not {type(model).__name__}: gate by entropy")
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(model.width, generator=generator, dtype=torch.float32) >= share
    return model.with_channel_scale(mask.float() / (1 - share))
