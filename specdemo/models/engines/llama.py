"""Engine for `LlamaWeights` with batch-invariant attention and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.core.comparison import compared_rows, comparison_buffers
from specdemo.core.step import Draft
from specdemo.models.engines.cuda_graphs import (
    MAX_ROWS,
    ChainOutput,
    ChainShape,
    GraphRecorder,
    Recording,
    chain_output,
    graph_bytes,
    graph_rows,
    on_device,
    replay_chain,
)
from specdemo.models.engines.engine import BufferCache, Engine, Entry, RepeatedPasses, cache_capacity
from specdemo.models.engines.generic import positions, visible
from specdemo.models.engines.llama_weights import LlamaWeights

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler, SamplingParams, UnreadDraft

OutputT = TypeVar("OutputT")

UNDRAFTED_ROWS = 2  # most rows of a chain that are not drafted: the last draft token and the bonus token
PROMPT_CHUNK = 512  # prompt rows per pass: masks grow with rows times keys
_MASK_MULTIPLE = 16  # multiple of keys, since CUDA's attention requires aligned mask rows


class TorchModel(Protocol):
    """Interface of a model, or of a drafting head as a model of its layers, with a `LlamaCache`."""

    config: Any
    device: torch.device
    dtype: torch.dtype
    layers: list[Any]
    width: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def graphs(self) -> bool:
        """False after a failed capture."""

    @property
    def recordable(self) -> bool:
        """True if passes can be CUDA graphs."""

    def stop_recording(self, error: RuntimeError) -> None:
        """Record no further passes after a failed capture."""

    def rotation(self, token_positions: Tensor) -> Tensor:
        """Return cosines and signed sines, `[2, n, 1, head_dim]`."""


class LlamaCache(BufferCache):
    """KV cache of a text, with the buffers and recorded passes that refer to its memory."""

    def __init__(self, model: TorchModel) -> None:
        shape = len(model.layers), 2 * model.kv_heads, 0, model.head_dim
        super().__init__(torch.empty(shape, dtype=model.dtype, device=model.device), model.width)
        self._model, self._recordable = model, model.recordable
        self.recorder = GraphRecorder(model.device)
        self.chain: ChainShape | None = None  # recorded chains
        self.compared: SamplingParams | None = None  # parameters of comparisons in recorded passes
        self.slots = torch.empty(0, dtype=torch.int64)  # position i at index i
        self.angles = torch.empty(0)
        self.masks: dict[int, tuple[Tensor, Tensor]] = {}  # causal mask of twice the capacity, aligned buffer

    @torch.inference_mode()
    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        end = length + len(slots)
        if slots and list(slots) != list(range(length, end)):
            index = torch.tensor(slots, device=self.kv.device)
            self.kv[:, :, length:end] = self.kv[:, :, index]
            self.states[length:end] = self.states[index]
        self.length = end

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero the cache: masked values must also be finite."""
        self.kv[:, :, : self.written].zero_()
        self.states[: self.written].zero_()
        self.length = self.written = 0

    @property
    def reserved_bytes(self) -> int:
        rows = sum(recording.rows for recording in self.recorder.recordings.values())
        return super().reserved_bytes + graph_bytes(rows, self._model.config.vocab_size, self._model.dtype.itemsize)

    @property
    def records(self) -> bool:
        return self._recordable and self._model.graphs

    def select(self, passes: RepeatedPasses) -> None:
        """Drop the recordings of runs with other parameters: a cache holds `GRAPH_LIMIT` recordings."""
        chain, compared = passes.chain or self.chain, passes.compared or self.compared
        if (chain, compared) != (self.chain, self.compared):
            self.drop_recordings()
        self.chain, self.compared = chain, compared

    def chain_for(self, sampler: ChainSampler, count: int) -> ChainShape | None:
        """Return the prepared chain that drafts `count` tokens with `sampler`, if there is one."""
        chain = self.chain
        if not self.records or chain is None or count > chain.length:
            return None
        return chain if chain == ChainShape.of(sampler, chain.length) else None

    def drop_recordings(self) -> None:
        self.recorder.recordings.clear()

    def record(
        self, key: Hashable, inputs: Sequence[Tensor], rows: int, forward: Callable[..., OutputT]
    ) -> Recording[OutputT] | None:
        """Record `forward` of copies of `inputs`, see `GraphRecorder.record`; record no more after a failure."""
        try:
            return self.recorder.record(key, inputs, rows, forward)
        except RuntimeError as error:
            self.drop_recordings()
            self._model.stop_recording(error)
            return None

    def _replace_buffers(self) -> None:
        self.slots = torch.arange(self.capacity, device=self.kv.device)
        self.angles = self._model.rotation(self.slots)
        self.masks.clear()
        self.drop_recordings()


class PassInputs(NamedTuple):
    """Rows of a pass on the device."""

    ids: Tensor  # `[n]`
    slots: Tensor  # `[n]` positions in the cache
    positions: Tensor  # `[n]` positions in the text
    mask: Tensor  # `[n * query heads of a key head, width]`


class LlamaEngine(Engine[LlamaCache]):
    """Passes of `LlamaWeights`, recorded as CUDA graphs on a GPU."""

    reusable = True
    samples_chains = compares = True
    hidden_states = True

    def __init__(self, model: LlamaWeights) -> None:
        super().__init__()
        self._model = model

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def new_cache(self, source: Sequence[int] = ()) -> LlamaCache:
        return LlamaCache(self._model)

    def release(self) -> None:
        super().release()
        self._model.drop_variants()

    @contextmanager
    def recording_disabled(self) -> Iterator[None]:
        before = self._model.graphs
        self._model.graphs = False
        try:
            yield
        finally:
            self._model.graphs = before

    def _pass(self, entry: Entry[LlamaCache]) -> Tensor:
        cache, new, held, draft, _ = entry
        while len(new) > PROMPT_CHUNK + len(draft):
            self._pass(Entry(cache, new[:PROMPT_CHUNK], held, Draft()))
            new, held = new[PROMPT_CHUNK:], held + PROMPT_CHUNK
        n, last = len(new), len(draft) + 1
        if cache.records and n <= MAX_ROWS:
            logits = self._replay(entry._replace(new=new, held=held))[-last:]
        else:
            inputs = self._inputs(cache, new, held, draft, held + n + -(held + n) % _MASK_MULTIPLE)
            logits = self._model.lm_head(self._states(cache, *inputs)[-last:])
        cache.length = held + n
        return logits

    @torch.inference_mode()
    def prepare(self, cache: LlamaCache, passes: RepeatedPasses) -> None:
        end = passes.end
        if not cache.records or max(passes.start, cache.length) + MAX_ROWS > end:
            return
        try:
            cache.reserve(cache_capacity(end))
        except RuntimeError:  # the run reports a lack of memory
            return
        cache.select(passes)
        width = cache_capacity(passes.start + 1)
        while width <= cache_capacity(end) and cache.records:
            self._record_chain(cache, end - MAX_ROWS, width)
            for n in sorted({graph_rows(n) for n in passes.rows if n <= MAX_ROWS}):
                self._recorded(cache, self._inputs(cache, [0] * n, end - n, Draft(), width))  # behind the text
            width *= 2

    @torch.inference_mode()
    def sample_chain(
        self, cache: LlamaCache, new: list[int], held: int, sampler: ChainSampler, limits: Sequence[float]
    ) -> UnreadDraft | None:
        """Replay a prepared chain; earlier rows have a pass of their own."""
        chain = cache.chain_for(sampler, len(limits))
        if chain is None:
            return None
        if (many := len(new) - UNDRAFTED_ROWS) > 0:
            self._pass(Entry(cache, new[:many], held, Draft()))
            new, held = new[many:], held + many
        n, written = len(new), held + UNDRAFTED_ROWS + chain.length - 1
        recording = cache.recorder.recording(cache_capacity(written), chain) if written <= cache.capacity else None
        if recording is None:
            return None
        ids = on_device(new + [0] * (UNDRAFTED_ROWS - n), self._model.device)
        cache.length = held + n + len(limits) - 1
        cache.reserve(written)
        values = ids, cache.slots[held : held + UNDRAFTED_ROWS], cache.slots[n - 1 : n]
        return replay_chain(recording, values, sampler, chain.vocab_size, limits)

    def _inputs(self, cache: LlamaCache, new: list[int] | Tensor, held: int, draft: Draft, width: int) -> PassInputs:
        n, end = len(new), held + len(new)
        device = self._model.device
        cache.reserve(max(end, width))
        ids, slots = new if isinstance(new, Tensor) else on_device(new, device), cache.slots[held:end]
        if draft.is_chain:
            return PassInputs(ids, slots, slots, self._chain_mask(cache, n, held, width))
        mask = self._mask(F.pad(visible(n, held, draft).to(device), (0, width - end)))
        return PassInputs(ids, slots, torch.tensor(positions(n, held, draft), device=device), mask)

    def _states(self, cache: LlamaCache, ids: Tensor, slots: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Store keys, values and hidden states in `slots`; return the rows `[n, width]` after the final norm."""
        model, n = self._model, len(ids)
        heads, kv_heads = model.heads, model.kv_heads
        dim = model.head_dim
        group = heads // kv_heads
        angles = cache.angles.index_select(1, positions)
        keys, values = (part.unbind() for part in cache.kv[:, None, :, : mask.shape[-1]].chunk(2, 2))
        stored, tapped = cache.kv.unbind(), dict(zip(cache.taps, cache.states.unbind(1), strict=True))
        rows = model.embed(ids)
        for i, layer in enumerate(model.layers):
            if i in tapped:
                tapped[i].index_copy_(0, slots, rows.float())
            qkv = layer.qkv(layer.input_norm(rows)).view(n, heads + 2 * kv_heads, dim)
            if layer.norm_heads is not None:
                qkv = layer.norm_heads(qkv)
            model.apply_rope(qkv.narrow(1, 0, heads + kv_heads), *angles)
            stored[i].index_copy_(1, slots, qkv.narrow(1, heads, 2 * kv_heads).transpose(0, 1))
            # Grouped query heads become rows of one head.
            queries = qkv.narrow(1, 0, heads).view(n, kv_heads, group, dim).transpose(0, 1)
            queries = queries.reshape(1, kv_heads, n * group, dim)
            mixed = F.scaled_dot_product_attention(queries, keys[i], values[i], attn_mask=mask)
            mixed = mixed.view(kv_heads, n, group, dim).transpose(0, 1)
            rows = rows.add_(layer.out(mixed.reshape(n, heads * dim)))
            gate, up = layer.gate_up(layer.mlp_norm(rows)).chunk(2, -1)
            rows = rows.add_(layer.down(F.silu(gate).mul_(up)))
        rows = model.final_norm(rows)
        if (end := len(model.layers)) in tapped:
            tapped[end].index_copy_(0, slots, rows.float())
        return rows

    def _replay(self, entry: Entry[LlamaCache]) -> Tensor:
        """Return the logits of all rows from a recorded pass, and set the result of the comparison."""
        cache, new, held, draft, comparison = entry
        n = len(new)
        if padding := graph_rows(n) - n:  # the next pass overwrites padding
            draft = draft.padded(padding)
            new = F.pad(new, (0, padding)) if isinstance(new, Tensor) else [*new, *[0] * padding]
        inputs = self._inputs(cache, new, held, draft, cache_capacity(held + len(new)))
        recording = self._recorded(cache, inputs)
        if recording is None:  # equal shapes give equal bits
            return self._model.lm_head(self._states(cache, *inputs))[:n]
        if comparison is None or comparison.sampling != cache.compared:
            logits, *_ = recording.replay(inputs)
        else:
            row = n - len(entry.draft) - 1
            comparison.write(row, *recording.inputs[len(inputs) :])
            logits, *compared = recording.replay(inputs)
            values, probs = (rows[row : row + comparison.length + 1] for rows in compared)
            comparison.result = values, probs
        return logits[:n].clone()

    def _recorded(self, cache: LlamaCache, inputs: PassInputs) -> Recording[tuple[Tensor, ...]] | None:
        """Return the recording of passes of this shape, with a comparison if the cache has one."""
        n, width = len(inputs.ids), inputs.mask.shape[-1]
        compared = cache.compared
        if recording := cache.recorder.recording(n, width):
            return recording

        def forward(
            ids: Tensor, slots: Tensor, positions: Tensor, mask: Tensor, *buffers: Tensor
        ) -> tuple[Tensor, ...]:
            logits = self._model.lm_head(self._states(cache, ids, slots, positions, mask))
            return (logits,) if compared is None else (logits, *compared_rows(compared, logits, ids, *buffers))

        vocab = self._model.config.vocab_size
        buffers = () if compared is None else comparison_buffers(compared, n, vocab, self._model.device)
        return cache.record((n, width), (*inputs, *buffers), n, forward)

    def _record_chain(self, cache: LlamaCache, held: int, width: int) -> None:
        """Record the chain of the cache after `UNDRAFTED_ROWS` rows, of which the last may be unused."""
        chain = cache.chain
        if chain is None or chain.length + UNDRAFTED_ROWS > MAX_ROWS or (width, chain) in cache.recorder.recordings:
            return

        def states(ids: Tensor, slots: Tensor) -> Tensor:
            mask = self._mask(cache.slots[:width] <= slots[:, None])
            return self._states(cache, ids, slots, slots, mask)

        def forward(ids: Tensor, slots: Tensor, last: Tensor, limits: Tensor, exp_noise: Tensor) -> ChainOutput:
            end = slots.index_select(0, last) + 1
            return chain_output(
                chain,
                limits,
                exp_noise,
                states(ids, slots).index_select(0, last),
                lambda state, token, i: states(token, end + i),
                self._model.lm_head,
            )

        slots = cache.slots[held : held + UNDRAFTED_ROWS]
        inputs = torch.zeros_like(slots), slots, cache.slots[:1], *chain.buffers(chain.vocab_size, self._model.device)
        cache.record((width, chain), inputs, chain.length, forward)

    def _chain_mask(self, cache: LlamaCache, n: int, held: int, width: int) -> Tensor:
        """Return the mask of a chain; for few rows copied from a cached causal mask.

        A view would start at any element, but CUDA's memory-efficient attention requires 16-byte alignment.
        """
        ones = partial(torch.ones, dtype=torch.bool, device=self._model.device)
        if n > MAX_ROWS:
            return self._mask(ones(n, width).tril(held))
        if n not in cache.masks:
            causal = self._mask(ones(n, 2 * cache.capacity).tril(cache.capacity))
            cache.masks[n] = causal, causal.new_empty(len(causal) * cache.capacity)
        causal, buffer = cache.masks[n]
        first = cache.capacity - held
        return buffer[: len(causal) * width].view(len(causal), width).copy_(causal[:, first : first + width])

    def _mask(self, seen: Tensor) -> Tensor:
        model = self._model
        mask = seen.logical_not().to(model.dtype).mul_(torch.finfo(model.dtype).min)
        return mask.repeat_interleave(model.heads // model.kv_heads, 0)
