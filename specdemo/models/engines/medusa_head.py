"""Medusa heads in torch, on any device (2401.10774)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.models.engines.head import Head, HeadCache, MedusaWeights
from specdemo.models.engines.target_rows import output_rows
from specdemo.models.threads import torch_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdemo.models.engines.fused_weights import FusedWeights


class MedusaCache(HeadCache):
    """The target's final state of the last row, and the number of the head that drafts."""

    def __init__(self, ids: Tensor | None) -> None:
        self.ids = ids
        self.state = torch.empty(0)
        self.length = self.head = 0
        self.threads = torch.get_num_threads()

    def draft_rows(self) -> int:
        return self.head

    def restore(self, rows: int) -> None:
        self.head = rows

    def keep(self, length: int) -> None:
        self.length, self.head = length, 0

    @torch.inference_mode()
    def clear(self) -> None:
        self.state.zero_()
        self.keep(0)

    @property
    def kv_bytes(self) -> int:
        return self.state.nbytes

    reserved_bytes = kv_bytes


class MedusaHead(Head):
    """Independent heads: residual blocks on the final state, and an output matrix, or that of `model` for all heads."""

    kind = "medusa"

    def __init__(self, weights: MedusaWeights, model: PreTrainedModel | FusedWeights) -> None:
        self.taps, self.device = weights.taps, model.device
        self.dtype = torch.float32 if self.device.type == "cpu" else model.dtype
        self.ids = None if weights.ids is None else weights.ids.to(self.device)
        self._heads, self._blocks = weights.heads, weights.blocks
        self._tensors = {name: tensor.to(self.device, self.dtype) for name, tensor in weights.tensors.items()}
        if f"0.{self._blocks}.weight" not in self._tensors:
            shared = output_rows(model, self.ids).to(self.dtype)
            self._tensors |= {f"{i}.{self._blocks}.weight": shared for i in range(self._heads)}
        parts = {tensor.data_ptr(): tensor.nbytes for tensor in self._tensors.values()}
        self.weight_bytes = sum(parts.values())

    def longest_draft(self, length: int) -> int:
        return self._heads

    def open(self) -> MedusaCache:
        return MedusaCache(self.ids)

    @torch.inference_mode()
    def start(self, cache: HeadCache, following: list[int], states: Tensor, held: int) -> Tensor:
        assert isinstance(cache, MedusaCache)
        cache.keep(held + len(following))
        cache.state = states[-1, 0].to(self.device, self.dtype, copy=True)
        return self._logits(cache)

    @torch.inference_mode()
    def step(self, cache: HeadCache, token: int) -> Tensor:
        """Return the logits of the next head, which do not depend on `token`."""
        assert isinstance(cache, MedusaCache)
        cache.head += 1
        return self._logits(cache)

    def _logits(self, cache: MedusaCache) -> Tensor:
        row = cache.state
        with torch_threads(cache.threads):
            for block in range(self._blocks):
                weight, bias = (self._tensors[f"{cache.head}.{block}.linear.{name}"] for name in ("weight", "bias"))
                row = row + F.silu(F.linear(row, weight, bias))
            return F.linear(row, self._tensors[f"{cache.head}.{self._blocks}.weight"])
