"""Calls of the native engine for chains of a text, with structures that are built once.

Building them again would take longer than a step of a small drafter.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdemo.native.interface import ChainStruct, ModelStruct, PassStruct, Result, TextStruct, check_result
from specdemo.worker import Stopped, stop_flag

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler

CHAIN_ROWS = 16
_TOKENS = 16  # initial size of the buffers for drafted tokens


class ChainCall:
    """Pass over at most `CHAIN_ROWS` rows of a chain; a call at a time."""

    def __init__(self, library: ctypes.CDLL, model: ModelStruct, taps: Sequence[int]) -> None:
        self.text, self._library = TextStruct(), library
        self._ids, self._taps = (ctypes.c_int32 * CHAIN_ROWS)(), (ctypes.c_int32 * len(taps))(*taps)
        self._positions, self._starts = (ctypes.c_int32 * (CHAIN_ROWS + 1))(), (ctypes.c_int32 * (CHAIN_ROWS + 1))()
        self._scratch = torch.empty(library.scratch_floats(ctypes.byref(model), CHAIN_ROWS), dtype=torch.float32)
        self._angles: tuple[Tensor, Tensor] | None = None
        positions = ctypes.addressof(self._positions)
        self._pass = PassStruct(
            model=ctypes.addressof(model),
            texts=ctypes.addressof(self.text),
            ids=ctypes.addressof(self._ids),
            positions=positions,
            prefix=positions + ctypes.sizeof(ctypes.c_int32),
            extra=positions,
            extra_start=ctypes.addressof(self._starts),
            taps=ctypes.addressof(self._taps),
            scratch=self._scratch.data_ptr(),
            text_count=1,
            tap_count=len(taps),
        )
        self._logits = torch.empty(1, model.head.outputs, dtype=torch.float32)
        self._candidates = torch.empty(model.head.outputs, dtype=torch.float32)
        self._chain = ChainStruct(scratch=self._candidates.data_ptr())
        self._reserve(_TOKENS)
        self.passes = 0

    def _reserve(self, count: int) -> None:
        self._tokens, self._uniforms = (ctypes.c_int32 * count)(), (ctypes.c_double * count)()
        self._peaks, self._chosen = (ctypes.c_float * count)(), (ctypes.c_float * count)()
        for name in ("tokens", "uniforms", "peaks", "chosen"):
            setattr(self._chain, name, ctypes.addressof(getattr(self, f"_{name}")))

    def set_rows(
        self,
        new: Sequence[int],
        held: int,
        angles: tuple[Tensor, Tensor],
        threads: int,
        times: array[int] | None,
    ) -> None:
        """Describe rows that follow `held` positions; `angles`: cosines and sines; `times`: see `pass` in C."""
        count, described = len(new), self._pass
        self._ids[:count] = [*new]
        self._positions[: count + 1] = [*range(held, held + count + 1)]
        self.text.held, self.text.rows = held, count
        described.rows, described.threads = count, threads
        if angles is not self._angles:
            self._angles = angles
            described.cosines, described.sines = angles[0].data_ptr(), angles[1].data_ptr()
            described.rotations = len(angles[0])
        described.stop, described.times = stop_flag().address, times and times.buffer_info()[0]

    def described(self, logits: Tensor) -> PassStruct:
        """Describe the pass that computes the logits `[n, outputs]` of the last n rows."""
        self.text.last, self._pass.logits = len(logits), logits.data_ptr()
        return self._pass

    def sample(
        self,
        sampler: ChainSampler,
        uniforms: list[float],
        count: int,
        ids: Tensor | None,
        threshold: float,
    ) -> list[int]:
        """Sample at most `count` tokens; see `NativeEngine.sample_chain`."""
        chain, sampling = self._chain, sampler.sampling
        if count > len(self._tokens):
            self._reserve(count)
        chain.vocab = sampler.vocab_size if ids is None else len(ids)
        chain.ids = None if ids is None else ids.data_ptr()
        chain.temperature, chain.least_reach = sampling.temperature, threshold
        chain.top_k, chain.top_p = sampling.top_k, sampling.top_p
        chain.count, probs = count, None
        if uniforms:
            self._uniforms[:count] = [*uniforms]
            probs = torch.empty(count, chain.vocab, dtype=torch.float32)
            chain.probs = probs.data_ptr()
        described = self.described(self._logits)
        result = self._library.draft_chain(ctypes.byref(described), ctypes.byref(chain))
        if result == Result.STOPPED:
            raise Stopped
        check_result(self._library, result, described)
        drawn = chain.drawn
        self.passes = chain.passes
        drafted = None if probs is None or not drawn else probs[:drawn]
        sampler.record(self._peaks[: chain.passes], self._chosen[:drawn], drafted)
        return self._tokens[:drawn]
