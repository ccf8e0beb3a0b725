"""Native CPU engine, see `native/pass.c`.

Batch-invariant by construction: the bits of a row do not depend on the other rows, their number or the threads.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.engines.engine import Cache, Engine, Entry, doubled
from specdemo.models.engines.generic import positions
from specdemo.models.engines.native_chain import CHAIN_ROWS, ChainCall
from specdemo.native.build import native_library, required_library
from specdemo.native.interface import (
    ModelStruct,
    PassStruct,
    Result,
    TextStruct,
    check_model,
    check_result,
)
from specdemo.worker import Stopped, stop_flag

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler

NATIVE_CHUNK = 256  # prompt rows per pass
BLOCK = 16  # positions whose keys are stored together; capacities and stored values of a head are multiples


def padded_dim(head_dim: int) -> int:
    return head_dim + -head_dim % BLOCK


def uses_native_engine(device: torch.device) -> bool:
    return device.type == "cpu" and isinstance(native_library(), ctypes.CDLL)


class NativeModel(Protocol):
    """Interface of weights in the layout of `model` in `native/interface.h`, and of their KV cache."""

    layers: list[Any]
    kv_heads: int
    head_dim: int
    width: int
    kv_dtype: torch.dtype
    position_limit: int

    @property
    def weight_bytes(self) -> int: ...

    @property
    def outputs(self) -> int:
        """Number of logits of a row."""

    def rotation(self, count: int) -> tuple[Tensor, Tensor]: ...

    def struct(self, cache_dtype: torch.dtype) -> tuple[ModelStruct, Any]: ...


def _last_position(entries: Sequence[_Text]) -> int:
    return max(held + len(new) - len(draft) + draft.depth for _, new, held, draft in entries)


class NativeCache(Cache):
    """Keys and values in the layout of `native/cache.c`, and hidden states."""

    def __init__(self, model: NativeModel) -> None:
        super().__init__()
        self.length = self.capacity = self.written = 0
        dim = padded_dim(model.head_dim)
        self.kv = torch.zeros(len(model.layers), 2, model.kv_heads, 0, dim, dtype=model.kv_dtype)
        self._width = model.width

    def reserve(self, end: int) -> None:
        """Allocate positions up to `end`, which passes may write from now on."""
        self.written = max(self.written, end)
        if end <= self.capacity:
            return
        capacity = doubled(end)
        kv = torch.zeros(*self.kv.shape[:3], capacity, self.kv.shape[4], dtype=self.kv.dtype)
        kv[..., : self.capacity, :] = self.kv
        self.kv.zero_()
        self.kv, self.capacity = kv, capacity
        self._grow_states(capacity, self._width, kv.device)

    def describe(self, text: TextStruct) -> None:
        """Set the addresses of `text`, whose rows are set."""
        text.cache, text.capacity = self.kv.data_ptr(), self.capacity
        text.states = self.states.data_ptr() if self.taps else None

    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        end = length + len(slots)
        if slots and list(slots) != list(range(length, end)):
            if not (length <= min(slots) and max(slots) < self.written):
                raise ValueError(f"slots {min(slots)} to {max(slots)} are not in a cache of {self.written} positions")
            moved, to = torch.tensor(slots), torch.arange(length, end)
            keys, values = self.kv[:, 0].unflatten(2, (-1, BLOCK)), self.kv[:, 1]
            keys = keys.view(*keys.shape[:3], -1, BLOCK)
            keys[:, :, to // BLOCK, :, to % BLOCK] = keys[:, :, moved // BLOCK, :, moved % BLOCK]
            values[:, :, to] = values[:, :, moved]
            self.states[length:end] = self.states[moved]
        self.length = end

    def clear(self) -> None:
        end = self.written + -self.written % BLOCK
        self.kv.view(torch.uint8).numpy()[:, :, :, :end] = 0  # threads of torch would wait for the engine's
        self.states.numpy()[: self.written] = 0
        self.length = self.written = 0

    @property
    def form(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Equal in all caches of a pass; a copy uses that of its target."""
        return self.kv.dtype, self.taps

    @property
    def kv_bytes(self) -> int:
        return (self.kv.nbytes + self.states.nbytes) // self.capacity * self.length if self.capacity else 0

    @property
    def reserved_bytes(self) -> int:
        return self.kv.nbytes + self.states.nbytes


_Text: TypeAlias = tuple[NativeCache, list[int], int, Draft]  # an entry with a list


class _Rows:
    """Lists of the rows of a pass, see `pass` in `native/interface.h`."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self._prefix: list[int] = []
        self._extra: list[int] = []
        self._starts = [0]

    def add(self, new: list[int], held: int, draft: Draft) -> None:
        """Append the rows of a text."""
        rows = len(new)
        self.ids += new
        if draft.is_chain:
            self.positions += range(held, held + rows)
            self._prefix += range(held + 1, held + rows + 1)
            self._starts += [len(self._extra)] * rows
            return
        text = held + rows - len(draft)  # length of the text before the draft
        paths = [draft.path(node) for node in range(max(0, held - text), len(draft))]
        self.positions += positions(rows, held, draft)
        self._prefix += [*range(held + 1, text + 1), *[text] * len(paths)]
        self._starts += [len(self._extra)] * (rows - len(paths))
        for path in paths:
            self._extra += [text + ancestor for ancestor in path]
            self._starts.append(len(self._extra))

    def packed(self, taps: tuple[int, ...]) -> tuple[array[int], list[int]]:
        """Return all numbers, and the addresses of ids to `taps`."""
        numbers = array("i", [*self.ids, *self.positions, *self._prefix, *self._starts, *taps, *self._extra])
        rows, size = len(self.ids), numbers.itemsize
        first = numbers.buffer_info()[0]
        starts = first + size * 3 * rows
        listed = starts + size * (rows + 1)
        return numbers, [first, first + size * rows, first + size * 2 * rows, listed + size * len(taps), starts, listed]


class NativeEngine(Engine[NativeCache]):
    """Passes of a native model on a CPU."""

    batch_invariant = True
    reusable = True
    samples_chains = True
    hidden_states = True

    def __init__(self, model: NativeModel) -> None:
        super().__init__()
        self.times: array[int] | None = None  # nanoseconds by stage, see `times` in `native/interface.h`
        self._angles = model.rotation(0)
        self._library, self._model = required_library(), model
        self._structs: dict[torch.dtype, tuple[ModelStruct, object]] = {}
        self._calls: defaultdict[tuple[torch.dtype, tuple[int, ...]], list[ChainCall]] = defaultdict(list)  # idle

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    @property
    def vectors(self) -> str:  # type: ignore[override]
        return self._library.vector_extensions().decode()

    def new_cache(self, source: Sequence[int] = ()) -> NativeCache:
        return NativeCache(self._model)

    def shares_cache(self, other: Engine[Any]) -> bool:
        return isinstance(other, NativeEngine) and self._kv_shape == other._kv_shape

    @property
    def _kv_shape(self) -> tuple[int, ...]:
        return len(self._model.layers), self._model.kv_heads, self._model.head_dim

    def run(self, entries: Sequence[Entry[NativeCache]]) -> list[Tensor]:
        outputs: list[Tensor] = []
        group: list[_Text] = []
        rows = 0
        for cache, new, held, draft in entries:
            rest = new.tolist() if isinstance(new, Tensor) else new
            if (surplus := len(rest) - len(draft) - 1) >= NATIVE_CHUNK:
                surplus -= surplus % NATIVE_CHUNK
                self.fill(cache, rest[:surplus], held)
                rest, held = rest[surplus:], held + surplus
            if group and (rows + len(rest) > NATIVE_CHUNK or cache.form != group[0][0].form):
                outputs += self._call(group)
                group, rows = [], 0
            group.append((cache, rest, held, draft))
            rows += len(rest)
        return outputs + self._call(group)

    def fill(self, cache: NativeCache, new: list[int], held: int) -> None:
        """Add rows without logits."""
        for first in range(0, len(new), NATIVE_CHUNK):
            self._call([(cache, new[first : first + NATIVE_CHUNK], held + first, Draft())], 0)

    def sample_chain(
        self,
        cache: NativeCache,
        new: list[int],
        held: int,
        count: int,
        sampler: ChainSampler,
        ids: Tensor | None = None,
        threshold: float = 0.0,
    ) -> list[int] | None:
        """Sample a chain; logit i is that of token `ids[i]`, int32. `threshold`: see `Head.sample_chain`."""
        vocab = sampler.vocab_size if ids is None else len(ids)
        end = held + len(new) + count - 1
        if len(new) > CHAIN_ROWS or vocab > self._model.outputs or end > self._model.position_limit:
            return None
        if (uniforms := sampler.uniforms(count)) is None:
            return None
        call = self._chain_call(cache, new, held, end)
        tokens = call.sample(sampler, uniforms, count, ids, threshold)
        cache.length = held + len(new) + call.passes - 1
        self._release(call, cache)
        return tokens

    def _chain_call(self, cache: NativeCache, new: list[int], held: int, end: int) -> ChainCall:
        """Return an idle call for the rows `new` of a chain that ends at position `end`."""
        cache.reserve(end)
        try:
            call = self._calls[cache.form].pop()  # pop and append are atomic: threads need no lock
        except IndexError:
            call = ChainCall(self._library, self._struct(cache.kv.dtype), cache.taps)
        call.set_rows(new, held, self._rotations(cache.capacity), cache.threads, self.times)
        cache.describe(call.text)
        return call

    def _release(self, call: ChainCall, cache: NativeCache) -> None:
        self._calls[cache.form].append(call)

    def _call(self, entries: Sequence[_Text], most: int = sys.maxsize) -> list[Tensor]:
        """Return the logits of the last rows of each entry, of `most` rows at most."""
        counts = [min(len(new), len(draft) + 1, most) for _, new, _, draft in entries]
        end = max(held + len(new) for _, new, held, _ in entries)
        if end > (limit := self._model.position_limit) and _last_position(entries) > limit:
            raise ValueError(f"the model has {limit} positions")
        logits, chain = torch.empty(sum(counts), self._model.outputs, dtype=torch.float32), None
        cache, new, held, draft = entries[0]
        if len(entries) == 1 and len(new) <= CHAIN_ROWS and draft.is_chain:
            chain = self._chain_call(cache, new, held, end)
            described = chain.described(logits)
        else:
            described, references = self._described(entries, counts, logits)
        result = self._library.run_pass(ctypes.byref(described))
        if result == Result.STOPPED:
            raise Stopped
        check_result(self._library, result, described)
        if chain:
            self._release(chain, cache)
        for cache, new, held, _ in entries:
            cache.length = held + len(new)
        if len(entries) == 1:
            return [logits]
        return [rows.clone() for rows in logits.split(counts)]  # views would retain all

    def _described(
        self, entries: Sequence[_Text], counts: Sequence[int], logits: Tensor
    ) -> tuple[PassStruct, list[object]]:
        """Describe a pass over any rows; return the objects that it points to."""
        texts, rows = (TextStruct * len(entries))(), _Rows()
        for text, (cache, new, held, draft), last in zip(texts, entries, counts, strict=True):
            cache.reserve(held + len(new))
            rows.add(new, held, draft)
            text.held, text.rows = held, len(new)
            text.last = last
            cache.describe(text)
        count = len(rows.ids)
        cosines, sines = self._rotations(max(max(rows.positions) + 1, cache.capacity))
        numbers, addresses = rows.packed(cache.taps)
        struct = self._struct(cache.kv.dtype)
        scratch = torch.empty(self._library.scratch_floats(ctypes.byref(struct), count), dtype=torch.float32)
        return PassStruct(
            ctypes.addressof(struct),
            ctypes.addressof(texts),
            cosines.data_ptr(),
            sines.data_ptr(),
            *addresses,
            logits.data_ptr(),
            scratch.data_ptr(),
            stop_flag().address,
            self.times and self.times.buffer_info()[0],
            *(len(entries), count, len(cosines), len(cache.taps), cache.threads),
        ), [texts, numbers, scratch, cosines, sines]

    def describe_again(self) -> None:
        """Read the structure of the model again, whose number of outputs has changed."""
        self._structs.clear()
        self._calls.clear()

    def _rotations(self, count: int) -> tuple[Tensor, Tensor]:
        cosines, sines = self._angles
        if count > len(cosines):
            cosines, sines = self._angles = self._model.rotation(doubled(count))
        return cosines, sines

    def _struct(self, dtype: torch.dtype) -> ModelStruct:
        if dtype not in self._structs:
            self._structs[dtype] = self._model.struct(dtype)
            check_model(self._library, self._structs[dtype][0])
        return self._structs[dtype][0]
