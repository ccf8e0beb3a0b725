"""Drafting heads in torch, on any device.

Only the last row of a pass has logits or a successor that receives its state, so all others need no queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.models.engines.head import Eagle3Weights, Head, HeadCache
from specdemo.models.engines.target_rows import embedding_rows, output_rows
from specdemo.models.threads import torch_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdemo.models.engines.fused_weights import FusedWeights

_CHUNK = 512  # committed rows per pass
_FIRST_CAPACITY = 256


class TorchHeadCache(HeadCache):
    """Keys and values `[2, kv_heads, capacity, head_dim]`, and the state of the last row."""

    def __init__(self, head: TorchHead) -> None:
        self.kv = torch.empty(
            2, head.weights.layer.kv_heads, 0, head.weights.layer.head_dim, dtype=head.dtype, device=head.device
        )
        self.state = torch.empty(0)
        self.length = self.end = 0  # `end`: with draft rows
        self.threads = torch.get_num_threads()

    def keep(self, length: int) -> None:
        self.length = self.end = length

    @torch.inference_mode()
    def clear(self) -> None:
        self.kv.zero_()
        self.state.zero_()
        self.keep(0)

    @property
    def kv_bytes(self) -> int:
        return self.kv[:, :, : self.length].numel() * self.kv.element_size()

    def append(self, keys_and_values: Tensor) -> Tensor:
        end, capacity = self.end + keys_and_values.shape[2], self.kv.shape[2]
        if end > capacity:
            self.kv = F.pad(self.kv, (0, 0, 0, max(_FIRST_CAPACITY, capacity, end - capacity)))
        self.kv[:, :, self.end : end] = keys_and_values
        self.end = end
        return self.kv[:, :, :end]


class TorchHead(Head):
    """EAGLE-3 head of `model`."""

    def __init__(self, weights: Eagle3Weights, model: PreTrainedModel | FusedWeights) -> None:
        self.weights, self._model = weights, model
        self.device = model.device
        self.dtype = torch.float32 if self.device.type == "cpu" else model.dtype
        self.taps, self.context = weights.taps, weights.layer.context
        self.ids = None if weights.ids is None else weights.ids.to(self.device)
        self._tensors = {
            name.removeprefix("midlayer."): tensor.to(self.device, self.dtype)
            for name, tensor in weights.tensors.items()
        }
        keys_and_values = [self._tensors.pop(f"self_attn.{name}_proj.weight") for name in "kv"]
        self._tensors["self_attn.kv_proj.weight"] = torch.cat(keys_and_values)
        if "lm_head.weight" not in self._tensors:
            count = model.config.get_text_config().vocab_size
            ids = torch.arange(count, device=self.device) if self.ids is None else self.ids
            self._tensors["lm_head.weight"] = output_rows(model, ids).to(self.dtype)
        self.weight_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._angles = weights.layer.rotation(0)

    def open(self) -> TorchHeadCache:
        return TorchHeadCache(self)

    @torch.inference_mode()
    def start(self, cache: HeadCache, following: list[int], states: Tensor, held: int) -> Tensor:
        assert isinstance(cache, TorchHeadCache)
        with torch_threads(cache.threads):
            cache.keep(held)
            for first in range(0, len(following), _CHUNK):
                last = first + _CHUNK
                rows = self._linear("fc", states[first:last].flatten(1).to(self.device, self.dtype))
                cache.state = self._layer(cache, rows, following[first:last])
            cache.length = cache.end
            return self._logits(cache.state)

    @torch.inference_mode()
    def step(self, cache: HeadCache, token: int) -> Tensor:
        assert isinstance(cache, TorchHeadCache)
        with torch_threads(cache.threads):
            cache.state = self._layer(cache, cache.state, [token])
            return self._logits(cache.state)

    def _layer(self, cache: TorchHeadCache, rows: Tensor, following: list[int]) -> Tensor:
        first, end = cache.end, cache.end + len(following)
        if end > self.context:
            raise ValueError(f"the head has {self.context:,} positions")
        normalised = self._norm("hidden_norm", rows)
        joined = torch.cat([self._norm("input_layernorm", self._embedded(following)), normalised], -1)
        keys, values = self._heads("self_attn.kv_proj", joined).chunk(2)
        keys, values = cache.append(torch.stack((self._rotated(keys, first), values)))
        query = self._rotated(self._heads("self_attn.q_proj", joined[-1:]), end - 1)
        mixed = F.scaled_dot_product_attention(query[None], keys[None], values[None], enable_gqa=True)
        row = (normalised if self.weights.norm_before_residual else rows)[-1:]
        row = row + self._linear("self_attn.o_proj", mixed.reshape(1, -1))
        inner = self._norm("post_attention_layernorm", row)
        gated = F.silu(self._linear("mlp.gate_proj", inner)) * self._linear("mlp.up_proj", inner)
        return row + self._linear("mlp.down_proj", gated)

    def _heads(self, name: str, rows: Tensor) -> Tensor:
        return self._linear(name, rows).unflatten(-1, (-1, self.weights.layer.head_dim)).transpose(0, 1)

    def _logits(self, row: Tensor) -> Tensor:
        return self._linear("lm_head", self._norm("norm", row))[0]

    def _embedded(self, tokens: list[int]) -> Tensor:
        ids = torch.tensor(tokens, device=self.device)
        own = self._tensors.get("embed_tokens.weight")
        return embedding_rows(self._model, ids).to(self.dtype) if own is None else F.embedding(ids, own)

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        return F.linear(rows, self._tensors[f"{name}.weight"])

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        scaled = F.rms_norm(rows.float(), rows.shape[-1:], None, self.weights.layer.epsilon)
        return scaled.to(self.dtype) * self._tensors[f"{name}.weight"]

    def _rotated(self, heads: Tensor, first: int) -> Tensor:
        end = first + heads.shape[1]
        if end > len(self._angles[0]):
            cosines, sines = self.weights.layer.rotation(min(self.context, max(_FIRST_CAPACITY, 2 * end)))
            self._angles = cosines.to(self.device), sines.to(self.device)
        cos, sin = (angles[first:end] for angles in self._angles)
        left, right = heads.float().chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(heads.dtype)
