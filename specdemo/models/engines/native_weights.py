"""Conversion of weights for the native CPU engine."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdemo.models.engines.fused_weights import FusedWeights
from specdemo.models.engines.native_families import ACTIVATIONS, LayerParts, model_parts
from specdemo.models.engines.native_matrix import FLOAT_FORMATS, Joined, NativeMatrix, format_of
from specdemo.models.memory import LargePageBuffer
from specdemo.native.interface import LayerStruct, ModelStruct

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NativeWeights(FusedWeights):
    """Weights of a decoder in the layout of `model` in `native/interface.h`."""

    def __init__(self, model: PreTrainedModel, consume: bool = False) -> None:
        """`consume`: release each matrix of `model` when converted."""
        parts = model_parts(model)
        super().__init__(model, parts.angles)
        if len(parts.layers[0].qkv) == 1:
            self.kv_heads = self.heads
        self.layers = list(range(len(parts.layers)))
        self._kept: list[Any] = []
        self._buffer = LargePageBuffer()
        self._consume, self._gain_offset = consume, parts.gain_offset
        tied = model.lm_head.weight is parts.embedding.weight
        self._embedding = None if tied else self._matrix(Joined([parts.embedding]))
        self.embedding = self._embedding and self._embedding.tensors["weights"]
        self._positions = parts.positions and self._matrix(Joined([parts.positions]))
        self.position_limit = self._positions.outputs if self._positions else sys.maxsize
        self._final_norm = self._gain(parts.final_norm)
        self._layer_bytes: list[int] = []
        self._structs = (LayerStruct * len(parts.layers))(*map(self._layer, parts.layers))
        self._head = self._matrix(Joined([model.lm_head]))
        coded = any(isinstance(part, NativeMatrix) and part.format.is_coded for part in self._kept)
        self.kv_dtype = torch.float16 if coded else self.dtype
        self._options = {
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
    def outputs(self) -> int:
        return self._head.outputs

    @property
    def output_matrix(self) -> NativeMatrix:
        return self._head

    @property
    def embedding_matrix(self) -> NativeMatrix:
        return self._embedding or self._head

    @property
    def weight_bytes(self) -> int:
        skipped = set(range(len(self._layer_bytes))).difference(self.layers)
        return sum(part.nbytes for part in self._kept) - sum(self._layer_bytes[i] for i in skipped)

    def embedding_rows(self, ids: Tensor) -> Tensor:
        return self.embedding_matrix.rows(ids)

    def output_rows(self, ids: Tensor | None) -> Tensor:
        return self._head.rows(torch.arange(self.outputs) if ids is None else ids)

    def with_channel_scale(self, scale: Tensor) -> NativeWeights:
        thin = super().with_channel_scale(scale)
        thin.channel_scale = scale.float().contiguous()
        return thin

    def rotation(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[count, rotated / 2]`."""
        if self._angles is None:
            return torch.empty(count, 0, dtype=torch.float32), torch.empty(count, 0, dtype=torch.float32)
        cosines, sines = self._angles(torch.empty(0, dtype=torch.float32), torch.arange(count)[None])
        half = cosines.shape[-1] // 2
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    def struct(self, cache_dtype: torch.dtype) -> tuple[ModelStruct, Any]:
        """Return the description of the model for caches of this type, and the objects that it points to."""
        embedding, placed = (
            matrix and ctypes.pointer(matrix.struct()) for matrix in (self._embedding, self._positions)
        )
        size = ctypes.sizeof(LayerStruct)
        pointers = (ctypes.c_void_p * len(self.layers))(
            *(ctypes.addressof(self._structs) + size * i for i in self.layers)
        )
        return ModelStruct(
            layers=ctypes.addressof(pointers),
            embedding=embedding and ctypes.addressof(embedding.contents),
            positions=placed and ctypes.addressof(placed.contents),
            channel_scale=None if self.channel_scale is None else self.channel_scale.data_ptr(),
            final_norm=self._final_norm.data_ptr(),
            head=self._head.struct(),
            layer_count=len(self.layers),
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            cache_form=FLOAT_FORMATS[cache_dtype].number,
            **self._options,
        ), (pointers, embedding, placed)

    def _keep(self, part: Any) -> Any:
        self._kept.append(part)
        return part

    def _gain(self, norm: Any) -> Tensor:
        gain = norm.weight.detach().float()
        gain = gain + self._gain_offset if self._gain_offset else gain.clone()
        biased = hasattr(norm, "bias")
        return self._keep(torch.cat((gain, norm.bias.detach().float())) if biased else gain)

    def _matrix(self, joined: Joined) -> NativeMatrix:
        matrix = self._keep(NativeMatrix(joined, self._buffer))
        if self._consume:
            for linear in joined.linears:
                linear.weight = None  # type: ignore[assignment]
        return matrix

    def _layer(self, layer: LayerParts) -> LayerStruct:
        first = len(self._kept)
        struct = LayerStruct(
            **{name: self._matrix(joined).struct() for name, joined in _joined(layer).items()},
            **{name: self._gain(norm).data_ptr() for name, norm in layer.norms.items()},
            attention_scale=layer.scale,
            window=layer.window or 0,
        )
        self._layer_bytes.append(sum(part.nbytes for part in self._kept[first:]))
        return struct


def _joined(layer: LayerParts) -> dict[str, Joined]:
    """Return the matrices of a layer; values of another format than queries and keys have their own."""
    matrices = {"qkv": Joined(layer.qkv, order=layer.order)}
    if len({format_of(linear) for linear in layer.qkv}) > 1:
        matrices = {"qkv": Joined(layer.qkv[:-1], order=layer.order), "value": Joined(layer.qkv[-1:])}
    return matrices | {
        "out": Joined([layer.out]),
        "gate_up": Joined(layer.gate_up, interleaved=len(layer.gate_up) > 1),
        "down": Joined([layer.down]),
    }
