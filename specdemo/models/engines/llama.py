"""Engine for `LlamaWeights`: KV cache of one request, batch-invariant attention, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.engines.generic import positions, visible
from specdemo.models.engines.llama_weights import LlamaWeights

PROMPT_CHUNK = 512  # prompt rows per pass: masks grow with rows times keys
_CACHED_ROWS = 16  # limit for cached masks and recordings

# The last bits of attention depend on the numbers of rows and keys (vector width, small-batch kernels, split sums), but
# not for these numbers (observed with oneDNN and MKL on Zen 4; `check_invariance` tests the local machine).
KEY_BLOCK = 512  # keys per kernel block
LAST_BLOCK_KEYS = (64, 128, 192, 384, 512)
_QUERY_ROWS = 4  # query rows are padded to a multiple


def padded_keys(count: int) -> int:
    blocks, part = divmod(count, KEY_BLOCK)
    return blocks * KEY_BLOCK + (next(width for width in LAST_BLOCK_KEYS if width >= part) if part else 0)


Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


@dataclass(frozen=True)
class Recording:
    """A recorded pass: input buffers (token ids, mask, positions) and replay function."""

    inputs: tuple[Tensor, Tensor, Tensor]
    replay: Callable[[], Tensor]


@dataclass(frozen=True)
class PassShape:
    """Buffers shared by passes over the same number of rows."""

    angles: tuple[Tensor, ...]  # RoPE arguments of all heads `[n, heads, ...]`
    rotated: Tensor  # view of the position-dependent ones
    query: Tensor  # padded queries `[1, kv_heads, n * group + padding, dim]`
    unpadded: Tensor  # view without padding `[n, kv_heads, group, dim]`


def record_graph(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture `forward` as a CUDA graph. Each replay overwrites the returned tensor.

    Two warm-up runs on a side stream initialise libraries, which must not be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward(), forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


class LlamaEngine:
    def __init__(self, model: LlamaWeights, record: Recorder | None = None) -> None:
        self._model = model
        self._record = record or (record_graph if model.recordable else None)
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._length = self._written = self._capacity = 0
        self._kv = torch.empty(0, 0, 0, 0)  # [layers, key heads + value heads, positions, dim]
        self._angles = torch.empty(0)
        self._shapes: dict[int, PassShape] = {}
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}  # causal mask of twice the capacity, aligned buffer
        self._states: tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]] = (0, (), ())

    def keep(self, length: int, slots: list[int]) -> None:
        end = length + len(slots)
        if slots and slots != list(range(length, end)):
            index = torch.tensor(slots, device=self._kv.device)
            self._kv[:, :, length:end] = self._kv[:, :, index]
        self._length = end

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero the cache: masked values must be finite, and texts must not outlive their request."""
        self._kv[:, :, : self._written].zero_()
        self._length = self._written = 0

    @property
    def kv_bytes(self) -> int:
        return self._kv[:, :, : self._length].numel() * self._kv.element_size() if self._capacity else 0

    @property
    def reserved_bytes(self) -> int:
        return self._kv.numel() * self._kv.element_size()

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        model = self._model
        while len(new) > PROMPT_CHUNK + len(draft):
            self.run(new[:PROMPT_CHUNK], held, Draft())
            new, held = new[PROMPT_CHUNK:], held + PROMPT_CHUNK
        n, end = len(new), held + len(new)
        if end > self._capacity:
            self._grow(end)
        width = padded_keys(end)
        if draft.is_chain:
            angles = self._angles[:, held:end]
            mask = self._chain_mask(n, held, width)
        else:
            angles = self._angles[:, torch.tensor(positions(n, held, draft), device=model.device)]
            mask = self._mask(F.pad(visible(n, held, draft), (0, width - end)))
        shape = self._shape(n, angles)
        if width != self._states[0]:
            keys_and_values = self._kv[:, None, :, :width].chunk(2, 2)
            self._states = (width, *(states.unbind() for states in keys_and_values))
        ids = torch.as_tensor(new, device=model.device)
        if self._record and n <= _CACHED_ROWS:
            logits = self._replay(ids, mask, shape, held)[-len(draft) - 1 :]
        else:
            slots = self._kv[:, :, held:end].transpose(1, 2).unbind()
            logits = self._forward(ids, mask, shape, lambda i, states: slots[i].copy_(states), len(draft) + 1)
        self._length, self._written = end, max(end, self._written)
        return logits

    def _forward(
        self, ids: Tensor, mask: Tensor, shape: PassShape, write: Callable[[int, Tensor], object], last: int
    ) -> Tensor:
        """Return logits of the last `last` rows; `write(layer, states)` stores KV states `[n, 2 * kv_heads, dim]`."""
        model, n = self._model, len(ids)
        heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
        shared, group = 2 * kv_heads, heads // kv_heads
        _, keys, values = self._states
        rows = F.embedding(ids, model.embedding)
        for i, layer in enumerate(model.layers):
            qkv = layer.qkv(layer.enter(rows)).view(n, heads + shared, dim)
            if layer.norm_heads is not None:
                qkv = layer.norm_heads(qkv)
            qkv = model.turn(qkv, *shape.angles)
            write(i, qkv.narrow(1, heads, shared))
            # Grouped query heads become rows of one head.
            shape.unpadded.copy_(qkv.narrow(1, 0, heads).view(n, kv_heads, group, dim))
            mixed = F.scaled_dot_product_attention(shape.query, keys[i], values[i], attn_mask=mask)
            mixed = mixed.narrow(2, 0, n * group).view(kv_heads, n, group, dim).transpose(0, 1)
            rows = rows.add_(layer.out(mixed.reshape(n, heads * dim)))
            gate, up = layer.gate_up(layer.between(rows)).chunk(2, -1)
            rows = rows.add_(layer.down(F.silu(gate).mul_(up)))
        return model.head(model.leave(rows[-last:]))

    def _replay(self, ids: Tensor, mask: Tensor, shape: PassShape, held: int) -> Tensor:
        n, width = len(ids), mask.shape[1]
        slots = torch.arange(held, held + n, device=ids.device)
        if (n, width) not in self._recordings:
            inputs = ids.clone(), mask.clone(), slots.clone()

            def forward() -> Tensor:
                def write(i: int, states: Tensor) -> object:
                    return self._kv[i].transpose(0, 1).index_copy_(0, inputs[2], states)

                return self._forward(inputs[0], inputs[1], shape, write, n)

            assert self._record is not None
            self._recordings[n, width] = Recording(inputs, self._record(forward))
        recording = self._recordings[n, width]
        for buffer, value in zip(recording.inputs, (ids, mask, slots), strict=True):
            buffer.copy_(value)
        return recording.replay().clone()

    def _grow(self, end: int) -> None:
        model, old = self._model, self._kv
        capacity = max(KEY_BLOCK, 2 * self._capacity, end + -end % KEY_BLOCK)
        # Masked values are multiplied by 0 and must not be NaN.
        self._kv = torch.zeros(
            (len(model.layers), 2 * model.kv_heads, capacity, model.head_dim), dtype=model.dtype, device=model.device
        )
        if self._capacity:
            self._kv[:, :, : self._capacity] = old
        self._capacity = capacity
        self._angles = model.rotation(torch.arange(capacity, device=model.device))
        self._masks.clear()
        self._recordings.clear()
        self._states = (0, (), ())

    def _shape(self, n: int, angles: Tensor) -> PassShape:
        """Return the buffers for n rows. Values are rotated by 0, so that one copy writes keys and values."""
        model = self._model
        if n not in self._shapes:
            heads, rotated = model.heads + 2 * model.kv_heads, model.heads + model.kv_heads
            padded = angles.new_zeros(len(angles), n, heads, angles.shape[-1])
            padded[0, :, rotated:] = 1
            group = model.heads // model.kv_heads
            query = torch.zeros(
                (1, model.kv_heads, n * group + -n * group % _QUERY_ROWS, model.head_dim),
                dtype=model.dtype,
                device=model.device,
            )
            unpadded = query[0, :, : n * group].unflatten(1, (n, group)).transpose(0, 1)
            cached = {rows: shape for rows, shape in self._shapes.items() if rows <= _CACHED_ROWS}
            self._shapes = cached | {n: PassShape(padded.unbind(), padded[:, :, :rotated], query, unpadded)}
        shape = self._shapes[n]
        shape.rotated.copy_(angles)
        return shape

    def _chain_mask(self, n: int, held: int, width: int) -> Tensor:
        """Return the mask of a chain; for few rows copied from a cached causal mask.

        A view would start at any element, but CUDA's memory-efficient attention requires 16-byte alignment.
        """
        ones = partial(torch.ones, dtype=torch.bool, device=self._model.device)
        if n > _CACHED_ROWS:
            return self._mask(ones(n, width).tril(held))
        if n not in self._masks:
            causal = self._mask(ones(n, 2 * self._capacity).tril(self._capacity))
            self._masks[n] = causal, causal.new_empty(len(causal) * self._capacity)
        causal, buffer = self._masks[n]
        first = self._capacity - held
        return buffer[: len(causal) * width].view(len(causal), width).copy_(causal[:, first : first + width])

    def _mask(self, seen: Tensor) -> Tensor:
        """Convert to an additive mask `[n * group + padding, keys]`."""
        model = self._model
        mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill_(~seen.cpu(), torch.finfo(model.dtype).min)
        mask = mask.repeat_interleave(model.heads // model.kv_heads, 0)
        return F.pad(mask, (0, 0, 0, -len(mask) % _QUERY_ROWS)).to(model.device)
