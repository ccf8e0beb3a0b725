"""Descriptions of passes of the native engine, whose buffers later passes use again.

Building them again would take longer than a step of a small drafter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdemo.models.engines.engine import Entry, cache_capacity
from specdemo.models.engines.generic import positions
from specdemo.models.engines.native_cache import NativeCache
from specdemo.native.interface import ChainStruct, ModelStruct, PassStruct, Result, TextStruct, check_result
from specdemo.worker import Stopped, stop_flag

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler, SamplingParams

CHAIN_ROWS = 16
_TOKENS = 16  # initial buffers for drafted tokens


def _integers(count: int) -> Any:
    return (ctypes.c_int32 * count)()


class NativePass:
    """Pass over at most `rows` rows, or a chain drafted after the rows of a text; a call at a time.

    The layout of the first text's cache is described once.
    """

    def __init__(self, library: ctypes.CDLL, model: ModelStruct, rows: int) -> None:
        self._library = library
        self._ids = _integers(rows)
        self._positions = _integers(rows)
        self._prefix = _integers(rows)
        self._starts = _integers(rows + 1)
        self._extra = _integers(0)
        self._scratch = torch.empty(library.scratch_floats(ctypes.byref(model), rows), dtype=torch.float32)
        self._angles: tuple[Tensor, Tensor] | None = None
        self.layout: object = None  # of the first text's cache
        texts = (TextStruct * rows)()
        self._texts = list(texts)
        self.struct = PassStruct(
            texts=ctypes.addressof(texts),
            ids=ctypes.addressof(self._ids),
            positions=ctypes.addressof(self._positions),
            prefix=ctypes.addressof(self._prefix),
            extra=ctypes.addressof(self._extra),
            extra_start=ctypes.addressof(self._starts),
            scratch=self._scratch.data_ptr(),
        )
        self._chain = ChainStruct()
        self._sampling: SamplingParams | None = None
        self._logits = self._candidates = torch.empty(0)
        self._outputs = 0  # capacity of both
        self._logits_address = 0
        self._tokens = self._uniforms = self._max_logits = self._token_probs = self._limits = _integers(0)

    def attach(self, cache: NativeCache, model: ModelStruct, angles: tuple[Tensor, Tensor]) -> None:
        """Describe the layout of the first text's cache."""
        self.layout = cache.layout
        self._model = model
        self._taps = (ctypes.c_int32 * len(cache.taps))(*cache.taps)
        self.struct.model = ctypes.addressof(model)
        self.struct.taps = ctypes.addressof(self._taps)
        self.struct.tap_count = len(cache.taps)
        cache.describe(self._texts[0])
        self._set_angles(angles)

    def describe(
        self,
        entries: Sequence[Entry[NativeCache]],
        counts: Sequence[int],
        angles: tuple[Tensor, Tensor],
        threads: int,
    ) -> None:
        """Describe `entries`, of which the last `counts` rows have logits; `angles`: cosines and sines."""
        rows = 0
        extra: list[int] = []
        for text, entry, count in zip(self._texts, entries, counts, strict=False):
            self._set_rows(rows, entry, extra)
            text.rows = len(entry.new)
            text.held = entry.held
            text.last = count
            if rows:
                entry.cache.describe(text)
            entry.cache.describe_inputs(text)
            rows += text.rows
        if len(extra) > len(self._extra):
            self._extra = _integers(len(extra))
            self.struct.extra = ctypes.addressof(self._extra)
        self._extra[: len(extra)] = extra
        self.struct.text_count = len(entries)
        self._set_angles(angles)
        self._set_call(rows, threads)

    def _set_call(self, rows: int, threads: int) -> None:
        described, flag = self.struct, stop_flag()
        described.rows = rows
        described.threads = threads
        described.stop = None if flag is None else flag.address

    def _set_angles(self, angles: tuple[Tensor, Tensor]) -> None:
        if angles is not self._angles:
            self._angles = angles
            self.struct.cosines = angles[0].data_ptr()
            self.struct.sines = angles[1].data_ptr()
            self.struct.rotations = len(angles[0])

    def _set_rows(self, first: int, entry: Entry[NativeCache], extra: list[int]) -> None:
        """Set the rows of a text from row `first` on; append their further visible positions to `extra`."""
        _, new, held, draft, _ = entry
        count = len(new)
        end = first + count
        self._ids[first:end] = new
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
        if result == Result.STOPPED:
            raise Stopped
        check_result(self._library, result, self.struct)

    def sample(
        self,
        cache: NativeCache,
        new: list[int],
        held: int,
        sampler: ChainSampler,
        uniforms: list[float],
        ids: Tensor | None,
        limits: Sequence[float],
    ) -> list[int]:
        """Sample at most `len(limits)` tokens, see `NativeEngine.sample_chain`; C sets what the rows see."""
        text, chain = self._texts[0], self._chain
        count = len(limits)
        text.rows = rows = len(new)
        text.held = held
        text.last = self.struct.text_count = 1
        cache.describe_inputs(text)
        self._ids[:rows] = new
        self._set_call(rows, cache.threads)
        chain.vocab = vocab = sampler.vocab_size if ids is None else ids.shape[0]
        chain.ids = None if ids is None else ids.data_ptr()
        chain.count = count
        if vocab > self._outputs or count > len(self._tokens):
            self._allocate(count)
        self.struct.logits = self._logits_address
        self._limits[:count] = limits
        if sampler.sampling is not self._sampling:
            self._sampling = sampler.sampling
            chain.sampling = sampler.sampling.struct
        probs = None
        if uniforms:
            self._uniforms[:count] = uniforms
            probs = torch.empty(count, vocab, dtype=torch.float32)
            chain.probs = probs.data_ptr()
        self.check(self._library.draft_chain(ctypes.byref(self.struct), ctypes.byref(chain)))
        self.passes, drafted = chain.passes, chain.drafted
        drafted_probs = None if probs is None or not drafted else probs[:drafted]
        sampler.record(self._max_logits[: self.passes], self._token_probs[:drafted], drafted_probs)
        return self._tokens[:drafted]

    def _allocate(self, count: int) -> None:
        size = max(count, _TOKENS)
        self._outputs = cache_capacity(self._model.head.outputs)
        self._logits, self._candidates = torch.empty(2, self._outputs, dtype=torch.float32)
        self._tokens = _integers(size)
        self._max_logits, self._token_probs, self._limits = ((ctypes.c_float * size)() for _ in range(3))
        self._uniforms = (ctypes.c_double * size)()
        self._logits_address = self._logits.data_ptr()
        self._chain.scratch = self._candidates.data_ptr()
        self._chain.tokens = ctypes.addressof(self._tokens)
        self._chain.uniforms = ctypes.addressof(self._uniforms)
        self._chain.max_logits = ctypes.addressof(self._max_logits)
        self._chain.token_probs = ctypes.addressof(self._token_probs)
        self._chain.min_path_prob = ctypes.addressof(self._limits)
