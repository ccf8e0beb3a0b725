"""Models of the native CPU engine and their KV caches."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdemo.models.engines.engine import BufferCache
from specdemo.models.engines.native_matrix import FLOAT_FORMATS, NativeMatrix
from specdemo.native.interface import ModelStruct, TextStruct

BLOCK = 16  # positions whose keys are stored together; capacities and stored values of a head are multiples


class NativeModel(ABC):
    """Model, or a drafting head as a model, in the layout of `model` in `native/interface.h`."""

    layers: Any  # array of addresses
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    position_limit: int
    embedding_matrix: NativeMatrix
    output_matrix: NativeMatrix
    fields: Mapping[str, Any]  # further values of the structure

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    @property
    def outputs(self) -> int:
        """Number of logits of a row."""
        return self.output_matrix.outputs

    @abstractmethod
    def rotation(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[count, rotated / 2]`."""

    def struct(self, cache_dtype: torch.dtype) -> ModelStruct:
        """Return the description of the model for caches of this type; it refers to memory of this object."""
        return ModelStruct(
            layers=ctypes.addressof(self.layers),
            embedding=ctypes.addressof(self.embedding_matrix.struct()),
            head=self.output_matrix.struct(),
            layer_count=len(self.layers),
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            cache_form=FLOAT_FORMATS[cache_dtype].number,
            **self.fields,
        )


def array_of_addresses(addresses: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


class NativeCache(BufferCache):
    """Keys and values in the layout of `native/cache.c`, and hidden states."""

    def __init__(self, model: NativeModel) -> None:
        dim = model.head_dim + -model.head_dim % BLOCK
        shape = len(model.layers), 2, model.kv_heads, 0, dim
        super().__init__(torch.empty(shape, dtype=model.kv_dtype), model.width)
        self.layout = object()  # replaced with the addresses of keys, values and states

    def _replace_buffers(self) -> None:
        self.layout = object()

    def describe(self, text: TextStruct) -> None:
        """Set what depends on the layout."""
        text.cache, text.capacity = self.kv.data_ptr(), self.capacity
        text.states = self.states.data_ptr() if self.taps else None

    def describe_inputs(self, text: TextStruct) -> None:
        """Set what the rows of `text` receive besides tokens."""

    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        end = length + len(slots)
        if slots and list(slots) != list(range(length, end)):
            moved, to = torch.tensor(slots), torch.arange(length, end)
            keys, values = self.kv[:, 0].unflatten(2, (-1, BLOCK)), self.kv[:, 1]
            keys = keys.view(*keys.shape[:3], -1, BLOCK)
            keys[:, :, to // BLOCK, :, to % BLOCK] = keys[:, :, moved // BLOCK, :, moved % BLOCK]
            values[:, :, to] = values[:, :, moved]
            self.states[length:end] = self.states[moved]
        self.length = end

    def clear(self) -> None:
        end = self.written + -self.written % BLOCK
        self.kv.view(torch.uint8).numpy()[:, :, :, :end] = 0  # threads of torch would wait for the engine's
        self.states.numpy()[: self.written] = 0
        self.length = self.written = 0

    @property
    def pass_group(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Equal in all caches of a pass; a copy uses that of its target."""
        return self.kv.dtype, self.taps
