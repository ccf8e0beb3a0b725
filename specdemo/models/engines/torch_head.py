"""Drafting heads of a single layer in torch, on any device.

Only the last row of a pass has logits or a successor that receives its state, so all others need no queries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.models.engines.context_tokens import ContextTokens
from specdemo.models.engines.cuda_graphs import GraphRecorder, Recording, graph_bytes
from specdemo.models.engines.engine import FIRST_CAPACITY
from specdemo.models.engines.head import DFlashWeights, Eagle3Weights, EagleWeights, Head, HeadCache
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.target_rows import embedding_rows, output_rows
from specdemo.models.threads import torch_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdemo.models.engines.fused_weights import FusedWeights

LayerWeights: TypeAlias = EagleWeights | Eagle3Weights | DFlashWeights

HEAD_CHUNK = 512  # committed rows per pass


def grown(kv: Tensor, count: int) -> Tensor:
    """Return a copy with `count` further positions; overwrite `kv`."""
    copied = F.pad(kv, (0, 0, 0, count))
    kv.zero_()
    return copied


class TorchHeadCache(HeadCache):
    """Keys and values `[2, kv_heads, capacity, head_dim]`, and the state of the last row."""

    def __init__(self, head: SingleLayerHead) -> None:
        layer = head.layer
        self.kv = torch.empty(2, layer.kv_heads, 0, layer.head_dim, dtype=head.dtype, device=head.device)
        self.state = torch.empty(0)
        self.ids, self.context = head.ids, ContextTokens(head.static)
        self.context_rows = torch.empty(0, layer.width, dtype=head.dtype, device=head.device)
        self.length = self.end = 0  # `end`: with draft rows
        self.threads = torch.get_num_threads()
        self.recorder = GraphRecorder(head.device)

    def draft_rows(self) -> tuple[Tensor, Tensor]:
        return self.kv[:, :, self.length : self.end].clone(), self.state

    @torch.inference_mode()
    def restore(self, rows: tuple[Tensor, Tensor]) -> None:
        keys_and_values, self.state = rows
        self.end = self.length + keys_and_values.shape[2]
        self.kv[:, :, self.length : self.end] = keys_and_values

    def keep(self, length: int) -> None:
        self.length = self.end = length

    @torch.inference_mode()
    def clear(self) -> None:
        self.kv.zero_()
        self.state.zero_()
        self.context.update([], -1)
        self.context_rows = self.context_rows.zero_()[:0]
        self.drop_recordings()
        self.keep(0)

    @property
    def kv_bytes(self) -> int:
        return self.kv[:, :, : self.length].numel() * self.kv.element_size()

    @property
    def reserved_bytes(self) -> int:
        graphs = graph_bytes(len(self.recorder.recordings), self.kv.shape[1] * self.kv.shape[3], self.kv.itemsize)
        return self.kv.nbytes + self.context_rows.untyped_storage().nbytes() + graphs

    def drop_recordings(self) -> None:
        self.recorder.recordings.clear()

    def reserve(self, end: int) -> None:
        if end > (capacity := self.kv.shape[2]):
            self.kv = grown(self.kv, max(FIRST_CAPACITY, capacity, end - capacity))
            self.drop_recordings()

    def append(self, keys_and_values: Tensor) -> Tensor:
        end = self.end + keys_and_values.shape[2]
        self.reserve(end)
        self.kv[:, :, self.end : end] = keys_and_values
        self.end = end
        return self.kv[:, :, :end]


class TorchHead(Head):
    """Tensors of a head of `model` without the prefix `layer_name`, and their operations."""

    layer_name: str

    def __init__(self, weights: LayerWeights, model: PreTrainedModel | FusedWeights) -> None:
        self.layer, self._model = weights.layer, model
        self.device = model.device
        self.dtype = torch.float32 if self.device.type == "cpu" else model.dtype
        self.taps = weights.taps
        self.ids = None if weights.ids is None else weights.ids.to(self.device)
        tensors = {
            name.removeprefix(self.layer_name): tensor.to(self.device, self.dtype)
            for name, tensor in weights.tensors.items()
        }
        for name in [name for name in tensors if "self_attn.k_proj." in name]:
            keys_and_values = [tensors.pop(name), tensors.pop(name.replace("k_proj", "v_proj"))]
            tensors[name.replace("k_proj", "kv_proj")] = torch.cat(keys_and_values)
        self._shares_rows = "lm_head.weight" not in tensors
        if self._shares_rows:
            tensors["lm_head.weight"] = output_rows(model, self.ids).to(self.dtype)
        self._tensors: Mapping[str, Tensor] = tensors
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._angles = self.layer.rotation(0)

    def _heads(self, name: str, rows: Tensor) -> Tensor:
        return self._linear(name, rows).unflatten(-1, (-1, self.layer.head_dim)).transpose(0, 1)

    def _embedded(self, ids: Tensor) -> Tensor:
        own = self._tensors.get("embed_tokens.weight")
        return embedding_rows(self._model, ids).to(self.dtype) if own is None else F.embedding(ids, own)

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        return F.linear(rows, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        scaled = F.rms_norm(rows.float(), rows.shape[-1:], None, self.layer.epsilon)
        return scaled.to(self.dtype) * self._tensors[f"{name}.weight"]

    def _layer_output(self, prefix: str, residuals: Tensor, mixed: Tensor) -> Tensor:
        """Return the rows `[n, width]` after attention `[1, heads, n, head_dim]`."""
        rows = residuals + self._linear(f"{prefix}self_attn.o_proj", mixed[0].transpose(0, 1).flatten(1))
        inner = self._norm(f"{prefix}post_attention_layernorm", rows)
        gated = F.silu(self._linear(f"{prefix}mlp.gate_proj", inner)) * self._linear(f"{prefix}mlp.up_proj", inner)
        return rows + self._linear(f"{prefix}mlp.down_proj", gated)

    def _rotated(self, heads: Tensor, first: int) -> Tensor:
        end = first + heads.shape[1]
        if end > len(self._angles[0]):
            cosines, sines = self.layer.rotation(min(self.layer.context, max(FIRST_CAPACITY, 2 * end)))
            self._angles = cosines.to(self.device), sines.to(self.device)
        return self._turned(heads, *(angles[first:end] for angles in self._angles))

    def _turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = heads.float().chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(heads.dtype)


class SingleLayerHead(TorchHead):
    """Base class of heads with a decoder layer."""

    kind = "eagle"

    def __init__(self, weights: EagleWeights | Eagle3Weights, model: PreTrainedModel | FusedWeights) -> None:
        super().__init__(weights, model)
        self._extends = self._shares_rows and self.ids is not None
        self._recordable = isinstance(model, LlamaWeights) and model.recordable
        self.static = frozenset(() if self.ids is None else self.ids.tolist())

    def longest_draft(self, length: int) -> int:
        return max(0, self.layer.context - length + 2)

    def open(self) -> TorchHeadCache:
        return TorchHeadCache(self)

    @torch.inference_mode()
    def start(self, cache: HeadCache, following: list[int], states: Tensor, held: int) -> Tensor:
        assert isinstance(cache, TorchHeadCache)
        with torch_threads(cache.threads):
            cache.keep(held)
            for first in range(0, len(following), HEAD_CHUNK):
                last = first + HEAD_CHUNK
                rows = self._entered(states[first:last].to(self.device, self.dtype))
                cache.state = self._pass(cache, rows, following[first:last])
            cache.length = cache.end
            self._extend(cache, following, held)
            return self._logits(cache)

    @torch.inference_mode()
    def step(self, cache: HeadCache, token: int) -> Tensor:
        assert isinstance(cache, TorchHeadCache)
        with torch_threads(cache.threads):
            recording = self._recording(cache)
            if recording is None:
                cache.state = self._pass(cache, cache.state, [token])
            else:
                ids, row, position = recording.inputs[:3]
                ids.fill_(token), row.copy_(cache.state), position.fill_(cache.end)
                cache.state, cache.end = recording.replay().clone(), cache.end + 1
            return self._logits(cache)

    @torch.inference_mode()
    def prepare(self, cache: HeadCache, end: int) -> None:
        if self._recordable and isinstance(cache, TorchHeadCache):
            cache.reserve(min(end, self.layer.context))
            self._recording(cache)

    def _recording(self, cache: TorchHeadCache) -> Recording | None:
        """Return the recorded pass of a draft row, if possible."""
        model = self._model
        if not self._recordable or not isinstance(model, LlamaWeights) or not model.graphs:
            return None
        if cache.end >= self.layer.context:
            return None
        cache.reserve(cache.end + 1)
        if recording := cache.recorder.recording(1, cache.kv.shape[2]):
            return recording
        inputs = self._step_inputs(cache)
        try:
            replay = cache.recorder.record(partial(self._step, cache.kv, *inputs))
        except RuntimeError:  # memory is insufficient, or a kernel cannot be captured
            cache.drop_recordings()
            self._recordable = False
            return None
        if replay is None:
            return None
        cache.recorder.recordings[1, cache.kv.shape[2]] = recording = Recording(inputs, replay)
        return recording

    def _step_inputs(self, cache: TorchHeadCache) -> tuple[Tensor, ...]:
        """Return buffers of a token id, the row before and its position behind the text, and constants."""
        columns = torch.arange(cache.kv.shape[2], device=self.device)
        position = columns[cache.end : cache.end + 1].clone()
        angles = (x.to(self.device) for x in self.layer.rotation(min(self.layer.context, cache.kv.shape[2])))
        row = torch.zeros(1, self.layer.width, dtype=self.dtype, device=self.device)
        return torch.zeros_like(position), row, position, columns, *angles

    def _step(
        self, kv: Tensor, ids: Tensor, row: Tensor, position: Tensor, columns: Tensor, cosines: Tensor, sines: Tensor
    ) -> Tensor:
        """Pass a draft row at `position`."""
        angles = cosines.index_select(0, position), sines.index_select(0, position)
        residuals, inputs = self._combined(row, self._embedded(ids))
        keys, values = self._heads("self_attn.kv_proj", inputs).chunk(2)
        kv.index_copy_(2, position, torch.stack((self._turned(keys, *angles), values)))
        query = self._turned(self._heads("self_attn.q_proj", inputs), *angles)
        grouped = query.view(1, len(keys), -1, query.shape[-1])  # query heads become rows
        mixed = F.scaled_dot_product_attention(grouped, kv[:1], kv[1:], attn_mask=(columns <= position)[None])
        return self._next_state(residuals, mixed.view(1, *query.shape))

    def _extend(self, cache: TorchHeadCache, following: list[int], held: int) -> None:
        """Add the tokens of the text and the target's output rows."""
        if not self._extends or self.ids is None:
            return
        unchanged = cache.context.update(following, held)
        tokens = torch.tensor(cache.context.tokens, dtype=torch.int64, device=self.device)
        rows = output_rows(self._model, tokens[unchanged:]).to(self.dtype)
        cache.context_rows = torch.cat([cache.context_rows[:unchanged], rows])
        cache.ids = torch.cat([self.ids, tokens])

    def _logits(self, cache: TorchHeadCache) -> Tensor:
        state = self._left(cache.state)
        return torch.cat([self._linear("lm_head", state), F.linear(state, cache.context_rows)], -1)[0]

    @abstractmethod
    def _entered(self, states: Tensor) -> Tensor:
        """Return the rows `[n, width]` of the target's states `[n, taps, width]`."""

    @abstractmethod
    def _combined(self, rows: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residuals `[n, width]` and the input of attention for rows and next tokens."""

    def _left(self, row: Tensor) -> Tensor:
        """Return the input of the output matrix for a row `[1, width]`."""
        return row

    def _pass(self, cache: TorchHeadCache, rows: Tensor, following: list[int]) -> Tensor:
        first, end = cache.end, cache.end + len(following)
        if end > self.layer.context:
            raise ValueError(f"the head has {self.layer.context:,} positions")
        residuals, columns = self._combined(rows, self._embedded(torch.tensor(following, device=self.device)))
        keys, values = self._heads("self_attn.kv_proj", columns).chunk(2)
        keys, values = cache.append(torch.stack((self._rotated(keys, first), values)))
        query = self._rotated(self._heads("self_attn.q_proj", columns[-1:]), end - 1)
        mixed = F.scaled_dot_product_attention(query[None], keys[None], values[None], enable_gqa=True)
        return self._next_state(residuals[-1:], mixed)

    def _next_state(self, residuals: Tensor, mixed: Tensor) -> Tensor:
        """Return the state after attention that the next row receives."""
        return self._layer_output("", residuals, mixed)


class TorchEagle(SingleLayerHead):
    """EAGLE-1/2: the layer predicts the target's next final state (2401.15077)."""

    layer_name = "layers.0."

    def _entered(self, states: Tensor) -> Tensor:
        return states[:, 0]

    def _combined(self, rows: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        joined = self._linear("fc", torch.cat([embedded, rows], -1))
        return joined, joined


class TorchEagle3(SingleLayerHead):
    """EAGLE-3: the layer reads fused states of several layers of the target (2503.01840)."""

    layer_name = "midlayer."

    def __init__(self, weights: Eagle3Weights, model: PreTrainedModel | FusedWeights) -> None:
        super().__init__(weights, model)
        self._norm_before_residual, self._norm_output = weights.norm_before_residual, weights.norm_output

    def _entered(self, states: Tensor) -> Tensor:
        rows = states.flatten(1)
        if "input_norm.weight" in self._tensors:
            rows = self._norm("input_norm", rows)
        if "fc_norm.0.weight" in self._tensors:
            parts = rows.chunk(len(self.taps), -1)
            rows = torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return self._linear("fc", rows)

    def _next_state(self, residuals: Tensor, mixed: Tensor) -> Tensor:
        row = super()._next_state(residuals, mixed)
        return self._norm("norm", row) if self._norm_output else row

    def _combined(self, rows: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        normalised = self._norm("hidden_norm", rows)
        joined = torch.cat([self._norm("input_layernorm", embedded), normalised], -1)
        return normalised if self._norm_before_residual else rows, joined

    def _left(self, row: Tensor) -> Tensor:
        return row if self._norm_output else self._norm("norm", row)
