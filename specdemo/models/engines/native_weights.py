"""Conversion of weights for the native CPU engine, from architectures that are reduced to common parts."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdemo.core.errors import UserError
from specdemo.models.engines.engine import FusedWeights
from specdemo.models.engines.llama_weights import LLAMA_FAMILY, ROPE_TYPES, is_spread, unsupported_reason
from specdemo.models.engines.native import NativeModel, array_of_addresses
from specdemo.models.engines.native_matrix import NativeMatrix, format_of
from specdemo.models.memory import LargePageBuffer
from specdemo.native.build import NativeUnavailable, native_library
from specdemo.native.interface import CONSTANTS, LayerStruct

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ACTIVATIONS = {
    "silu": CONSTANTS["SILU"],
    "gelu_new": CONSTANTS["GELU_TANH"],
    "gelu_pytorch_tanh": CONSTANTS["GELU_TANH"],
    "gelu": CONSTANTS["GELU_ERF"],
}


@dataclass(frozen=True)
class LayerParts:
    """Modules and settings of a decoder layer."""

    qkv: Sequence[nn.Module]
    out: nn.Module
    gate_up: Sequence[nn.Module]  # only up if there is no gate
    down: nn.Module
    norms: Mapping[str, nn.Module]
    scale: float
    window: int | None = None
    order: Tensor | None = None  # order of the outputs of `qkv`


@dataclass(frozen=True)
class ModelParts:
    """Modules and settings of a decoder."""

    embedding: nn.Module
    layers: Sequence[LayerParts]
    final_norm: nn.Module
    inner: int
    activation: str
    epsilon: float
    angles: Any = None
    positions: nn.Module | None = None
    embedding_scale: float = 1.0
    gain_offset: float = 0.0
    parallel: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None


def _llama(model: Any) -> ModelParts:
    body, config = model.model, model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = config.sliding_window if config.model_type == "mistral" else None
    names = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return ModelParts(
        body.embed_tokens,
        [_gated_layer(layer, names, head_dim**-0.5, window) for layer in body.layers],
        body.norm,
        config.intermediate_size,
        config.hidden_act,
        body.norm.variance_epsilon,
        body.rotary_emb,
    )


def _gated_layer(layer: Any, names: Mapping[str, str], scale: float, window: int | None = None) -> LayerParts:
    """Return the parts of a layer with separate projections; `names`: modules of the norms around its parts."""
    attention, gated = layer.self_attn, layer.mlp
    norms = {norm: getattr(layer, name) for norm, name in names.items()}
    if hasattr(attention, "q_norm"):
        norms |= {"query_norm": attention.q_norm, "key_norm": attention.k_norm}
    return LayerParts(
        [attention.q_proj, attention.k_proj, attention.v_proj],
        attention.o_proj,
        [gated.gate_proj, gated.up_proj],
        gated.down_proj,
        norms,
        getattr(attention, "scaling", None) or scale,
        getattr(attention, "sliding_window", window),
    )


def _gemma2(model: Any) -> ModelParts:
    body, config = model.model, model.config
    names = {
        "input_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }
    return ModelParts(
        body.embed_tokens,
        [_gated_layer(layer, names, config.query_pre_attn_scalar**-0.5) for layer in body.layers],
        body.norm,
        config.intermediate_size,
        config.hidden_activation,
        body.norm.eps,
        body.rotary_emb,
        embedding_scale=torch.tensor(config.hidden_size**0.5).to(model.dtype).item(),
        gain_offset=1.0,
        attention_cap=config.attn_logit_softcapping,
        logit_cap=config.final_logit_softcapping,
    )


def _gpt2(model: Any) -> ModelParts:
    body, config = model.transformer, model.config
    return ModelParts(
        body.wte,
        [
            LayerParts(
                [layer.attn.c_attn],
                layer.attn.c_proj,
                [layer.mlp.c_fc],
                layer.mlp.c_proj,
                {"input_norm": layer.ln_1, "mlp_norm": layer.ln_2},
                layer.attn.scaling,
            )
            for layer in body.h
        ],
        body.ln_f,
        config.n_inner or 4 * config.n_embd,
        config.activation_function,
        body.ln_f.eps,
        positions=body.wpe,
    )


def _gpt_neox(model: Any) -> ModelParts:
    body, config = model.gpt_neox, model.config
    outputs = torch.arange(3 * config.hidden_size).unflatten(0, (config.num_attention_heads, 3, -1))
    return ModelParts(
        body.embed_in,
        [
            LayerParts(
                [layer.attention.query_key_value],
                layer.attention.dense,
                [layer.mlp.dense_h_to_4h],
                layer.mlp.dense_4h_to_h,
                {"input_norm": layer.input_layernorm, "mlp_norm": layer.post_attention_layernorm},
                layer.attention.scaling,
                order=outputs.transpose(0, 1).flatten(),
            )
            for layer in body.layers
        ],
        body.final_layer_norm,
        config.intermediate_size,
        config.hidden_act,
        body.final_layer_norm.eps,
        body.rotary_emb,
        parallel=config.use_parallel_residual,
    )


_FAMILIES: dict[str, Callable[[Any], ModelParts]] = {
    **dict.fromkeys(LLAMA_FAMILY, _llama),
    "GPT2LMHeadModel": _gpt2,
    "GPTNeoXForCausalLM": _gpt_neox,
    "Gemma2ForCausalLM": _gemma2,
}


def model_parts(model: PreTrainedModel) -> ModelParts:
    """Return the parts of a model with tensors of checked shapes (`untrusted.check_tensors`). Raises `UserError`."""
    name = type(model).__name__
    parts = _FAMILIES[name](model)
    if any(layer.window == 0 for layer in parts.layers):
        raise UserError(f"{name} has a window of 0 positions: choose another model")
    return parts


def transformers_reason(model: PreTrainedModel, device: torch.device) -> str | None:
    name = type(model).__name__
    if name not in _FAMILIES or device.type != "cpu" or is_spread(model):
        return unsupported_reason(model)
    if not isinstance(library := native_library(), NativeUnavailable):
        return _limit(model.config)
    return unsupported_reason(model) if name in LLAMA_FAMILY else f"no native engine, {library}"


def _limit(config: PretrainedConfig) -> str | None:
    names = ("activation_function", "hidden_activation", "hidden_act")
    activation = next(getattr(config, name) for name in names if hasattr(config, name))
    if activation not in ACTIVATIONS:
        return f"its activation is {activation}, not {', '.join(ACTIVATIONS)}"
    if getattr(config, "add_cross_attention", False):
        return "it has cross-attention"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is bidirectional"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return None if kind in ROPE_TYPES else f"its rotary embedding is of kind {kind}"


class NativeWeights(FusedWeights, NativeModel):
    """Weights of a decoder for the native engine."""

    def __init__(self, model: PreTrainedModel, consume: bool = False) -> None:
        """`consume`: release each matrix of `model` when converted."""
        parts = model_parts(model)
        super().__init__(model, parts.angles)
        if len(parts.layers[0].qkv) == 1:
            self.kv_heads = self.heads
        self._kept: list[Any] = []
        self._buffer = LargePageBuffer()
        self._consume, self._gain_offset = consume, parts.gain_offset
        tied = model.lm_head.weight is parts.embedding.weight
        embedding = None if tied else self._matrix([parts.embedding])
        positions = self._matrix([parts.positions]) if parts.positions else None
        self.position_limit = positions.outputs if positions else sys.maxsize
        final_norm = self._gain(parts.final_norm)
        self._structs: list[LayerStruct] = []
        self._layer_bytes: dict[int, int] = {}  # by address
        self.layers = array_of_addresses([self._layer(layer) for layer in parts.layers])
        self.output_matrix = self._matrix([model.lm_head])
        self.embedding_matrix = embedding or self.output_matrix
        self.embedding = self.embedding_matrix.tensors["weights"]
        coded = any(isinstance(part, NativeMatrix) and part.format.is_coded for part in self._kept)
        self.kv_dtype = torch.float16 if coded else self.dtype
        self.fields = {
            "positions": positions and ctypes.addressof(positions.struct()),
            "final_norm": final_norm.data_ptr(),
            "inner": parts.inner,
            "rotated": 2 * self.rotation(1)[0].shape[1],
            "activation": ACTIVATIONS[parts.activation],
            "gated": len(parts.layers[0].gate_up) > 1,
            "centred": hasattr(parts.final_norm, "bias"),
            "parallel": parts.parallel,
            "epsilon": parts.epsilon,
            "embedding_scale": parts.embedding_scale,
            "attention_cap": parts.attention_cap or 0,
            "logit_cap": parts.logit_cap or 0,
        }

    @property
    def weight_bytes(self) -> int:
        skipped = self._layer_bytes.keys() - set(self.layers)
        return sum(part.nbytes for part in self._kept) - sum(self._layer_bytes[address] for address in skipped)

    def embedding_rows(self, ids: Tensor) -> Tensor:
        return self.embedding_matrix.rows(ids)

    def output_rows(self, ids: Tensor | None) -> Tensor:
        return self.output_matrix.rows(torch.arange(self.outputs) if ids is None else ids)

    def with_layers(self, selected: Sequence[int]) -> NativeWeights:
        variant = super().with_layers(selected)
        variant.layers = array_of_addresses(variant.layers)
        return variant

    def with_channel_scale(self, scale: Tensor) -> NativeWeights:
        variant = super().with_channel_scale(scale)
        variant.channel_scale = scale.float().contiguous()
        variant.fields = {**self.fields, "channel_scale": variant.channel_scale.data_ptr()}
        return variant

    def rotation(self, count: int) -> tuple[Tensor, Tensor]:
        if self._angles is None:
            return torch.empty(count, 0, dtype=torch.float32), torch.empty(count, 0, dtype=torch.float32)
        cosines, sines = self._angles(torch.empty(0, dtype=torch.float32), torch.arange(count)[None])
        half = cosines.shape[-1] // 2
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    def _keep(self, part: Any) -> Any:
        self._kept.append(part)
        return part

    def _gain(self, norm: Any) -> Tensor:
        gain = norm.weight.detach().float()
        gain = gain + self._gain_offset if self._gain_offset else gain.clone()
        biased = hasattr(norm, "bias")
        return self._keep(torch.cat((gain, norm.bias.detach().float())) if biased else gain)

    def _matrix(
        self, linears: Sequence[nn.Module], interleaved: bool = False, order: Tensor | None = None
    ) -> NativeMatrix:
        matrix = self._keep(NativeMatrix(linears, self._buffer, interleaved, order))
        if self._consume:
            for linear in linears:
                linear.weight = None  # type: ignore[assignment]
        return matrix

    def _layer(self, layer: LayerParts) -> int:
        """Convert a layer; return the address of its structure."""
        first, joined = len(self._kept), len(layer.qkv)
        if len({format_of(linear) for linear in layer.qkv}) > 1:
            joined -= 1  # values of another format than queries and keys have their own matrix
        matrices = {"qkv": self._matrix(layer.qkv[:joined], order=layer.order)}
        if joined < len(layer.qkv):
            matrices["value"] = self._matrix(layer.qkv[joined:])
        matrices["out"] = self._matrix([layer.out])
        matrices["gate_up"] = self._matrix(layer.gate_up, interleaved=len(layer.gate_up) > 1)
        matrices["down"] = self._matrix([layer.down])
        struct = LayerStruct(
            **{name: matrix.struct() for name, matrix in matrices.items()},
            **{name: self._gain(norm).data_ptr() for name, norm in layer.norms.items()},
            attention_scale=layer.scale,
            window=layer.window or 0,
        )
        self._structs.append(struct)
        address = ctypes.addressof(struct)
        self._layer_bytes[address] = sum(part.nbytes for part in self._kept[first:])
        return address
