"""A pass of `LlamaWeights` weights: one request's keys and values, attention whose rows keep their bits, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.engines.draft_mask import positions, visible
from specdemo.models.engines.llama_weights import LlamaWeights

CHUNK = 512  # rows of a long prompt that are fed at a time: masks grow with rows times keys
FEW = 16  # rows up to which masks and recordings are kept ready

# What a kernel for attention computes for a row depends, in its last bits, on how many rows and keys it was given: on
# full vectors of keys, on which of its code for few rows it takes, on where it cuts a long sum. With key counts and row
# counts from these sets a row's bits are its own, whatever rides along in the same pass (seen with oneDNN and MKL on
# Zen 4; `parity.py` asks the machine at hand). The products need no such care.
BLOCK = 512  # keys that the kernel takes at a time
PARTS = (64, 128, 192, 384, 512)  # key counts within the last block
ROWS = 4  # row counts are multiples of this


def padded_keys(count: int) -> int:
    """The least number of keys, `count` or more, that attention may be given."""
    whole, part = divmod(count, BLOCK)
    return whole * BLOCK + (next(width for width in PARTS if width >= part) if part else 0)


Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


@dataclass(frozen=True)
class Recording:
    """A pass of one shape: the buffers that it reads its token ids, mask and places from, and how to run it again."""

    inputs: tuple[Tensor, Tensor, Tensor]
    replay: Callable[[], Tensor]


@dataclass(frozen=True)
class PassShape:
    """What passes over so many rows work with."""

    angles: tuple[Tensor, ...]  # for all heads `[n, heads, ...]`, and
    turned: Tensor  # those of them that depend on the place
    query: Tensor  # what attention is asked, `[1, kv_heads, n * group + spare, dim]`, and
    asked: Tensor  # the part of it that is not spare, `[n, kv_heads, group, dim]`


def record_graph(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`forward` as a CUDA graph: one launch instead of hundreds. What it returns is overwritten by the next replay.

    It runs twice on a stream of its own first, which lets libraries set up what must not be captured; running again
    writes the same keys and values to the same places.
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
    """A forward pass of `LlamaWeights` weights over the keys and values of one request."""

    def __init__(self, model: LlamaWeights, record: Recorder | None = None) -> None:
        """`record` makes a pass repeatable at less cost, if the device can; None: as it needs."""
        self._model = model
        self._record = record or (record_graph if model.recordable else None)
        self._recordings: dict[tuple[int, int], Recording] = {}  # by rows and keys
        self._length = self._reached = self._room = 0
        self._kv = torch.empty(0, 0, 0, 0)  # [layers, heads of keys and then of values, positions, dim]
        self._angles = torch.empty(0)  # as `LlamaWeights.rotation` gives them, by position
        # What is the same in every pass, or in the next few:
        self._shapes: dict[int, PassShape] = {}  # by rows
        self._masks: dict[int, Tensor] = {}  # by rows
        self._seen: tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]] = (0, (), ())  # width, keys and values by layer

    def keep(self, length: int, slots: list[int]) -> None:
        """Keep the first `length` positions and then those in `slots`, in that order."""
        end = length + len(slots)
        if slots and slots != list(range(length, end)):
            index = torch.tensor(slots, device=self._kv.device)
            self._kv[:, :, length:end] = self._kv[:, :, index]
        self._length = end

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget everything that was held: what is masked must be finite, and nobody's text outlives its request."""
        self._kv[:, :, : self._reached].zero_()
        self._length = self._reached = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return self._kv[:, :, : self._length].numel() * self._kv.element_size() if self._room else 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffer that they are held in."""
        return self._kv.numel() * self._kv.element_size()

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        """Feed `new` after the `held` positions; logits `[len(draft) + 1, vocab]` of the last rows."""
        model = self._model
        while len(new) > CHUNK + len(draft):
            self.run(new[:CHUNK], held, Draft())
            new, held = new[CHUNK:], held + CHUNK
        n, end = len(new), held + len(new)
        if end > self._room:
            self._grow(end)
        width = padded_keys(end)
        if draft.is_chain:
            angles = self._angles[:, held:end]
            mask = self._chain_mask(n, held, width)
        else:
            angles = self._angles[:, torch.tensor(positions(n, held, draft), device=model.device)]
            mask = self._mask(F.pad(visible(n, held, draft), (0, width - end)))
        shape = self._shape(n, angles)
        if width != self._seen[0]:
            keys_and_values = self._kv[:, None, :, :width].chunk(2, 2)
            self._seen = (width, *(states.unbind() for states in keys_and_values))
        ids = torch.as_tensor(new, device=model.device)
        if self._record and n <= FEW:
            logits = self._replay(ids, mask, shape, held)[-len(draft) - 1 :]
        else:
            places = self._kv[:, :, held:end].transpose(1, 2).unbind()
            logits = self._forward(ids, mask, shape, lambda i, new: places[i].copy_(new), len(draft) + 1)
        self._length, self._reached = end, max(end, self._reached)
        return logits

    def _forward(
        self, ids: Tensor, mask: Tensor, shape: PassShape, write: Callable[[int, Tensor], object], asked: int
    ) -> Tensor:
        """Logits of the last `asked` rows; `write(layer, states)` stores keys and values `[n, 2 * kv_heads, dim]`."""
        model, n = self._model, len(ids)
        heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
        shared, group = 2 * kv_heads, heads // kv_heads
        _, keys, values = self._seen
        rows = F.embedding(ids, model.embedding)
        for i, layer in enumerate(model.layers):
            qkv = layer.qkv(layer.enter(rows)).view(n, heads + shared, dim)
            if layer.norm_heads is not None:
                qkv = layer.norm_heads(qkv)
            qkv = model.turn(qkv, *shape.angles)
            write(i, qkv.narrow(1, heads, shared))
            # Heads that share keys are more rows of one head: a pass over few rows costs what one row costs.
            shape.asked.copy_(qkv.narrow(1, 0, heads).view(n, kv_heads, group, dim))
            mixed = F.scaled_dot_product_attention(shape.query, keys[i], values[i], attn_mask=mask)
            mixed = mixed.narrow(2, 0, n * group).view(kv_heads, n, group, dim).transpose(0, 1)
            rows = rows.add_(layer.out(mixed.reshape(n, heads * dim)))
            gate, up = layer.gate_up(layer.between(rows)).chunk(2, -1)
            rows = rows.add_(layer.down(F.silu(gate).mul_(up)))
        return model.head(model.leave(rows[-asked:]))

    def _replay(self, ids: Tensor, mask: Tensor, shape: PassShape, held: int) -> Tensor:
        """The logits of every row, from a pass of this shape that was recorded once."""
        n, width = len(ids), mask.shape[1]
        slots = torch.arange(held, held + n, device=ids.device)
        if (n, width) not in self._recordings:
            inputs = ids.clone(), mask.clone(), slots.clone()

            def forward() -> Tensor:
                def write(i: int, new: Tensor) -> object:
                    return self._kv[i].transpose(0, 1).index_copy_(0, inputs[2], new)

                return self._forward(inputs[0], inputs[1], shape, write, n)

            assert self._record is not None
            self._recordings[n, width] = Recording(inputs, self._record(forward))
        recording = self._recordings[n, width]
        for buffer, value in zip(recording.inputs, (ids, mask, slots), strict=True):
            buffer.copy_(value)
        return recording.replay().clone()

    def _grow(self, end: int) -> None:
        """Make room for `end` positions; by doubling, so that a long text is copied a bounded number of times."""
        model, old = self._model, self._kv
        room = max(BLOCK, 2 * self._room, end + -end % BLOCK)
        # Zeros, since what is masked is multiplied by nothing, and nothing times what memory held may be no number.
        self._kv = torch.zeros(
            (len(model.layers), 2 * model.kv_heads, room, model.head_dim), dtype=model.dtype, device=model.device
        )
        if self._room:
            self._kv[:, :, : self._room] = old
        self._room = room
        self._angles = model.rotation(torch.arange(room, device=model.device))
        self._masks.clear()
        self._recordings.clear()  # they hold the old buffers' addresses
        self._seen = (0, (), ())

    def _shape(self, n: int, angles: Tensor) -> PassShape:
        """What a pass over n rows works with. Values are turned by no angle, so as to be written with the keys."""
        model = self._model
        if n not in self._shapes:
            heads, turned = model.heads + 2 * model.kv_heads, model.heads + model.kv_heads
            both = angles.new_zeros(len(angles), n, heads, angles.shape[-1])
            both[0, :, turned:] = 1
            group = model.heads // model.kv_heads
            query = torch.zeros(
                (1, model.kv_heads, n * group + -n * group % ROWS, model.head_dim),
                dtype=model.dtype,
                device=model.device,
            )
            asked = query[0, :, : n * group].unflatten(1, (n, group)).transpose(0, 1)
            kept = {rows: shape for rows, shape in self._shapes.items() if rows <= FEW}
            self._shapes = kept | {n: PassShape(both.unbind(), both[:, :, :turned], query, asked)}
        shape = self._shapes[n]
        shape.turned.copy_(angles)
        return shape

    def _chain_mask(self, n: int, held: int, width: int) -> Tensor:
        """For few rows a view into one staircase, long enough for every place that they can stand at."""
        ones = partial(torch.ones, dtype=torch.bool, device=self._model.device)
        if n > FEW:
            return self._mask(ones(n, width).tril(held))
        if n not in self._masks:
            self._masks[n] = self._mask(ones(n, 2 * self._room).tril(self._room))
        first = self._room - held
        return self._masks[n][:, first : first + width]

    def _mask(self, seen: Tensor) -> Tensor:
        """0 where seen and the least number elsewhere, a row for each row of queries: `[n * group + spare, keys]`."""
        model = self._model
        mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill_(~seen.cpu(), torch.finfo(model.dtype).min)
        mask = mask.repeat_interleave(model.heads // model.kv_heads, 0)
        return F.pad(mask, (0, 0, 0, -len(mask) % ROWS)).to(model.device)


def borrow_engine(model: LlamaWeights) -> LlamaEngine:
    """An engine for one request: what an earlier one gave back, with its buffers and recordings, or a new one."""
    return model.idle.pop() if model.idle else LlamaEngine(model)


def return_engine(model: LlamaWeights, engine: LlamaEngine) -> None:
    """Keep it for the next request; one is enough, since requests mostly follow one another."""
    if not model.idle:
        engine.clear()
        model.idle.append(engine)
