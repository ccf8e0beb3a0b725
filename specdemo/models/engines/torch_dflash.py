"""DFlash and DSpark heads in torch, on any device: a pass over a block of the last token and mask tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.models.engines.engine import FIRST_CAPACITY
from specdemo.models.engines.head import DFlashWeights, HeadCache, check_token
from specdemo.models.engines.torch_head import TorchHead, grown
from specdemo.models.threads import torch_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdemo.models.engines.fused_weights import FusedWeights


class TorchDFlashCache(HeadCache):
    """Keys and values of the target's states, and the rows of the last block that draft."""

    def __init__(self, head: TorchDFlash) -> None:
        layer = head.layer
        shape = (head.layers, 2, layer.kv_heads, 0, layer.head_dim)
        self.kv = torch.empty(shape, dtype=head.dtype, device=head.device)
        self.ids = head.ids
        self.states = torch.empty(0, layer.width)  # rows of a block after the final norm
        self.length = 0
        self.drafted = 0
        self.confidence: float | None = None
        self.threads = torch.get_num_threads()

    def draft_rows(self) -> int:
        return self.drafted

    def restore(self, rows: int) -> None:
        self.drafted = rows

    def keep(self, length: int) -> None:
        self.length = length

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

    @torch.inference_mode()
    def append(self, keys_and_values: Tensor) -> None:
        """Add committed rows of all layers."""
        end = self.length + keys_and_values.shape[3]
        capacity = self.kv.shape[3]
        if end > capacity:
            self.kv = grown(self.kv, max(FIRST_CAPACITY, capacity, end - capacity))
        self.kv[..., self.length : end, :] = keys_and_values
        self.keep(end)


class TorchDFlash(TorchHead):
    """Head of `model`."""

    kind = "block"
    layer_name = ""

    def __init__(self, weights: DFlashWeights, model: PreTrainedModel | FusedWeights) -> None:
        super().__init__(weights, model)
        self._weights, self.layers = weights, len(weights.windows)

    def longest_draft(self, length: int) -> int:
        first = 0 if self._weights.from_anchor else 1  # row of the block that drafts the first token
        return max(0, min(self._weights.block, self.layer.context - length + 1) - first)

    def open(self) -> TorchDFlashCache:
        return TorchDFlashCache(self)

    @torch.inference_mode()
    def start(self, cache: HeadCache, following: list[int], states: Tensor, held: int) -> Tensor:
        assert isinstance(cache, TorchDFlashCache)
        with torch_threads(cache.threads):
            cache.keep(held)
            rows = self._norm("hidden_norm", self._linear("fc", states.flatten(1).to(self.device, self.dtype)))
            layers = [self._keys_and_values(i, rows, held) for i in range(self.layers)]
            cache.append(torch.stack(layers))
            count = self.longest_draft(cache.length + 1)
            masks = [self._weights.mask_token] * (count - 1 if self._weights.from_anchor else count)
            cache.states = self._block(cache, [following[-1], *masks])[-count:]
            cache.drafted = 0
            return self._follow(cache, following[-1])

    @torch.inference_mode()
    def step(self, cache: HeadCache, token: int) -> Tensor:
        assert isinstance(cache, TorchDFlashCache)
        cache.drafted += 1
        with torch_threads(cache.threads):
            return self._follow(cache, token)

    def confidence(self, cache: HeadCache) -> float | None:
        assert isinstance(cache, TorchDFlashCache)
        return cache.confidence

    def _keys_and_values(self, layer: int, rows: Tensor, first: int) -> Tensor:
        """Return keys and values `[2, kv_heads, n, head_dim]` for inputs at positions from `first` on."""
        prefix = f"layers.{layer}.self_attn."
        keys, values = self._heads(f"{prefix}kv_proj", rows).chunk(2)
        return torch.stack((self._rotated(self._norm(f"{prefix}k_norm", keys), first), values))

    def _block(self, cache: TorchDFlashCache, tokens: list[int]) -> Tensor:
        """Return the states `[n, width]` of a block after the final norm."""
        first, rows = cache.length, self._embedded(torch.tensor(tokens, device=self.device))
        for i in range(self.layers):
            prefix = f"layers.{i}."
            inputs = self._norm(f"{prefix}input_layernorm", rows)
            query = self._norm(f"{prefix}self_attn.q_norm", self._heads(f"{prefix}self_attn.q_proj", inputs))
            keys, values = torch.cat([cache.kv[i, :, :, :first], self._keys_and_values(i, inputs, first)], 2)
            mixed = F.scaled_dot_product_attention(
                self._rotated(query, first)[None],
                keys[None],
                values[None],
                attn_mask=self._visible(i, first, len(tokens)),
                enable_gqa=True,
            )
            rows = self._layer_output(prefix, rows, mixed)
        return self._norm("norm", rows)

    def _visible(self, layer: int, first: int, count: int) -> Tensor | None:
        """Return the mask `[count, first + count]` of a layer with a window."""
        window = self._weights.windows[layer]
        if window is None:
            return None
        positions = torch.arange(first + count, device=self.device)
        visible = (positions >= first - window).expand(count, -1)
        return visible & (positions <= positions[first:, None]) if self._weights.causal_windows else visible

    def _follow(self, cache: TorchDFlashCache, token: int) -> Tensor:
        """Return the logits `[size]` of the next row after `token`."""
        state = cache.states[cache.drafted : cache.drafted + 1]
        logits, features = self._linear("lm_head", state), state
        if (table := self._tensors.get("markov_head.markov_w1.weight")) is not None:
            check_token(token, len(table))
            before = table[token : token + 1]
            logits = logits + self._linear("markov_head.markov_w2", before)
            features = torch.cat([state, before], -1)
        if "confidence_head.proj.weight" in self._tensors:
            inputs = features[:, : self._tensors["confidence_head.proj.weight"].shape[1]]
            cache.confidence = float(self._linear("confidence_head.proj", inputs).float().sigmoid())
        return logits[0]
