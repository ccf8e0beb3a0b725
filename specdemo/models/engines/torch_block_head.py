"""Block heads in torch, on any device: a pass over new rows and slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.models.engines.engine import FIRST_CAPACITY
from specdemo.models.engines.head import BlockWeights, HeadCache
from specdemo.models.engines.torch_head import HEAD_CHUNK, TorchEagle3, TorchHead, grown
from specdemo.models.threads import torch_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdemo.models.engines.fused_weights import FusedWeights


class TorchBlockHeadCache(HeadCache):
    """Keys and values `[layers, 2, kv_heads, capacity, head_dim]`, and the slots of the last pass."""

    def __init__(self, head: TorchHead, layers: int) -> None:
        layer = head.layer
        shape = (layers, 2, layer.kv_heads, 0, layer.head_dim)
        self.kv = torch.empty(shape, dtype=head.dtype, device=head.device)
        self.ids = head.ids
        self.states = torch.empty(0, layer.width)  # slots after the final norm
        self.length = self.end = 0  # `end`: with slots
        self.drafted = 0
        self.confidence: float | None = None
        self.threads = torch.get_num_threads()

    def draft_rows(self) -> Any:
        return self.drafted

    def restore(self, rows: Any) -> None:
        self.drafted = rows

    def keep(self, length: int) -> None:
        self.length = self.end = length

    @torch.inference_mode()
    def clear(self) -> None:
        self.kv.zero_()
        self.states.zero_()
        self.keep(0)

    @property
    def kv_bytes(self) -> int:
        return self.kv[..., : self.length, :].numel() * self.kv.element_size()

    @property
    def reserved_bytes(self) -> int:
        return self.kv.nbytes + self.states.untyped_storage().nbytes()

    def reserve(self, end: int) -> None:
        capacity = self.kv.shape[3]
        if end > capacity:
            self.kv = grown(self.kv, max(FIRST_CAPACITY, capacity, end - capacity))


class TorchBlockHead(TorchEagle3):
    """Block head of `model`."""

    kind = "block"

    def __init__(self, weights: BlockWeights, model: PreTrainedModel | FusedWeights) -> None:
        super().__init__(weights, model)
        self.layers, self._slots = weights.layers, weights.slots
        self._prefixes = ["", *(f"layers.{i}." for i in range(1, weights.layers))]

    def longest_draft(self, length: int) -> int:
        return min(self._slots, super().longest_draft(length))

    def open(self) -> TorchBlockHeadCache:  # type: ignore[override]
        return TorchBlockHeadCache(self, self.layers)

    @torch.inference_mode()
    def start(self, cache: HeadCache, following: list[int], states: Tensor, held: int) -> Tensor:
        assert isinstance(cache, TorchBlockHeadCache)
        slots = self.longest_draft(held + len(following) + 1) - 1
        with torch_threads(cache.threads):
            cache.keep(held)
            states = states.flatten(1).to(self.device, self.dtype)
            for first in range(0, len(following), HEAD_CHUNK):
                last = min(first + HEAD_CHUNK, len(following))
                added = slots if last == len(following) else 0
                rows = torch.cat([states[first:last], states[-1:].expand(added, -1)])
                out = self._rows(cache, rows, following[first:last] + following[-1:] * added, added)
            cache.states = self._norm("norm", out[-slots - 1 :])
            cache.length, cache.drafted = cache.end - slots, 0
            return self._follow(cache, following[-1])

    @torch.inference_mode()
    def step(self, cache: HeadCache, token: int) -> Tensor:
        assert isinstance(cache, TorchBlockHeadCache)
        cache.drafted += 1
        with torch_threads(cache.threads):
            return self._follow(cache, token)

    def confidence(self, cache: HeadCache) -> float | None:
        assert isinstance(cache, TorchBlockHeadCache)
        return cache.confidence

    def _follow(self, cache: TorchBlockHeadCache, token: int) -> Tensor:
        """Return the logits of the next slot after `token`."""
        narrow = self._linear("markov_head.markov_w1", self._embedded(torch.tensor([token], device=self.device)))
        state = cache.states[cache.drafted] + self._linear("markov_head.markov_w2", narrow)
        cache.confidence = float(self._linear("confidence_head.proj", state).float().sigmoid())
        return self._linear("lm_head", state)[0]

    def _rows(self, cache: TorchBlockHeadCache, states: Tensor, following: list[int], slots: int) -> Tensor:
        """Pass rows through all layers; the last `slots` rows are shifted."""
        first, end = cache.end, cache.end + len(following)
        if end > self.layer.context:
            raise ValueError(f"the head has {self.layer.context:,} positions")
        cache.reserve(end)
        positions = torch.arange(first, end, device=self.device)
        visible = torch.arange(end, device=self.device) <= positions[:, None]
        rows = self._linear("fc", states)
        embedded = self._norm("input_layernorm", self._embedded(torch.tensor(following, device=self.device)))
        inputs = torch.cat([embedded, self._norm("hidden_norm", rows)], -1)
        inputs[len(inputs) - slots :] += self._tensors["slots"][:slots]
        for prefix, kv in zip(self._prefixes, cache.kv, strict=True):
            if prefix:
                inputs = self._norm(f"{prefix}input_layernorm", rows)
            keys, values = self._heads(f"{prefix}self_attn.kv_proj", inputs).chunk(2)
            kv[:, :, first:end] = torch.stack((self._rotated(keys, first), values))
            query = self._rotated(self._heads(f"{prefix}self_attn.q_proj", inputs), first)
            keys, values = kv[:, None, :, :end]
            mixed = F.scaled_dot_product_attention(query[None], keys, values, attn_mask=visible, enable_gqa=True)
            rows = self._layer_output(prefix, rows, mixed)
        cache.end = end
        return rows
