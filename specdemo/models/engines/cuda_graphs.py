"""Recording of passes as CUDA graphs, also of drafts of several tokens with their sampling."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdemo.core.sampling import ChainSampler, SamplingParams, UnreadDraft, fitted

GRAPH_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # passes are padded to the next one
MAX_ROWS = GRAPH_ROWS[-1]
GRAPH_LIMIT = 32  # graphs per engine
_STREAMS = 32  # streams that torch returns in turn
_PASSES_BEFORE_REUSE = 256  # least passes between losses of streams
_POOL_BYTES = 22 << 20  # estimated bytes of a memory pool
_WORKSPACE_BYTES = 32 << 20  # cuBLAS workspace of each stream


def graph_rows(count: int) -> int:
    return next(rows for rows in GRAPH_ROWS if rows >= count)


def on_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers to a device without waiting for its work."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def recorded_event(device: torch.device) -> torch.cuda.Event:
    """Record an event with its time on the current stream of a device."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def graph_bytes(rows: int, vocab_size: int, width: int) -> int:
    """Estimate the bytes of a cache's graphs, of `rows` rows in total; `width`: bytes per logit."""
    return _POOL_BYTES + _WORKSPACE_BYTES + rows * vocab_size * width if rows else 0


OutputT = TypeVar("OutputT")


@dataclass(frozen=True)
class Recording(Generic[OutputT]):
    """A recorded pass: input buffers, graph, outputs, and rows of logits that it keeps.

    `inputs` includes constants: a graph does not keep alive what it reads.
    """

    inputs: tuple[Tensor, ...]
    graph: torch.cuda.CUDAGraph
    outputs: OutputT
    rows: int

    def replay(self, values: Sequence[Tensor]) -> OutputT:
        """Replay the pass for these first inputs; the next replay overwrites the outputs."""
        for buffer, value in zip(self.inputs, values, strict=False):
            buffer.copy_(value)
        self.graph.replay()
        return self.outputs


class GraphRecorder:
    """Records passes of a cache on its own stream and memory pool.

    Torch frees a stream's cuBLAS workspace with any graph of the stream (pytorch#193402), so caches share no streams
    and drop all graphs at once. The least recently used recorder loses its stream to a new one.
    """

    _recorders: weakref.WeakSet[GraphRecorder] = weakref.WeakSet()
    _passes = 0

    def __init__(self, device: torch.device) -> None:
        self.recordings: dict[Hashable, Recording[Any]] = {}
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._used, self._taken = 0, -_PASSES_BEFORE_REUSE  # values of `_passes`
        self._recorders.add(self)

    def recording(self, *key: Hashable) -> Recording[Any] | None:
        """Return a recording for use."""
        GraphRecorder._passes += 1
        self._used = self._passes
        return self.recordings.get(key)

    def record(
        self, key: Hashable, inputs: Sequence[Tensor], rows: int, forward: Callable[..., OutputT]
    ) -> Recording[OutputT] | None:
        """Capture `forward` of copies of `inputs`, after two runs that initialise libraries; return None if impossible.

        `rows`: rows of logits among the outputs. Raises `RuntimeError` if memory is insufficient, or a kernel cannot be
        captured.
        """
        if len(self.recordings) >= GRAPH_LIMIT:
            self.recordings.clear()
        buffers = tuple(value.clone() for value in inputs)
        with torch.cuda.device(self._device):
            if not self._graphs:
                self._stream, self._pool = self._unused_stream() or self._idle_stream(), torch.cuda.graph_pool_handle()
            if self._stream is None:
                return None
            current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):  # a failed `graph` does not restore the stream
                forward(*buffers), forward(*buffers)
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    outputs = forward(*buffers)
            current.wait_stream(self._stream)
        self._graphs.add(graph)
        self.recordings[key] = recording = Recording(buffers, graph, outputs, rows)
        return recording

    def _unused_stream(self) -> torch.cuda.Stream | None:
        used = {other._stream.cuda_stream for other in self._recorders if other._graphs and other._stream}
        new = (torch.cuda.Stream(self._device) for _ in range(_STREAMS))
        streams = itertools.chain([self._stream] if self._stream else [], new)
        return next((stream for stream in streams if stream.cuda_stream not in used), None)

    def _idle_stream(self) -> torch.cuda.Stream | None:
        others = [other for other in self._recorders if other._graphs and other._device == self._device]
        if not others or self._passes < max(other._taken for other in others) + _PASSES_BEFORE_REUSE:
            return None
        idle = min(others, key=lambda other: other._used)
        stream, idle._stream = idle._stream, None
        idle.recordings.clear()
        self._taken = self._passes
        return stream


@dataclass(frozen=True)
class ChainShape:
    """Chains of a run: most tokens, sampling parameters, and size of the vocabulary they are sampled from."""

    length: int
    sampling: SamplingParams
    vocab_size: int

    @classmethod
    def of(cls, sampler: ChainSampler, length: int) -> ChainShape:
        return cls(length, sampler.sampling, sampler.vocab_size)

    def buffers(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return buffers of limits and of random numbers, see `ChainSampler.write_exp_noise`."""
        limits = torch.zeros(self.length, 1, dtype=torch.float64, device=device)
        return limits, torch.ones(self.length, size, dtype=torch.float32, device=device)


class ChainOutput(NamedTuple):
    """Tensors of `UnreadDraft`."""

    ids: Tensor
    values: Tensor
    rows: Tensor


def chain_output(
    shape: ChainShape,
    limits: Tensor,
    exp_noise: Tensor,
    state: Tensor,
    following: Callable[[Tensor, Tensor, int], Tensor],
    output: Callable[[Tensor], Tensor],
    ids: Tensor | None = None,
) -> ChainOutput:
    """Sample a chain without host synchronisation.

    `output(state)` returns raw logits `[1, size]`, `following(state, token, i)` the state after token i, `[1]`. `ids`:
    the tokens of the logits. `limits` `[length, 1]` and `exp_noise`: see `replay_chain`.
    """
    tokens: list[Tensor] = []
    values: list[Tensor] = []
    rows: list[Tensor] = []
    largest: list[Tensor] = []
    for i, row in enumerate(exp_noise):
        logits = output(state)
        if ids is None:
            logits = fitted(logits, shape.vocab_size)
        index, probs, drawn = shape.sampling.draw(logits.float(), row)
        tokens.append(index if ids is None else ids.index_select(0, index))
        values.append(drawn)
        rows.append(probs)
        largest.append(logits.softmax(1).amax(1, keepdim=True))
        if i + 1 < len(exp_noise):
            state = following(state, tokens[-1], i)
    chain, included = torch.cat(tokens), _before_end(torch.cat(largest), limits)
    floats = chain[:, None].float()  # exact below 2^24
    return ChainOutput(chain, torch.cat((floats, torch.cat(values), included), 1), torch.cat(rows) * included)


def _before_end(largest: Tensor, limits: Tensor) -> Tensor:
    """Return 1 for the tokens before `PathProbability` with these `limits` ends the path, 0 for others, `[length, 1]`.

    `largest`: largest probabilities `[length, 1]`.
    """
    path = largest.double().cumprod(0)
    before = pad(path[:-1], (0, 0, 1, 0), value=1.0)
    ends = (before * before < limits) | (path < limits)
    return ends.logical_not().float().cumprod(0)


def replay_chain(
    recording: Recording[ChainOutput],
    values: Sequence[Tensor],
    sampler: ChainSampler,
    size: int,
    limits: Sequence[float],
) -> UnreadDraft | None:
    """Draft up to `len(limits)` tokens with a recording of `chain_output`, whose last inputs are its buffers.

    `limits`: see `DraftScorer.sample_chain`; the recorded chain goes on, and its further tokens are not used.
    """
    *_, least, exp_noise = recording.inputs
    count, device = len(limits), exp_noise.device
    started = recorded_event(device)
    if not sampler.write_exp_noise(exp_noise[:count, :size]):
        return None
    least[:count, 0].copy_(on_device(limits, device, torch.float64))
    ids, drawn, rows = recording.replay(values)
    return UnreadDraft(sampler, ids[:count], drawn[:count], rows[:count, :size], started, recorded_event(device))
