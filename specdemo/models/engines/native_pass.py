"""Descriptions of passes of the native engine, whose buffers later passes use again.

Building them again would take longer than a step of a small drafter.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.engines.engine import doubled
from specdemo.models.engines.generic import positions
from specdemo.models.engines.native_cache import NativeCache
from specdemo.native.interface import ChainStruct, ModelStruct, PassStruct, Result, TextStruct, check_result
from specdemo.worker import Stopped, stop_flag

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler

CHAIN_ROWS = 16
_TOKENS = 16  # initial buffers for drafted tokens


class TextRows(NamedTuple):
    """Rows of a text: `new` after `held` positions of the cache, see `Entry`; the last `last` rows have logits."""

    cache: NativeCache
    new: list[int]
    held: int
    draft: Draft
    last: int


def _integers(count: int) -> Any:
    return (ctypes.c_int32 * count)()


class NativePass:
    """Pass over at most `rows` rows, and its drafted chain; a call at a time."""

    def __init__(self, library: ctypes.CDLL, model: ModelStruct, taps: Sequence[int], rows: int) -> None:
        self._library, self._model = library, model
        self._ids = _integers(rows)
        self._positions = _integers(rows)
        self._prefix = _integers(rows)
        self._starts = _integers(rows + 1)
        self._extra = _integers(0)
        self._taps = (ctypes.c_int32 * len(taps))(*taps)
        self._scratch = torch.empty(library.scratch_floats(ctypes.byref(model), rows), dtype=torch.float32)
        self._angles: tuple[Tensor, Tensor] | None = None
        texts = (TextStruct * rows)()
        self._texts = list(texts)
        self.struct = PassStruct(
            model=ctypes.addressof(model),
            texts=ctypes.addressof(texts),
            ids=ctypes.addressof(self._ids),
            positions=ctypes.addressof(self._positions),
            prefix=ctypes.addressof(self._prefix),
            extra=ctypes.addressof(self._extra),
            extra_start=ctypes.addressof(self._starts),
            taps=ctypes.addressof(self._taps),
            scratch=self._scratch.data_ptr(),
            tap_count=len(taps),
        )
        self._chain: ChainStruct | None = None
        self.passes = 0
        self.reusable = rows <= CHAIN_ROWS

    def describe(
        self, texts: Sequence[TextRows], angles: tuple[Tensor, Tensor], threads: int, times: array[int] | None
    ) -> None:
        """Describe `texts`; `angles`: cosines and sines; `times`: see `pass` in `native/interface.h`."""
        count = 0
        extra: list[int] = []
        for text, rows in zip(self._texts, texts, strict=False):
            self._set_rows(count, rows, extra)
            count += len(rows.new)
            self._set_text(text, rows.cache, len(rows.new), rows.held, rows.last)
        if len(extra) > len(self._extra):
            self._extra = _integers(len(extra))
            self.struct.extra = ctypes.addressof(self._extra)
        self._extra[: len(extra)] = extra
        self.struct.text_count = len(texts)
        self._set_call(count, angles, threads, times)

    def describe_chain(
        self, cache: NativeCache, new: list[int], held: int, angles: tuple[Tensor, Tensor], times: array[int] | None
    ) -> None:
        """Describe the rows before a chain: `new` after `held` positions of `cache`; C sets what they see."""
        count = len(new)
        self._ids[:count] = new
        self._set_text(self._texts[0], cache, count, held, 1)
        self.struct.text_count = 1
        self._set_call(count, angles, cache.threads, times)

    def _set_text(self, text: TextStruct, cache: NativeCache, rows: int, held: int, last: int) -> None:
        text.rows = rows
        text.held = held
        text.last = last
        cache.describe(text)

    def _set_call(self, rows: int, angles: tuple[Tensor, Tensor], threads: int, times: array[int] | None) -> None:
        described = self.struct
        described.rows = rows
        described.threads = threads
        if angles is not self._angles:
            self._angles = angles
            described.cosines = angles[0].data_ptr()
            described.sines = angles[1].data_ptr()
            described.rotations = len(angles[0])
        described.stop = stop_flag().address
        described.times = times and times.buffer_info()[0]

    def _set_rows(self, first: int, rows: TextRows, extra: list[int]) -> None:
        """Set the rows of a text from row `first` on; append their further visible positions to `extra`."""
        held, draft = rows.held, rows.draft
        count = len(rows.new)
        end = first + count
        self._ids[first:end] = rows.new
        if draft.is_chain:
            self._positions[first:end] = [*range(held, held + count)]
            self._prefix[first:end] = [*range(held + 1, held + count + 1)]
            self._starts[first + 1 : end + 1] = [len(extra)] * count
            return
        text = held + count - len(draft)  # length of the text before the draft
        paths = [draft.path(node) for node in range(max(0, held - text), len(draft))]
        self._positions[first:end] = positions(count, held, draft)
        self._prefix[first:end] = [*range(held + 1, text + 1), *[text] * len(paths)]
        starts = [len(extra)] * (count - len(paths))
        for path in paths:
            extra += [text + ancestor for ancestor in path]
            starts.append(len(extra))
        self._starts[first + 1 : end + 1] = starts

    def check(self, result: int) -> None:
        """Raise `Stopped`, MemoryError or ValueError unless the pass is done."""
        if result == Result.STOPPED:
            raise Stopped
        check_result(self._library, result, self.struct)

    def _chain_of(self, count: int) -> ChainStruct:
        """Return the description of a chain, with buffers for `count` tokens."""
        if self._chain is None:
            self._logits = self._candidates = torch.empty(0)
            self._chain = ChainStruct()
            self._buffers: dict[str, Any] = {"tokens": ()}
        if self._logits.shape[0] < (outputs := self._model.head.outputs):
            self._logits = torch.empty(doubled(outputs), dtype=torch.float32)
            self._candidates = torch.empty(doubled(outputs), dtype=torch.float32)
            self._chain.scratch = self._candidates.data_ptr()
        if count > len(self._buffers["tokens"]):
            size = max(count, _TOKENS)
            self._buffers = {name: (ctypes.c_float * size)() for name in ("peaks", "chosen", "least_reach")}
            self._buffers["tokens"] = (ctypes.c_int32 * size)()
            self._buffers["uniforms"] = (ctypes.c_double * size)()
            for name, buffer in self._buffers.items():
                setattr(self._chain, name, ctypes.addressof(buffer))
        return self._chain

    def sample(
        self, sampler: ChainSampler, uniforms: list[float], count: int, ids: Tensor | None, limits: Sequence[float]
    ) -> list[int]:
        """Sample at most `count` tokens; see `NativeEngine.sample_chain`."""
        chain, sampling = self._chain_of(count), sampler.sampling
        chain.vocab = sampler.vocab_size if ids is None else ids.shape[0]
        chain.ids = None if ids is None else ids.data_ptr()
        chain.sampling = sampling.struct
        self._buffers["least_reach"][:count] = limits or [0.0] * count
        chain.count = count
        probs = None
        if uniforms:
            self._buffers["uniforms"][:count] = uniforms
            probs = torch.empty(count, chain.vocab, dtype=torch.float32)
            chain.probs = probs.data_ptr()
        self.struct.logits = self._logits.data_ptr()
        self.check(self._library.draft_chain(ctypes.byref(self.struct), ctypes.byref(chain)))
        drawn = chain.drawn
        self.passes = chain.passes
        drafted = None if probs is None or not drawn else probs[:drawn]
        sampler.record(self._buffers["peaks"][: chain.passes], self._buffers["chosen"][:drawn], drafted)
        return self._buffers["tokens"][:drawn]
