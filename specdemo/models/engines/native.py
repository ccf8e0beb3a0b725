"""Native CPU engine: models, caches and passes, see `native/pass.c`.

Batch-invariant by construction: the bits of a row do not depend on the other rows, their number or the threads.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.engines.engine import BufferCache, Engine, Entry, cache_capacity
from specdemo.models.engines.generic import positions
from specdemo.models.engines.native_matrix import FLOAT_FORMATS, NativeMatrix
from specdemo.native.build import native_library, required_library
from specdemo.native.interface import ChainStruct, ModelStruct, PassStruct, Result, TextStruct, check_model
from specdemo.worker import Stopped, stop_flag

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler, SamplingParams

BLOCK = 16  # positions whose keys are stored together; capacities and stored values of a head are multiples
CHAIN_ROWS = 16
_TOKENS = 16  # initial buffers for drafted tokens
NATIVE_CHUNK = 256  # prompt rows per pass
_NO_DRAFT = Draft()


def uses_native_engine(device: torch.device) -> bool:
    return device.type == "cpu" and isinstance(native_library(), ctypes.CDLL)


class NativeModel(ABC):
    """Model, or a drafting head as a model, in the layout of `model` in `native/interface.h`."""

    layers: Any  # array of addresses
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    position_limit: int
    embedding_matrix: NativeMatrix
    output_matrix: NativeMatrix
    fields: Mapping[str, Any]  # further values of the structure

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    @property
    def outputs(self) -> int:
        """Number of logits of a row."""
        return self.output_matrix.outputs

    @abstractmethod
    def rotation(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[count, rotated / 2]`."""

    def struct(self, cache_dtype: torch.dtype) -> ModelStruct:
        """Return the description of the model for caches of this type; it refers to memory of this object."""
        return ModelStruct(
            layers=ctypes.addressof(self.layers),
            embedding=ctypes.addressof(self.embedding_matrix.struct()),
            head=self.output_matrix.struct(),
            layer_count=len(self.layers),
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            cache_form=FLOAT_FORMATS[cache_dtype].number,
            **self.fields,
        )


def array_of_addresses(addresses: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


class NativeCache(BufferCache):
    """Keys and values in the layout of `native/rows.c`, and hidden states."""

    def __init__(self, model: NativeModel) -> None:
        dim = model.head_dim + -model.head_dim % BLOCK
        shape = len(model.layers), 2, model.kv_heads, 0, dim
        super().__init__(torch.empty(shape, dtype=model.kv_dtype), model.width)
        self.layout = object()  # replaced with the addresses of keys, values and states

    def _replace_buffers(self) -> None:
        self.layout = object()

    def describe(self, text: TextStruct) -> None:
        """Set the fields that depend on the layout."""
        text.cache, text.capacity = self.kv.data_ptr(), self.capacity
        text.states = self.states.data_ptr() if self.taps else None

    def describe_inputs(self, text: TextStruct) -> None:
        """Set what the rows of `text` receive besides tokens."""

    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        end = length + len(slots)
        if slots and list(slots) != list(range(length, end)):
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
    def pass_group(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Equal in all caches of a pass; a copy uses that of its target."""
        return self.kv.dtype, self.taps


def _integers(count: int) -> Any:
    return (ctypes.c_int32 * count)()


class NativePass:
    """Pass over at most `rows` rows, or a chain drafted after the rows of a text; a call at a time.

    Later passes use its buffers again: building them would take longer than a step of a small drafter. The layout of
    the first text's cache is described once.
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
        """Raise `Stopped`, `MemoryError` or `ValueError` unless the pass is done."""
        if result == Result.STOPPED:
            raise Stopped
        if result == Result.NO_MEMORY:
            raise MemoryError("the native engine has no memory for its buffers")
        if result == Result.INVALID:
            fault = self._library.check_pass(ctypes.byref(self.struct))
            raise ValueError(f"invalid pass: {fault.decode() if fault else 'its chain has no buffers'}")

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
