"""Interface of engines: forward passes of one model over the KV caches of its texts.

An engine holds weights and buffers, a cache the keys and values of one text. Callers query capabilities
and test no types.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specdemo.core.step import Draft

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

    from specdemo.core.comparison import ChainComparison
    from specdemo.core.sampling import ChainSampler, SamplingParams, UnreadDraft
    from specdemo.models.engines.cuda_graphs import ChainShape


FIRST_CAPACITY = 256


def cache_capacity(count: int) -> int:
    """Return the capacity of a cache of `count` positions."""
    return max(FIRST_CAPACITY, 1 << (count - 1).bit_length())


class Cache(ABC):
    """Interface of a cache: keys and values of a text, and hidden states if it has `taps`.

    Tap i is the hidden state that enters layer i (0: the embeddings), or leaves the final norm if i is the number of
    layers. `threads`: threads of passes over the cache.
    """

    def __init__(self) -> None:
        self.taps: tuple[int, ...] = ()
        self.states = torch.empty(0, 0, 0, dtype=torch.float32)  # float32 hidden states `[positions, taps, width]`
        self.threads = torch.get_num_threads()

    @abstractmethod
    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        """Keep the first `length` positions followed by the positions `slots`."""

    @abstractmethod
    def clear(self) -> None:
        """Empty the cache and overwrite its memory, so that texts do not outlive their request."""

    def drop_recordings(self) -> None:  # noqa: B027
        """Free recorded passes."""

    @abstractmethod
    def bytes_of(self, length: int) -> int:
        """Return the bytes of the first `length` positions, and of the states of an encoder."""

    @property
    @abstractmethod
    def reserved_bytes(self) -> int: ...


class BufferCache(Cache):
    """Cache in a tensor `kv` `[..., capacity, dim]` of at least `length` positions, and in `states`."""

    def __init__(self, kv: Tensor, width: int) -> None:
        """`kv`: without positions; `width`: of hidden states."""
        super().__init__()
        self.length = self.capacity = 0
        self.written = 0  # positions that `clear` overwrites
        self.kv, self._width = kv, width

    def reserve(self, end: int) -> None:
        """Allocate positions up to `end`, which passes may write from now on."""
        self.written = max(self.written, end)
        if end <= self.capacity:
            return
        capacity = cache_capacity(end)
        # Masked values are multiplied by 0 and must not be NaN.
        kv = self.kv.new_zeros(*self.kv.shape[:-2], capacity, self.kv.shape[-1])
        states = torch.zeros(capacity, len(self.taps), self._width, dtype=torch.float32, device=kv.device)
        if self.capacity:
            kv[..., : self.capacity, :] = self.kv
            states[: self.capacity] = self.states
            self.kv.zero_()
            self.states.zero_()
        self.kv, self.states = kv, states
        self.capacity = capacity
        self._replace_buffers()

    @abstractmethod
    def _replace_buffers(self) -> None:
        """Forget what refers to the former buffers."""

    def bytes_of(self, length: int) -> int:
        return (self.kv.nbytes + self.states.nbytes) // self.capacity * length if self.capacity else 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all positions, also of unused rows of the last pass."""
        return self.bytes_of(self.length)

    @property
    def reserved_bytes(self) -> int:
        return self.kv.nbytes + self.states.nbytes


CacheT = TypeVar("CacheT", bound=Cache)


class Entry(NamedTuple, Generic[CacheT]):
    """One text of a pass: feed `new` after `held` cached positions.

    `held` counts the positions of the cache that precede the new tokens: those of the text and possibly of the first
    nodes of `draft`, whose nodes are the last of both.
    """

    cache: CacheT
    new: list[int] | Tensor
    held: int
    draft: Draft
    comparison: ChainComparison | None = None  # its result is set if the engine `compares`


@dataclass(frozen=True)
class RepeatedPasses:
    """Passes that a run repeats over the positions `start` to `end`; an engine may record them."""

    rows: frozenset[int]  # numbers of rows
    start: int = 0
    end: int = 0
    chain: ChainShape | None = None  # chains that the model or its head drafts
    compared: SamplingParams | None = None  # parameters of comparisons


class Engine(ABC, Generic[CacheT]):
    """Base class of engines: forward passes of one model."""

    chains_only = ""  # the reason why passes over forests are not exact, or empty
    batch_invariant = False  # True if it holds for any number of rows by construction
    divides_prompts = True  # False if a pass after cached tokens costs as much as one without
    reusable = False  # True if closed caches are opened again for later texts
    samples_chains = False  # True if `sample_chain` is supported
    compares = False  # True if passes may set the results of comparisons
    vectors = ""  # vector extensions of the CPU that the engine uses, or empty
    hidden_states = False  # True if hidden states of layers can be stored

    def __init__(self) -> None:
        self._idle: dict[tuple[int, ...], CacheT] = {}  # closed caches by taps

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    @abstractmethod
    def new_cache(self, source: Sequence[int] = ()) -> CacheT:
        """Return an empty cache; an encoder-decoder encodes `source`."""

    @torch.inference_mode()
    def run(self, entries: Sequence[Entry[CacheT]]) -> list[Tensor]:
        """Run a pass; return the logits `[rows, vocab]` of each entry.

        The logits are those of the last `len(draft) + 1` rows, or of all rows if `new` is shorter.
        """
        logits = []
        for entry in entries:
            with torch_threads(entry.cache.threads):
                logits.append(self._pass(entry)[-len(entry.draft) - 1 :])
        return logits

    def _pass(self, entry: Entry[CacheT]) -> Tensor:
        """Return the logits of the last rows of an entry, at least of those that `run` returns."""
        raise NotImplementedError

    def open(self, source: Sequence[int] = (), taps: tuple[int, ...] = ()) -> CacheT:
        """Return an empty cache; `taps` need an engine with `hidden_states`."""
        cache = self._idle.pop(taps, None) or self.new_cache(source)
        cache.taps = taps
        cache.threads = torch.get_num_threads()
        return cache

    def close(self, cache: CacheT) -> None:
        """Clear a cache. One idle cache suffices for sequential requests with equal taps."""
        cache.clear()
        if self.reusable:
            self._idle.setdefault(cache.taps, cache)

    def release(self) -> None:
        self._idle.clear()

    def shares_cache(self, other: Engine[Any]) -> bool:
        """Return True if both engines can use one cache: copies of a model in different forms."""
        return False

    def prepare(self, cache: CacheT, passes: RepeatedPasses) -> None:  # noqa: B027
        """Record the passes, if the engine records passes."""

    @contextmanager
    def recording_disabled(self) -> Iterator[None]:
        yield

    def sample_chain(
        self, cache: CacheT, new: list[int], held: int, sampler: ChainSampler, limits: Sequence[float]
    ) -> list[int] | UnreadDraft | None:
        """Feed `new` after `held` positions and sample a chain, if possible; `limits`: `DraftScorer.sample_chain`."""
        return None


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the threads of operations: all for passes, one for sampling, which is faster than waking others."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_initializer() -> Callable[[], None]:
    """Return a function that sets the current number of threads in a new thread."""
    return partial(torch.set_num_threads, torch.get_num_threads())


Weights = TypeVar("Weights", bound="FusedWeights")


class FusedWeights(ABC):
    """Weights of a decoder in the layout of one engine. Variants with fewer layers share the tensors."""

    def __init__(self, model: PreTrainedModel, angles: Any) -> None:
        self.config: PretrainedConfig = model.config
        self.generation_config: GenerationConfig = model.generation_config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.heads: int = self.config.num_attention_heads
        self.kv_heads: int = getattr(self.config, "num_key_value_heads", None) or self.heads
        self.width: int = self.config.hidden_size
        self.head_dim: int = getattr(self.config, "head_dim", None) or self.width // self.heads
        self.layers: Any = []
        self.channel_scale: Tensor | None = None
        self._angles = angles
        self.engine: Engine[Any] | None = None  # `engine_of` sets this engine for all texts
        self.temporary = False  # True if only a run holds this object

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    @abstractmethod
    def embedding_rows(self, ids: Tensor) -> Tensor:
        """Return the rows `[n, width]` of the embedding matrix for the tokens `ids` `[n]`."""

    @abstractmethod
    def output_rows(self, ids: Tensor | None) -> Tensor:
        """Return the rows `[n, width]` of the output matrix for the tokens `ids` `[n]`, or all."""

    def with_layers(self: Weights, selected: Sequence[int]) -> Weights:
        variant = self._variant()
        variant.layers = [self.layers[i] for i in selected]
        return variant

    def with_channel_scale(self: Weights, scale: Tensor) -> Weights:
        """Return the model with embedding channels multiplied by `scale` `[width]`."""
        variant = self._variant()
        variant.channel_scale = scale.to(self.device, self.dtype).contiguous()
        return variant

    def _variant(self: Weights) -> Weights:
        variant = copy.copy(self)
        variant.engine = None
        variant.temporary = True
        return variant
