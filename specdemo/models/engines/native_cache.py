"""KV caches of the native CPU engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specdemo.models.engines.engine import BufferCache
from specdemo.native.interface import ModelStruct, TextStruct

BLOCK = 16  # positions whose keys are stored together; capacities and stored values of a head are multiples


def padded_dim(head_dim: int) -> int:
    return head_dim + -head_dim % BLOCK


class NativeModel(Protocol):
    """Interface of weights in the layout of `model` in `native/interface.h`, and of their KV cache."""

    layers: Any  # array of addresses
    kv_heads: int
    head_dim: int
    width: int
    kv_dtype: torch.dtype
    position_limit: int

    @property
    def weight_bytes(self) -> int: ...

    @property
    def outputs(self) -> int:
        """Number of logits of a row."""

    def rotation(self, count: int) -> tuple[Tensor, Tensor]: ...

    def struct(self, cache_dtype: torch.dtype) -> ModelStruct: ...


class NativeCache(BufferCache):
    """Keys and values in the layout of `native/cache.c`, and hidden states."""

    def __init__(self, model: NativeModel) -> None:
        shape = len(model.layers), 2, model.kv_heads, 0, padded_dim(model.head_dim)
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
            if not (length <= min(slots) and max(slots) < self.written):
                raise ValueError(f"slots {min(slots)} to {max(slots)} are not in a cache of {self.written} positions")
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
    def form(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Equal in all caches of a pass; a copy uses that of its target."""
        return self.kv.dtype, self.taps
