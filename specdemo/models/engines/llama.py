"""Engine for `LlamaWeights` with batch-invariant attention and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.core.comparison import ChainComparison, compared_rows, comparison_buffers
from specdemo.core.step import Draft
from specdemo.models.engines.chain_graph import ChainOutput, ChainShape, chain_output, replay_chain
from specdemo.models.engines.cuda_graphs import GRAPH_LIMIT, MAX_ROWS, GraphRecorder, Recording, graph_bytes, graph_rows
from specdemo.models.engines.engine import Cache, Entry, OneTextEngine, doubled
from specdemo.models.engines.generic import positions, visible
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.threads import torch_threads

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler, SamplingParams

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
    graphs: bool  # False after a failed capture
    chains: bool  # False after a failed capture of a chain

    @property
    def recordable(self) -> bool:
        """True if passes can be CUDA graphs."""

    def stop_recording(self, error: RuntimeError, chains: bool = False) -> None:
        """Record no further passes, or no further `chains`, after a failed capture."""

    def rotation(self, token_positions: Tensor) -> Tensor:
        """Return cosines and signed sines, `[2, n, 1, head_dim]`."""


@dataclass(frozen=True)
class PassShape:
    """Buffers of passes over the same number of rows."""

    angles: tuple[Tensor, ...]  # RoPE arguments of all heads `[n, heads, ...]`
    rotated: Tensor  # view of the position-dependent arguments


class LlamaCache(Cache):
    """KV cache of a text, with the buffers and recorded passes that refer to its memory."""

    def __init__(self, model: TorchModel) -> None:
        super().__init__()
        self._model, self._recordable = model, model.recordable
        self.recorder = GraphRecorder(model.device)
        self.chain: ChainShape | None = None  # recorded chains
        self.compared: SamplingParams | None = None  # parameters of recorded comparisons
        self.length = self.written = self.capacity = 0
        self.kv = torch.empty(0, 0, 0, 0)
        self.angles = torch.empty(0)
        self.masks: dict[int, tuple[Tensor, Tensor]] = {}  # causal mask of twice the capacity, aligned buffer
        self._shapes: dict[int, PassShape] = {}
        self._views: tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]] = (0, (), ())

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
    def kv_bytes(self) -> int:
        return (self.kv.nbytes + self.states.nbytes) // self.capacity * self.length if self.capacity else 0

    @property
    def reserved_bytes(self) -> int:
        rows = sum(recording.rows for recording in self.recorder.recordings.values())
        graphs = graph_bytes(rows, self._model.config.vocab_size, self._model.dtype.itemsize)
        return self.kv.nbytes + self.states.nbytes + graphs

    @property
    def records(self) -> bool:
        return self._recordable and self._model.graphs

    def select(self, chain: ChainShape | None, compared: SamplingParams | None = None) -> None:
        """Drop the recordings of runs with other parameters: a cache holds `GRAPH_LIMIT` recordings."""
        if (chain or self.chain) != self.chain or (compared or self.compared) != self.compared:
            self.drop_recordings()
        self.chain = chain or self.chain
        self.compared = compared or self.compared

    def chain_for(self, sampler: ChainSampler, count: int) -> ChainShape | None:
        """Return the prepared chain that drafts `count` tokens with `sampler`, if there is one."""
        chain = self.chain
        if not self.records or not self._model.chains or chain is None or count > chain.length:
            return None
        return chain if chain == ChainShape.of(sampler, chain.length) else None

    def drop_recordings(self) -> None:
        self.recorder.recordings.clear()

    def record(
        self, key: Hashable, inputs: tuple[Tensor, ...], rows: int, forward: Callable[[], OutputT], chain: bool = False
    ) -> Recording[OutputT] | None:
        """Record a pass over the buffers `inputs`, which keeps `rows` rows of logits; return None if impossible."""
        if len(self.recorder.recordings) >= GRAPH_LIMIT:
            self.drop_recordings()
        try:
            run = self.recorder.record(forward)
        except RuntimeError as error:  # memory is insufficient, or a kernel cannot be captured
            self.drop_recordings()
            self._model.stop_recording(error, chain)
            return None
        if run is None:
            return None
        self.recorder.recordings[key] = recording = Recording(inputs, run, rows)
        return recording

    def reserve(self, end: int) -> None:
        if end <= self.capacity:
            return
        model, old = self._model, self.kv
        capacity = doubled(end)
        # Masked values are multiplied by 0 and must not be NaN.
        self.kv = torch.zeros(
            (len(model.layers), 2 * model.kv_heads, capacity, model.head_dim), dtype=model.dtype, device=model.device
        )
        if self.capacity:
            self.kv[:, :, : self.capacity] = old
            old.zero_()
        self.capacity = capacity
        self._grow_states(capacity, model.width, model.device)
        self.angles = model.rotation(torch.arange(capacity, device=model.device))
        self.masks.clear()
        self.drop_recordings()
        self._views = (0, (), ())

    def views(self, width: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return keys and values of the first `width` positions, by layer."""
        if width != self._views[0]:
            keys, values = self.kv[:, None, :, :width].chunk(2, 2)
            self._views = width, keys.unbind(), values.unbind()
        return self._views[1:]

    def columns(self, slots: slice) -> tuple[tuple[Tensor, ...], dict[int, Tensor]]:
        """Return keys with values `[slots, heads, dim]` by layer, and hidden states `[slots, width]` by tap."""
        states = self.states[slots].unbind(1)
        return self.kv[:, :, slots].transpose(1, 2).unbind(), dict(zip(self.taps, states, strict=True))

    def shape(self, n: int, angles: Tensor) -> PassShape:
        """Return the buffers for n rows."""
        if n not in self._shapes:
            cached = {rows: shape for rows, shape in self._shapes.items() if rows <= MAX_ROWS}
            self._shapes = cached | {n: self.new_shape(n, angles)}
        shape = self._shapes[n]
        shape.rotated.copy_(angles)
        return shape

    def new_shape(self, n: int, angles: Tensor) -> PassShape:
        """Return new buffers. Values are rotated by 0, so that one copy writes keys and values."""
        model = self._model
        heads, rotated = model.heads + 2 * model.kv_heads, model.heads + model.kv_heads
        padded = angles.new_zeros(len(angles), n, heads, angles.shape[-1])
        padded[0, :, rotated:] = 1
        return PassShape(padded.unbind(), padded[:, :, :rotated])


class LlamaEngine(OneTextEngine[LlamaCache]):
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

    @torch.inference_mode()
    def run_compared(self, entry: Entry[LlamaCache], comparison: ChainComparison) -> Tensor:
        with torch_threads(entry.cache.threads):
            logits = self._pass(entry.cache, entry.new, entry.held, entry.draft, comparison)
        return logits[-len(entry.draft) - 1 :]

    def _pass(
        self,
        cache: LlamaCache,
        new: list[int] | Tensor,
        held: int,
        draft: Draft,
        comparison: ChainComparison | None = None,
    ) -> Tensor:
        while len(new) > PROMPT_CHUNK + len(draft):
            self._pass(cache, new[:PROMPT_CHUNK], held, Draft())
            new, held = new[PROMPT_CHUNK:], held + PROMPT_CHUNK
        n, last = len(new), len(draft) + 1
        if cache.records and n <= MAX_ROWS:
            logits = self._replay(cache, new, held, draft, comparison)[:n][-last:]
        else:
            inputs, shape = self._inputs(cache, new, held, draft, held + n + -(held + n) % _MASK_MULTIPLE)
            columns = cache.columns(slice(held, held + n))
            views = cache.views(inputs[1].shape[-1])
            logits = self._forward(*inputs[:2], shape, views, columns, Tensor.copy_, last)
        cache.length = held + n
        return logits

    @torch.inference_mode()
    def prepare(
        self,
        cache: LlamaCache,
        rows: Iterable[int],
        start: int,
        end: int,
        chain: ChainShape | None = None,
        compared: SamplingParams | None = None,
    ) -> None:
        if not cache.records or max(start, cache.length) + MAX_ROWS > end:
            return
        try:
            cache.reserve(doubled(end))
        except RuntimeError:  # the run reports a lack of memory
            return
        counts = sorted({graph_rows(n) for n in rows if n <= MAX_ROWS})
        if chain is not None and chain.length + UNDRAFTED_ROWS > MAX_ROWS:
            chain = None
        cache.select(chain, compared)
        width = doubled(start + 1)
        while width <= doubled(end) and cache.records:
            for n in range(1, UNDRAFTED_ROWS + 1):  # first, since a failed capture drops all recordings
                if chain and self._model.chains and (n, width, chain) not in cache.recorder.recordings:
                    self._record_chain(cache, chain, n, end - MAX_ROWS, width)
            for n in counts:
                if (n, width, compared) not in cache.recorder.recordings:  # recording writes behind the text
                    self._record_pass(cache, *self._inputs(cache, [0] * n, end - n, Draft(), width), width, compared)
            width *= 2

    @torch.inference_mode()
    def sample_chain(
        self, cache: LlamaCache, new: list[int], held: int, count: int, sampler: ChainSampler
    ) -> list[int] | None:
        """Replay a prepared chain; earlier rows have a pass of their own."""
        if (chain := cache.chain_for(sampler, count)) is None:
            return None
        if (many := len(new) - 1) >= UNDRAFTED_ROWS:
            self._pass(cache, new[:many], held, Draft())
            new, held = new[many:], held + many
        end = held + len(new)
        width = doubled(end + chain.length - 1)
        if width > cache.capacity or not (recording := cache.recorder.recording(len(new), width, chain)):
            return None
        inputs, _ = self._inputs(cache, new, held, Draft(), width)
        cache.length = end + count - 1
        cache.written = max(cache.written, end + chain.length - 1)
        values = (*inputs, torch.full((1,), end, device=self._model.device))
        return replay_chain(recording, values, sampler, count, chain.vocab_size)

    def _inputs(
        self, cache: LlamaCache, new: list[int] | Tensor, held: int, draft: Draft, width: int
    ) -> tuple[tuple[Tensor, Tensor, Tensor], PassShape]:
        n, end = len(new), held + len(new)
        device = self._model.device
        cache.reserve(max(end, width))
        if draft.is_chain:
            angles = cache.angles[:, held:end]
            mask = self._chain_mask(cache, n, held, width)
        else:
            angles = cache.angles[:, torch.tensor(positions(n, held, draft), device=device)]
            mask = self._mask(F.pad(visible(n, held, draft), (0, width - end)))
        cache.written = max(end, cache.written)
        inputs = torch.as_tensor(new, device=device), mask, torch.arange(held, end, device=device)
        return inputs, cache.shape(n, angles)

    def _forward(
        self,
        ids: Tensor,
        mask: Tensor,
        shape: PassShape,
        views: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
        columns: tuple[tuple[Tensor, ...], dict[int, Tensor]],
        write: Callable[[Tensor, Tensor], object],
        last: int,
    ) -> Tensor:
        """Return logits of the last `last` rows; `write(column, rows)` stores rows in `LlamaCache.columns`."""
        model, n = self._model, len(ids)
        heads, kv_heads = model.heads, model.kv_heads
        dim = model.head_dim
        shared, group = 2 * kv_heads, heads // kv_heads
        keys, values = views
        stored, tapped = columns
        rows = model.embed(ids)
        for i, layer in enumerate(model.layers):
            if i in tapped:
                write(tapped[i], rows)
            qkv = layer.qkv(layer.input_norm(rows)).view(n, heads + shared, dim)
            if layer.norm_heads is not None:
                qkv = layer.norm_heads(qkv)
            qkv = model.turn(qkv, *shape.angles)
            write(stored[i], qkv.narrow(1, heads, shared))
            # Grouped query heads become rows of one head.
            queries = qkv.narrow(1, 0, heads).view(n, kv_heads, group, dim).transpose(0, 1)
            queries = queries.reshape(1, kv_heads, n * group, dim)
            mixed = F.scaled_dot_product_attention(queries, keys[i], values[i], attn_mask=mask)
            mixed = mixed.view(kv_heads, n, group, dim).transpose(0, 1)
            rows = rows.add_(layer.out(mixed.reshape(n, heads * dim)))
            gate, up = layer.gate_up(layer.mlp_norm(rows)).chunk(2, -1)
            rows = rows.add_(layer.down(F.silu(gate).mul_(up)))
        if (end := len(model.layers)) not in tapped:
            return model.head(model.final_norm(rows[-last:]))
        write(tapped[end], rows := model.final_norm(rows))
        return model.head(rows[-last:])

    def _replay(
        self,
        cache: LlamaCache,
        new: list[int] | Tensor,
        held: int,
        draft: Draft,
        comparison: ChainComparison | None = None,
    ) -> Tensor:
        if padding := graph_rows(len(new)) - len(new):  # the next pass overwrites padding
            first = len(draft) - 1 if draft.is_chain else -1
            parents = (*draft.parents, first, *range(len(draft), len(draft) + padding - 1))
            draft = Draft((*draft.tokens, *[0] * padding), parents)
            new = [*(new.tolist() if isinstance(new, Tensor) else new), *[0] * padding]
        n, width = len(new), doubled(held + len(new))
        inputs, shape = self._inputs(cache, new, held, draft, width)
        if comparison and (recording := cache.recorder.recording(n, width, comparison.sampling)):
            return _compared(recording, inputs, comparison)
        recording = cache.recorder.recording(n, width, None) or self._record_pass(cache, inputs, shape, width)
        if recording is None:  # equal shapes give equal bits
            columns = cache.columns(slice(held, held + n))
            return self._forward(*inputs[:2], shape, cache.views(width), columns, Tensor.copy_, n)
        logits, *_ = recording.replay(inputs)
        return logits.clone()

    def _record_pass(
        self,
        cache: LlamaCache,
        inputs: tuple[Tensor, Tensor, Tensor],
        shape: PassShape,
        width: int,
        compared: SamplingParams | None = None,
    ) -> Recording[tuple[Tensor, ...]] | None:
        ids, mask, slots = (value.clone() for value in inputs)
        n, model = len(ids), self._model
        buffers: tuple[Tensor, ...] = (ids, mask, slots)
        views, columns = cache.views(width), cache.columns(slice(None))
        if compared is not None:
            rows = n if compared.temperature else 0
            buffers += comparison_buffers(rows, model.config.vocab_size, model.device)

        def forward() -> tuple[Tensor, ...]:
            logits = self._forward(ids, mask, shape, views, columns, partial(_write_rows, slots), n)
            return (logits,) if compared is None else (logits, *compared_rows(compared, logits, ids, *buffers[3:]))

        return cache.record((n, width, compared), buffers, n, forward)

    def _record_chain(self, cache: LlamaCache, chain: ChainShape, n: int, held: int, width: int) -> None:
        model = self._model
        (ids, mask, slots), shape = self._inputs(cache, [0] * n, held, Draft(), width)
        mask, end = mask.clone(), slots[-1:] + 1
        arrivals = chain.arrivals(chain.vocab_size, model.device)
        views, columns = cache.views(width), cache.columns(slice(None))
        row_shape = cache.new_shape(1, cache.angles[:, :1])
        keys = torch.arange(width, device=model.device)
        visible = mask.new_zeros(len(mask) // n, width)

        def first() -> Tensor:
            return self._forward(ids, mask, shape, views, columns, partial(_write_rows, slots), 1)

        def following(token: Tensor, i: int) -> Tensor:
            position = end + i
            row_shape.rotated.copy_(cache.angles.index_select(1, position))
            hidden = visible.masked_fill(keys > position, torch.finfo(model.dtype).min)
            return self._forward(token, hidden, row_shape, views, columns, partial(_write_rows, position), 1)

        def forward() -> ChainOutput:
            return chain_output(chain, arrivals, first, following)

        cache.record((n, width, chain), (ids, mask, slots, end, arrivals), chain.length, forward, chain=True)

    def _chain_mask(self, cache: LlamaCache, n: int, held: int, width: int) -> Tensor:
        """Return the mask of a chain; for few rows copied from a cached causal mask.

        A view would start at any element, but CUDA's memory-efficient attention requires 16-byte alignment.
        """
        ones = partial(torch.ones, dtype=torch.bool)
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
        mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill_(~seen, torch.finfo(model.dtype).min)
        return mask.repeat_interleave(model.heads // model.kv_heads, 0).to(model.device)


def _compared(
    recording: Recording[tuple[Tensor, ...]], inputs: tuple[Tensor, ...], comparison: ChainComparison
) -> Tensor:
    buffers = recording.inputs[len(inputs) :]
    comparison.write(*buffers)
    logits, *compared = recording.replay((*inputs, *buffers))
    values, probs = (rows[: len(comparison.draft) + 1] for rows in compared)
    comparison.result = values, probs
    return logits.clone()


def _write_rows(slots: Tensor, column: Tensor, rows: Tensor) -> None:
    column.index_copy_(0, slots, rows.to(column.dtype))
