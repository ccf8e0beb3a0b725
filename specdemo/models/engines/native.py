"""Native CPU engine, see `native/pass.c`.

Batch-invariant by construction: the bits of a row do not depend on the other rows, their number or the threads.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.engines.engine import Engine, Entry, cache_capacity
from specdemo.models.engines.native_cache import NativeCache, NativeModel
from specdemo.models.engines.native_pass import CHAIN_ROWS, NativePass
from specdemo.native.build import native_library, required_library
from specdemo.native.interface import ModelStruct, check_model

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler

NATIVE_CHUNK = 256  # prompt rows per pass
_NO_DRAFT = Draft()


def uses_native_engine(device: torch.device) -> bool:
    return device.type == "cpu" and isinstance(native_library(), ctypes.CDLL)


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
        self._structs: dict[torch.dtype, ModelStruct] = {}
        self._passes: list[NativePass] = []  # idle

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
        group: list[Entry[NativeCache]] = []
        rows = 0
        for cache, new, held, draft, _ in entries:
            rest = new.tolist() if isinstance(new, Tensor) else new
            if (surplus := len(rest) - len(draft) - 1) >= NATIVE_CHUNK:
                surplus -= surplus % NATIVE_CHUNK
                self.fill(cache, rest[:surplus], held)
                rest, held = rest[surplus:], held + surplus
            if group and (rows + len(rest) > NATIVE_CHUNK or cache.pass_group != group[0].cache.pass_group):
                outputs += self._call(group)
                group, rows = [], 0
            group.append(Entry(cache, rest, held, draft))
            rows += len(rest)
        return outputs + self._call(group)

    def fill(self, cache: NativeCache, new: list[int], held: int) -> None:
        """Add rows without logits."""
        for first in range(0, len(new), NATIVE_CHUNK):
            self._call([Entry(cache, new[first : first + NATIVE_CHUNK], held + first, _NO_DRAFT)], fill=True)

    def sample_chain(
        self,
        cache: NativeCache,
        new: list[int],
        held: int,
        sampler: ChainSampler,
        limits: Sequence[float],
        ids: Tensor | None = None,
    ) -> list[int] | None:
        """Sample a chain; logit i is that of token `ids[i]`, int32. `limits`: see `DraftScorer.sample_chain`."""
        rows, count = len(new), len(limits)
        end = held + rows + count - 1
        if rows > CHAIN_ROWS or end > self._model.position_limit:
            return None
        if ids is None and (any(limits) or sampler.vocab_size > self._model.outputs):
            return None  # a model that drafts with limits takes a random number per token
        if (uniforms := sampler.uniforms(count)) is None:
            return None
        cache.reserve(end)
        chain = self._idle_pass(cache, rows)
        tokens = chain.sample(cache, new, held, sampler, uniforms, ids, limits)
        cache.length = held + rows + chain.passes - 1
        self._passes.append(chain)
        return tokens

    def _call(self, entries: Sequence[Entry[NativeCache]], fill: bool = False) -> list[Tensor]:
        """Return the logits of the last rows of each text; `fill`: of none."""
        limit = self._model.position_limit
        rows = capacity = 0
        counts = []
        for cache, new, held, draft, _ in entries:
            end = held + len(new)
            if end > limit and end - len(draft) + draft.depth > limit:
                raise ValueError(f"the model has {limit} positions")
            cache.reserve(end)
            rows += len(new)
            capacity = max(capacity, cache.capacity)
            counts.append(0 if fill else min(len(new), len(draft) + 1))
        logits = torch.empty(sum(counts), self._model.outputs, dtype=torch.float32)
        cache = entries[0].cache
        described = self._idle_pass(cache, rows)
        described.describe(entries, counts, self._rotations(capacity), cache.threads)
        described.struct.logits = logits.data_ptr()
        described.check(self._library.run_pass(ctypes.byref(described.struct)))
        if rows <= CHAIN_ROWS:
            self._passes.append(described)
        for entry in entries:
            entry.cache.length = entry.held + len(entry.new)
        if len(entries) == 1:
            return [logits]
        return [part.clone() for part in logits.split(counts)]  # views would retain all

    def _idle_pass(self, cache: NativeCache, count: int) -> NativePass:
        """Return an idle or new description of a pass over `count` rows, of which the first are those of `cache`."""
        idle = self._passes if count <= CHAIN_ROWS else []
        try:
            described = idle.pop()  # pop and append are atomic: threads need no lock
        except IndexError:
            described = NativePass(self._library, self._struct(cache.kv.dtype), max(count, CHAIN_ROWS))
        if described.layout is not cache.layout:
            described.attach(cache, self._struct(cache.kv.dtype), self._rotations(cache.capacity))
        described.struct.times = self.times and self.times.buffer_info()[0]
        return described

    def expect(self, cache: NativeCache) -> None:
        """Let idle threads read the weights for a pass over `cache`."""
        self._library.expect_pass(ctypes.byref(self._struct(cache.kv.dtype)))

    def update_outputs(self) -> None:
        for struct in self._structs.values():
            struct.head.outputs = self._model.outputs

    def _rotations(self, count: int) -> tuple[Tensor, Tensor]:
        cosines, sines = self._angles
        if count > cosines.shape[0]:
            cosines, sines = self._angles = self._model.rotation(cache_capacity(count))
        return cosines, sines

    def _struct(self, dtype: torch.dtype) -> ModelStruct:
        if dtype not in self._structs:
            self._structs[dtype] = self._model.struct(dtype)
            check_model(self._library, self._structs[dtype])
        return self._structs[dtype]
