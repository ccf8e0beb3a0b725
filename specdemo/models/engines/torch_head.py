"""Drafting heads: stored values and tensors, and passes in torch on any device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.models.cached_head import MOST_CONTEXT_TOKENS, CachedHead, Head, StateSource
from specdemo.models.engines.cuda_graphs import (
    ChainOutput,
    ChainShape,
    Recording,
    chain_output,
    on_device,
    replay_chain,
)
from specdemo.models.engines.engine import FusedWeights, RepeatedPasses, torch_threads
from specdemo.models.engines.llama import LlamaCache
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.untrusted import MAX_INT32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdemo.core.sampling import ChainSampler, UnreadDraft

TargetModel: TypeAlias = "PreTrainedModel | FusedWeights"

HEAD_CHUNK = 512  # committed rows per pass


@dataclass(frozen=True)
class HeadConfig:
    """Values of the config.json of a head, in which those of nested parts are included."""

    name: str  # of the head
    values: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None, most: int = MAX_INT32) -> int:
        """Return a size. Raises `UserError` for a value that is missing or not within 1 to `most`."""
        value = self.values.get(key) or default
        if type(value) is not int or not 1 <= value <= most:
            problem = "is missing" if value is None else f"is not within 1 to {most:,}"
            raise UserError(f"{key} in config.json of {self.name} {problem}: choose another head")
        return value

    def enabled(self, key: str, default: bool = False) -> bool:
        return self.values.get(key, default) is True


@dataclass(frozen=True, eq=False)
class LayerSizes:
    """Sizes of a Llama decoder layer and its rotary embedding."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    epsilon: float
    frequencies: Tensor  # `[head_dim / 2]`, radians per position
    rotary_factor: float  # factor of cosines and sines

    def rotation(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[count, head_dim / 2]`."""
        angles = torch.arange(count)[:, None] * self.frequencies
        return angles.cos() * self.rotary_factor, angles.sin() * self.rotary_factor


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Tensors of a head. Without its own output or embedding matrix it shares the rows of the target."""

    config: HeadConfig
    tensors: Mapping[str, Tensor]
    taps: tuple[int, ...]  # states of the target that a row receives, see `engine.Cache`
    ids: Tensor | None  # int64 `[size]`, ascending: draft vocabulary; None: all ids
    layer: LayerSizes | None  # None: no decoder layer


class TorchHead(Head):
    """Tensors of a head of `target`, and their operations; a model of the head's layers for its cache."""

    width = heads = kv_heads = head_dim = 0
    recordable = graphs = False

    def __init__(self, weights: HeadWeights, target: TargetModel) -> None:
        self.target, self.config = target, target.config.get_text_config()
        self.device = target.device
        self.dtype = torch.float32 if self.device.type == "cpu" else target.dtype
        self.taps, self.extends = weights.taps, False
        self.ids = None if weights.ids is None else weights.ids.to(self.device)
        self.tensors = {name: tensor.to(self.device, self.dtype) for name, tensor in weights.tensors.items()}
        self.layers: list[Any] = []
        if weights.layer is not None:
            self.layer = weights.layer
            self.width, self.head_dim = self.layer.width, self.layer.head_dim
            self.heads, self.kv_heads = self.layer.heads, self.layer.kv_heads

    @property
    def weight_bytes(self) -> int:
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in self.tensors.values()}
        return sum(sizes.values())

    def open(self, target: StateSource) -> TorchCachedHead:
        return TorchCachedHead(self, target)

    def stop_recording(self, error: RuntimeError) -> None:
        if isinstance(self.target, LlamaWeights):
            self.target.stop_recording(error)

    @abstractmethod
    def projected_states(self, states: Tensor) -> Tensor:
        """Return committed rows `[n, width]` for the target's states `[n, taps, width]`."""

    @abstractmethod
    def forward(self, text: TorchCachedHead, rows: Tensor, following: list[int]) -> Tensor:
        """Add `rows`, which the tokens `following` follow, after `text.end` rows; return the state of the last row."""

    @abstractmethod
    def logits(self, text: TorchCachedHead, token: int) -> Tensor:
        """Return the logits `[size]` after the last row of `text` and its `token`."""

    def draft(self, text: TorchCachedHead, token: int) -> Tensor:
        """Add a draft row, which receives the state of the row before; return its state."""
        return self.forward(text, text.state, [token])

    def prepare(self, text: TorchCachedHead, passes: RepeatedPasses) -> None:  # noqa: B027
        """Record draft rows and chains, if possible."""

    def rotation(self, token_positions: Tensor) -> Tensor:
        """Return cosines and signed sines `[2, n, 1, head_dim]`."""
        cosines, sines = (table.to(self.device) for table in self.layer.rotation(len(token_positions)))
        return torch.stack((torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1)))[:, :, None]

    def output_rows(self, ids: Tensor | None) -> Tensor:
        """Return the target's output rows `[n, width]` of the tokens `ids` `[n]`; None: all."""
        if isinstance(self.target, FusedWeights):
            return self.target.output_rows(ids).to(self.dtype)
        head = self.target.get_output_embeddings()
        rows = head.weight
        if rows is None:  # a packed layer
            rows = head(torch.eye(self.config.hidden_size, dtype=self.target.dtype)).T
        return (rows if ids is None else F.embedding(ids, rows)).to(self.dtype)

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[n, width]` of the tokens `ids` `[n]`, the target's without own ones."""
        if "embed_tokens.weight" in self.tensors:
            return F.embedding(ids, self.tensors["embed_tokens.weight"])
        if isinstance(self.target, FusedWeights):
            return self.target.embedding_rows(ids).to(self.dtype)
        embeddings: Any = self.target.get_input_embeddings()
        return F.embedding(ids, embeddings.weight).to(self.dtype)

    def linear(self, name: str, rows: Tensor) -> Tensor:
        return F.linear(rows, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, rows.shape[-1:], self.tensors[f"{name}.weight"], self.layer.epsilon)

    def projected(self, name: str, rows: Tensor) -> Tensor:
        """Return the queries, keys or values `[n, heads, head_dim]` of rows."""
        return self.linear(f"{name}_proj", rows).unflatten(-1, (-1, self.head_dim))

    def apply_rope(self, heads: Tensor, angles: Tensor) -> Tensor:
        """Rotate `[n, heads, head_dim]` by `angles` `[2, n, 1, head_dim]` (RoPE, 2104.09864)."""
        return (heads * angles[0] + heads.roll(self.head_dim // 2, -1) * angles[1]).to(heads.dtype)

    def layer_output(self, prefix: str, residuals: Tensor, mixed: Tensor) -> Tensor:
        """Return the rows `[n, width]` that leave a layer after attention `[n, heads, head_dim]`."""
        rows = residuals + self.linear(f"{prefix}self_attn.o_proj", mixed.flatten(1))
        inner = self.norm(f"{prefix}post_attention_layernorm", rows)
        gated = F.silu(self.linear(f"{prefix}mlp.gate_proj", inner)) * self.linear(f"{prefix}mlp.up_proj", inner)
        return rows + self.linear(f"{prefix}mlp.down_proj", gated)


class TorchCachedHead(CachedHead):
    """Keys and values of a text, the state of its last row, and output rows of its tokens."""

    cache: LlamaCache
    head: TorchHead

    def __init__(self, head: TorchHead, target: StateSource) -> None:
        super().__init__(head, target, LlamaCache(head))
        self.state = torch.empty(0)
        most = MOST_CONTEXT_TOKENS if head.extends else 0
        self.all_outputs = torch.zeros(most, head.width, dtype=head.dtype, device=head.device)
        self.outputs = self.all_outputs[:0]
        self.end = 0  # rows, including draft rows

    @property
    def drafted(self) -> int:
        return self.end - self.cache.length

    @torch.inference_mode()
    def start_rows(self, following: list[int], states: Tensor, held: int) -> Tensor:
        head = self.head
        with torch_threads(self.cache.threads):
            self.keep(held)
            for first in range(0, len(following), HEAD_CHUNK):
                last = first + HEAD_CHUNK
                rows = head.projected_states(states[first:last].to(head.device, head.dtype))
                self.state = head.forward(self, rows, following[first:last])
                self.keep(self.end + len(rows))
            return head.logits(self, following[-1])

    @torch.inference_mode()
    def step(self, token: int) -> Tensor:
        with torch_threads(self.cache.threads):
            self.state = self.head.draft(self, token)
            self.end += 1
            return self.head.logits(self, token)

    def sample_chain(self, tokens: Sequence[int], sampler: ChainSampler, limits: Sequence[float]) -> UnreadDraft | None:
        chain = self.cache.chain_for(sampler, len(limits))
        rows = None if chain is None else self._begin(tokens)
        if chain is None or rows is None:
            return None
        drafted = self._replay_chain(chain, sampler, limits, *rows)
        self._cached_tokens = list(tokens if drafted is not None else tokens[: rows[2] + 1])
        return drafted

    @torch.inference_mode()
    def _replay_chain(
        self,
        chain: ChainShape,
        sampler: ChainSampler,
        limits: Sequence[float],
        following: list[int],
        states: Tensor,
        held: int,
    ) -> UnreadDraft | None:
        """Add committed rows and draft after them, if the chain is recorded."""
        cache, device = self.cache, self.head.device
        recording = cache.recorder.recording(cache.capacity, chain)
        if recording is None or held + len(following) + chain.length > cache.capacity:
            return None
        rows = chain.length + 1
        if (many := len(following) - rows) > 0:
            self.start_rows(following[:many], states[:many], held)
            following, states = following[many:], states[many:]
            held += many
        n = len(following)
        self.keep(held + n)
        cache.written = max(cache.written, held + 2 * rows)
        sampler.ids = self.ids
        size = chain.vocab_size if self.ids is None else len(self.ids)
        target_states = recording.inputs[0]
        target_states[:n].copy_(states)
        values = [target_states, on_device(following + [0] * (rows - n), device)]
        values += [cache.slots[held : held + rows], cache.slots[n - 1 : n], on_device([size], device)]
        if self.ids is not None:
            values.append(self.all_ids)
        return replay_chain(recording, values, sampler, size, limits)

    @property
    def all_ids(self) -> Tensor:
        """Target ids of all outputs, of which `ids` are used."""
        assert self.ids is not None
        return self.ids if self._context is None else self._extended_ids

    def keep(self, length: int) -> None:
        self.cache.keep(length)
        self.end = length

    def draft_rows(self) -> tuple[int, Tensor, Tensor]:
        return self.end, self.state, self.cache.kv[:, :, self.cache.length : self.end].clone()

    @torch.inference_mode()
    def restore(self, rows: tuple[int, Tensor, Tensor]) -> None:
        self.end, self.state, keys_and_values = rows
        self.cache.kv[:, :, self.cache.length : self.end] = keys_and_values

    @property
    def reserved_bytes(self) -> int:
        return super().reserved_bytes + self.all_outputs.nbytes

    @torch.inference_mode()
    def prepare(self, passes: RepeatedPasses) -> None:
        self.head.prepare(self, passes)

    @torch.inference_mode()
    def close(self) -> None:
        self.state.zero_()
        self.all_outputs.zero_()
        self.cache.drop_recordings()
        super().close()
        self.end = 0

    @torch.inference_mode()
    def _write_outputs(self, first: int, tokens: list[int]) -> None:
        assert self.ids is not None and self.head.ids is not None
        static = len(self.head.ids)
        self.outputs = self.all_outputs[: len(self.ids) - static]
        self.outputs[first - static :] = self.head.output_rows(self.ids[first:])


class SingleLayerHead(TorchHead):
    """Base class of heads with a decoder layer, whose draft rows receive the state of the row before.

    Only the last row of a pass has logits or a successor that receives its state, so all others need no queries.
    """

    kind = "eagle"

    def __init__(self, weights: HeadWeights, target: TargetModel) -> None:
        super().__init__(weights, target)
        self.layers = [0]
        if "lm_head.weight" not in self.tensors:
            self.extends = self.ids is not None
            self.tensors["lm_head.weight"] = self.output_rows(self.ids)
        self.recordable = isinstance(target, LlamaWeights) and target.recordable

    @property
    def graphs(self) -> bool:  # type: ignore[override]
        return isinstance(self.target, LlamaWeights) and self.target.graphs

    def longest_draft(self, length: int) -> int:
        return max(0, self.layer.context - length + 2)

    @abstractmethod
    def combined(self, rows: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residuals `[n, width]` and the input of attention for rows and next tokens."""

    def next_state(self, residuals: Tensor, mixed: Tensor) -> Tensor:
        """Return the state after attention that the next row receives."""
        return self.layer_output("", residuals, mixed)

    def output_input(self, state: Tensor) -> Tensor:
        """Return the input `[1, width]` of the output matrix."""
        return state

    def forward(self, text: TorchCachedHead, rows: Tensor, following: list[int]) -> Tensor:
        end = text.end + len(following)
        text.cache.reserve(end)
        slots = text.cache.slots
        ids, last = torch.tensor(following, device=self.device), slots[len(following) - 1 : len(following)]
        return self._pass(text.cache, end, rows, ids, slots[text.end : end], last)

    def draft(self, text: TorchCachedHead, token: int) -> Tensor:
        recording = self._recorded_row(text)
        if recording is None:
            return self.forward(text, text.state, [token])
        slot = text.cache.slots[text.end : text.end + 1]
        return recording.replay((text.state, torch.full_like(slot, token), slot)).clone()

    def logits(self, text: TorchCachedHead, token: int) -> Tensor:
        return self._logits(text.state, text.outputs)[0]

    def _logits(self, state: Tensor, outputs: Tensor) -> Tensor:
        inputs = self.output_input(state)
        return torch.cat([self.linear("lm_head", inputs), F.linear(inputs, outputs)], -1)

    def _pass(
        self, cache: LlamaCache, width: int, rows: Tensor, ids: Tensor, slots: Tensor, last: Tensor | None = None
    ) -> Tensor:
        """Write keys and values in `slots` `[n]`, of the first `width`; return the state of row `last` `[1]`."""
        residuals, inputs = self.combined(rows, self.embedded(ids))
        angles = cache.angles.index_select(1, slots)
        keys = self.apply_rope(self.projected("self_attn.k", inputs), angles)
        added = torch.cat((keys, self.projected("self_attn.v", inputs)), 1)
        kv = cache.kv[0, :, :width]
        kv.index_copy_(1, slots, added.transpose(0, 1))
        if last is not None:
            residuals, inputs = residuals.index_select(0, last), inputs.index_select(0, last)
            slots, angles = slots.index_select(0, last), angles.index_select(1, last)
        query = self.apply_rope(self.projected("self_attn.q", inputs), angles)
        grouped = query.view(1, self.kv_heads, -1, self.head_dim)  # query heads become rows
        stored_keys, stored_values = kv[None].chunk(2, 1)
        stored = cache.slots[:width]
        seen = ((stored <= slots) & (stored > slots - self.window))[None]
        mixed = F.scaled_dot_product_attention(grouped, stored_keys, stored_values, attn_mask=seen)
        return self.next_state(residuals, mixed.reshape(1, self.heads, self.head_dim))

    def prepare(self, text: TorchCachedHead, passes: RepeatedPasses) -> None:
        cache, chain = text.cache, passes.chain
        if not cache.records:
            return
        cache.reserve(passes.end if chain is None else passes.end + 2 * chain.length)
        cache.select(passes)
        if chain is not None and (cache.capacity, chain) not in cache.recorder.recordings:
            self._record_chain(text, chain)
        self._recorded_row(text)

    def _recorded_row(self, text: TorchCachedHead) -> Recording[Tensor] | None:
        cache = text.cache
        if not cache.records:
            return None
        cache.reserve(text.end + 1)
        key = 1, cache.capacity
        if recording := cache.recorder.recording(*key):
            return recording
        slot = cache.slots[text.end : text.end + 1]
        row = torch.zeros(1, self.width, dtype=self.dtype, device=self.device)
        inputs = row, torch.zeros_like(slot), slot
        return cache.record(key, inputs, 1, partial(self._pass, cache, cache.capacity))

    def _record_chain(self, text: TorchCachedHead, chain: ChainShape) -> None:
        """Record a chain after at most one committed row more than it has tokens."""
        cache, count = text.cache, chain.length + 1
        draft_row = partial(self._pass, cache, cache.capacity)

        def forward(
            states: Tensor, ids: Tensor, slots: Tensor, last: Tensor, used: Tensor, *others: Tensor
        ) -> ChainOutput:
            *known, outputs, limits, exp_noise = others
            end = slots.index_select(0, last) + 1
            return chain_output(
                chain,
                limits,
                exp_noise,
                draft_row(self.projected_states(states), ids, slots, last),
                lambda state, token, i: draft_row(state, token, end + i),
                lambda state: self._logits(state, text.all_outputs).masked_fill(outputs >= used, -torch.inf),
                known[0] if known else None,
            )

        states = torch.zeros(count, len(self.taps), self.config.hidden_size, dtype=self.dtype, device=self.device)
        slots = cache.slots[-count - chain.length :][:count]  # behind the text
        vocabulary = [] if text.ids is None else [text.all_ids]
        size = len(text.all_outputs) + self.tensors["lm_head.weight"].shape[0]
        outputs = torch.arange(size, device=self.device)
        buffers = chain.buffers(size if vocabulary else chain.vocab_size, self.device)
        last, used = cache.slots[:1], cache.slots[1:2]
        inputs = states, torch.zeros_like(slots), slots, last, used, *vocabulary, outputs, *buffers
        cache.record((cache.capacity, chain), inputs, chain.length, forward)
