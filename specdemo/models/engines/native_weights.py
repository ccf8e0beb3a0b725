"""Conversion of weights for the native CPU engine."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdemo.models.engines.fused_weights import FusedWeights
from specdemo.models.engines.native_cache import NativeModel, array_of_addresses
from specdemo.models.engines.native_families import ACTIVATIONS, LayerParts, model_parts
from specdemo.models.engines.native_matrix import NativeMatrix, format_of
from specdemo.models.memory import LargePageBuffer
from specdemo.native.interface import LayerStruct

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
