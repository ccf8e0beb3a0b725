"""Native CPU engine, see `native/pass.c`.

Batch-invariant by construction: the bits of a row do not depend on the other rows, their number or the threads.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.engines.engine import Cache, Engine, Entry
from specdemo.models.engines.generic import positions
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.native.build import native_library, required_library
from specdemo.native.interface import ChainStruct, ModelStruct, PassStruct, Result, check_model, check_result
from specdemo.worker import Stopped, stop_flag

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler

NATIVE_CHUNK = 256  # prompt rows per pass
KEPT_ROWS = 16  # rows of the retained scratch buffer
FIRST_CAPACITY = 256
_HEAD_PADDING = 16


def uses_native_engine(device: torch.device) -> bool:
    return device.type == "cpu" and isinstance(native_library(), ctypes.CDLL)


def kv_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of keys and values of models that compute in `dtype`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class NativeCache(Cache):
    """Keys and values `[layers, heads, positions, values]` and rotations."""

    def __init__(self, model: NativeWeights) -> None:
        super().__init__()
        self._rotation = model.rotation
        self.length = self.capacity = self.written = 0
        padded = model.head_dim + -model.head_dim % _HEAD_PADDING
        self.kv = torch.zeros(len(model.layers), 2 * model.kv_heads, 0, padded, dtype=kv_dtype(model.dtype))
        self.hidden: Tensor | None = None  # hidden states [layers, rows, width] of the last pass

    def reserve(self, end: int) -> None:
        """Allocate positions up to `end`, which passes may write from now on."""
        self.written = max(self.written, end)
        if end <= self.capacity:
            return
        capacity = max(FIRST_CAPACITY, 2 * self.capacity, end)
        kv = torch.zeros(*self.kv.shape[:2], capacity, self.kv.shape[3], dtype=self.kv.dtype)
        kv[:, :, : self.capacity] = self.kv
        self.kv, self.capacity = kv, capacity
        self.cosines, self.sines = self._rotation(capacity)

    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        end = length + len(slots)
        if slots and list(slots) != list(range(length, end)):
            if not (length <= min(slots) and max(slots) < self.written):
                raise ValueError(f"slots {min(slots)} to {max(slots)} are not in a cache of {self.written} positions")
            self.kv[:, :, length:end] = self.kv[:, :, torch.tensor(slots)]
        self.length = end

    @torch.inference_mode()
    def clear(self) -> None:
        self.kv[:, :, : self.written].zero_()
        self.length = self.written = 0
        self.hidden = None

    @property
    def kv_bytes(self) -> int:
        return self.kv.nbytes // self.capacity * self.length if self.capacity else 0

    @property
    def reserved_bytes(self) -> int:
        return self.kv.nbytes


def _visible(rows: int, held: int, draft: Draft) -> tuple[Sequence[int], ...]:
    """Return `positions`, `prefix`, `extra` and `extra_start` of a pass in `native/interface.h`."""
    if draft.is_chain:
        return range(held, held + rows), range(held + 1, held + rows + 1), (), [0] * (rows + 1)
    text = held + rows - len(draft)  # length of the text before the draft
    paths = [draft.path(node) for node in range(max(0, held - text), len(draft))]
    extra: list[int] = []
    starts = [0] * (rows - len(paths) + 1)
    for path in paths:
        extra += [text + ancestor for ancestor in path]
        starts.append(len(extra))
    return positions(rows, held, draft), [*range(held + 1, text + 1), *[text] * len(paths)], extra, starts


class NativeEngine(Engine[NativeCache]):
    """Passes of `NativeWeights` on a CPU."""

    batch_invariant = True
    reusable = True
    samples_chains = True
    hidden_states = True

    def __init__(self, model: NativeWeights) -> None:
        super().__init__()
        self._library, self._model = required_library(), model
        self._structs: dict[torch.dtype, tuple[ModelStruct, object]] = {}
        self._vocab_size: int = model.config.vocab_size
        self._scratch: list[Tensor] = []  # idle buffers of `KEPT_ROWS` rows

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

    def run(self, entries: Sequence[Entry[NativeCache]], layers: Sequence[int] = ()) -> list[Tensor]:
        """Run a pass; store hidden states of `layers` `[layers, rows, width]` in `cache.hidden`."""
        outputs, run_pass = [], self._library.run_pass
        for cache, new, held, draft in entries:
            rest = new.tolist() if isinstance(new, Tensor) else new
            while len(rest) > NATIVE_CHUNK + len(draft):
                self._call(run_pass, cache, rest[:NATIVE_CHUNK], held, Draft(), torch.empty(0, self._vocab_size))
                rest, held = rest[NATIVE_CHUNK:], held + NATIVE_CHUNK
            logits = torch.empty(min(len(rest), len(draft) + 1), self._vocab_size)
            self._call(run_pass, cache, rest, held, draft, logits, layers)
            outputs.append(logits)
        return outputs

    def sample_chain(
        self, cache: NativeCache, new: list[int], held: int, count: int, sampler: ChainSampler
    ) -> list[int] | None:
        vocab, sampling = sampler.vocab_size, sampler.sampling
        end = held + len(new) + count - 1
        if len(new) > KEPT_ROWS or vocab > self._vocab_size or end > self._model.position_limit:
            return None
        if (uniforms := sampler.uniforms(count)) is None:
            return None
        cache.reserve(end)
        tokens = (ctypes.c_int32 * count)()
        peaks, chosen = (ctypes.c_float * count)(), (ctypes.c_float * count)()
        probs = torch.empty(count, vocab) if uniforms else None
        numbers, scratch = array("d", uniforms), torch.empty(vocab if uniforms else 0)
        chain = ChainStruct(
            sampling.top_p,
            numbers.buffer_info()[0],
            None if probs is None else probs.data_ptr(),
            scratch.data_ptr(),
            ctypes.addressof(peaks),
            ctypes.addressof(chosen),
            ctypes.addressof(tokens),
            sampling.top_k,
            vocab,
            sampling.temperature,
            count,
        )
        logits = torch.empty(1, self._vocab_size)
        self._call(self._library.draft_chain, cache, new, held, Draft(), logits, (), chain)
        cache.length = end
        sampler.record(peaks[:], chosen[:], probs)
        return tokens[:]

    def _call(
        self,
        function: Callable[..., int],
        cache: NativeCache,
        new: list[int],
        held: int,
        draft: Draft,
        logits: Tensor,
        layers: Sequence[int] = (),
        *options: ctypes.Structure,
    ) -> None:
        model, rows = self._model, len(new)
        cache.reserve(held + rows)
        placed, prefix, extra, starts = _visible(rows, held, draft)
        if max(placed) >= model.position_limit:
            raise ValueError(f"the model has {model.position_limit} positions")
        taps = [layers.index(i) if i in layers else -1 for i in range(len(model.layers))] if layers else ()
        cache.hidden = torch.empty(len(layers), rows, model.width) if layers else None
        numbers = array("i", [*new, *placed, *prefix, *extra, *starts, *taps])
        ends = accumulate(map(len, (new, placed, prefix, extra, starts)), initial=0)
        first, _ = numbers.buffer_info()
        places = [first + numbers.itemsize * end for end in ends]
        struct = self._struct(cache.kv.dtype)
        scratch = self._scratch.pop() if rows <= KEPT_ROWS and self._scratch else self._buffer(struct, rows)
        described = PassStruct(
            ctypes.addressof(struct),
            cache.kv.data_ptr(),
            cache.cosines.data_ptr(),
            cache.sines.data_ptr(),
            *places[:-1],
            places[-1] if layers else None,
            None if cache.hidden is None else cache.hidden.data_ptr(),
            logits.data_ptr(),
            scratch.data_ptr(),
            cache.capacity,
            rows,
            len(logits),
            held,
            cache.threads,
            stop_flag().address,
        )
        result = function(ctypes.byref(described), *map(ctypes.byref, options))
        if rows <= KEPT_ROWS:
            self._scratch.append(scratch)  # an append is atomic: threads need no lock
        if result:
            if result == Result.STOPPED:
                raise Stopped
            check_result(self._library, result, described)
        cache.length = held + rows

    def _struct(self, dtype: torch.dtype) -> ModelStruct:
        if dtype not in self._structs:
            self._structs[dtype] = self._model.struct(dtype)
            check_model(self._library, self._structs[dtype][0])
        return self._structs[dtype][0]

    def _buffer(self, struct: ModelStruct, rows: int) -> Tensor:
        return torch.empty(self._library.scratch_floats(ctypes.byref(struct), max(rows, KEPT_ROWS)))
