"""A language model with a KV cache, and the batch invariance of its passes.

Callers always pass all tokens; `CachedModel` feeds the difference to the cached tokens and decides every rollback.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.core.sampling import ChainSampler
from specdemo.core.step import Draft, common_prefix
from specdemo.models.cache_check import cache_support
from specdemo.models.engines.fused_weights import FusedWeights
from specdemo.models.engines.generic import (
    EncoderDecoderEngine,
    TransformersEngine,
    UncachedEngine,
    has_encoder,
    opening,
)
from specdemo.models.engines.llama import LlamaEngine
from specdemo.models.engines.native import NativeEngine, NativeWeights
from specdemo.models.memory import weight_bytes
from specdemo.models.threads import torch_threads
from specdemo.worker import give_way

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_LOGITS = torch.empty(0, 0)


class CacheEngine(Protocol):
    """Forward passes over the KV cache of one request."""

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        """Feed `new` after `held` cached positions; the draft's nodes are the last of both.

        Returns logits `[rows, vocab]` of the last `len(draft) + 1` rows, or of all rows if `new` is shorter.
        """

    def keep(self, length: int, slots: list[int]) -> None:
        """Keep the first `length` positions followed by the positions `slots`."""

    @property
    def kv_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...


def new_engine(model: FusedWeights) -> LlamaEngine | NativeEngine:
    return NativeEngine(model) if isinstance(model, NativeWeights) else LlamaEngine(model)


def _engine(model: PreTrainedModel, source: Sequence[int], uncached: bool) -> CacheEngine:
    if has_encoder(model.config):
        source = source or opening(model)
        return UncachedEngine(model, source) if uncached else EncoderDecoderEngine(model, source)
    return UncachedEngine(model, ()) if uncached else TransformersEngine(model)


class CachedModel:
    """Function from tokens and a draft to logits, with the KV cache of a request.

    Instances share `model`. Passes are padded to `pad` rows (`BatchInvariance`). An encoder-decoder encodes `source`;
    tokens are decoder tokens. Raises `UserError` if `source` exceeds the context. A copy of the model of
    `owner` shares its keys and values.
    """

    def __init__(
        self,
        model: PreTrainedModel | FusedWeights,
        pad: int = 1,
        source: Sequence[int] = (),
        owner: CachedModel | None = None,
    ) -> None:
        config = model.config.get_text_config()
        self.model = model
        self.vocab_size: int = config.vocab_size
        self.context: int = getattr(config, "max_position_embeddings", None) or sys.maxsize  # T5 has no limit
        if len(source) > self.context:
            raise UserError(
                f"the prompt has {len(source):,} tokens and the encoder reads {self.context:,}: shorten it by at least "
                f"{len(source) - self.context:,}"
            )
        self._owner, self._passes, self._owner_passes = owner, 0, -1
        self.chains_only = ""  # or the reason why forests are not exact
        if owner is not None:
            self._engine: CacheEngine = NativeEngine(model, owner._engine)
        elif isinstance(model, FusedWeights):
            self._engine = model.idle.pop() if model.idle else new_engine(model)
        else:
            support = cache_support(model)
            self.chains_only, self._engine = support.forests, _engine(model, source, bool(support.uncached))
        self._pad = pad
        self._held: list[int] = []
        self._draft = Draft()
        self._logits: Tensor | None = None  # rows after the last token and after each draft node
        self._threads = torch.get_num_threads()
        if isinstance(self._engine, NativeEngine):
            self._engine.threads = self._threads

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Compute raw logits `[len(draft) + 1, vocab]` in one pass.

        Row 0 follows `tokens`, row i + 1 follows node i. Raises `UserError` for an unsupported draft shape.
        """
        if self.chains_only and not draft.is_chain:
            raise UserError(
                f"{type(self.model).__name__} supports chains only, because it {self.chains_only}: choose a method "
                "that drafts a chain"
            )
        if not tokens:
            raise UserError("the prompt is empty: give a prompt of at least one token")
        if self._owner is not None:
            self._synchronise(self._owner, tokens)
        held, known = self._keep(tokens, draft)
        padded = self._padded(draft, held, len(tokens))
        new = [*tokens[held:], *padded.tokens[max(0, held - len(tokens)) :]]
        if len(known) > len(draft):
            logits = known
        else:
            logits = self._run(new, held, padded)
            if len(known):
                logits = torch.cat([known, logits])
        self._held, self._draft, self._logits = list(tokens), draft, logits[: len(draft) + 1]
        return self._logits

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Compute raw logits `[len(tokens), vocab]` after each of `tokens` in one pass."""
        return self.score(tokens[:1], Draft.chain(tuple(tokens[1:])))

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], count: int, pick: Callable[[Tensor, int], Tensor | int]) -> list[int]:
        """Generate `count` tokens with `pick(logits, i)`; tensors `[1]` are transferred at the end."""
        if isinstance(pick, ChainSampler) and isinstance(self._engine, NativeEngine) and tokens:
            new = self._sample_chain(self._engine, tokens, count, pick)
            if new is not None:
                return new
        logits = self.score(tokens, Draft())
        picked = [pick(logits, 0)]
        for i in range(1, count):
            last = picked[-1]
            logits = self._run([last] if isinstance(last, int) else last, len(tokens) + i - 1, Draft())
            picked.append(pick(logits, i))
        new = picked if isinstance(picked[0], int) else torch.cat(picked).tolist()
        self._held, self._logits = [*tokens, *new[:-1]], logits
        return new

    def prepare(self, rows: Iterable[int], start: int, end: int) -> None:
        """Record passes of these row counts over `start` to `end` positions on CUDA."""
        if isinstance(self._engine, LlamaEngine):
            self._engine.prepare({max(n, self._pad) for n in rows}, start, end)

    def _sample_chain(
        self, engine: NativeEngine, tokens: Sequence[int], count: int, sampler: ChainSampler
    ) -> list[int] | None:
        """`extend` in one call; None: not possible."""
        if self._owner is not None:
            self._synchronise(self._owner, tokens)
        held = len(self._truncate(tokens))
        if self._logits is not None:
            return None
        new = self._guarded(engine.sample_chain, list(tokens[held:]), held, count, sampler)
        if new is not None:
            self._passes += count
            self._held = [*tokens, *new[:-1]]
        return new

    def _run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        self._passes += 1
        return self._guarded(self._engine.run, new, held, draft)

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            if isinstance(self._engine, NativeEngine):  # has its own threads
                return function(*arguments)
            with torch_threads(self._threads):
                return function(*arguments)
        except BaseException:  # layers may have different lengths now
            self._engine.keep(0, [])
            self._held, self._draft = [], Draft()
            raise

    def __del__(self) -> None:
        model = getattr(self, "model", None)
        if isinstance(model, FusedWeights) and not model.idle and self._owner is None:
            self._engine.clear()  # one idle engine suffices for sequential requests
            model.idle.append(self._engine)

    @property
    def kv_bytes(self) -> int:
        return 0 if self._owner else self._engine.kv_bytes

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes if isinstance(self.model, FusedWeights) else weight_bytes(self.model)

    @property
    def reserved_bytes(self) -> int:
        logits = 0 if self._logits is None else self._logits.untyped_storage().nbytes()
        return self._engine.reserved_bytes + logits

    def _padded(self, draft: Draft, held: int, length: int) -> Draft:
        """Append unused nodes, up to `pad` rows in the pass or the end of the context."""
        spare = min(self._pad - (length - held), self.context - length) - len(draft)
        if spare <= 0:
            return draft
        first = len(draft) - 1 if draft.is_chain else -1
        return Draft(draft.tokens + (0,) * spare, draft.parents + (first, *range(len(draft), len(draft) + spare - 1)))

    def _synchronise(self, owner: CachedModel, tokens: Sequence[int]) -> None:
        held = owner._truncate(tokens[:-1])
        if self._owner_passes != owner._passes:
            self._held, self._draft, self._logits = held, Draft(), None
            self._owner_passes = owner._passes

    def _truncate(self, tokens: Sequence[int]) -> list[int]:
        count, known = self._keep(tokens, Draft()) if tokens else (0, _NO_LOGITS)
        self._held, self._draft, self._logits = list(tokens[:count]), Draft(), known if len(known) else None
        return self._held

    def _keep(self, tokens: Sequence[int], draft: Draft) -> tuple[int, Tensor]:
        """Cut the cache to its common prefix with `tokens` and the first nodes of `draft`.

        Returns the remaining positions and the known logits `[rows, vocab]`.
        """
        shared = common_prefix(self._held, tokens)
        slots: list[int] = []
        node: int | None = -1 if self._held and shared == len(self._held) else None
        children: dict[int | None, list[int]] = {**self._draft.children()}

        def child(node: int | None, token: int) -> int | None:
            return next((kid for kid in children.get(node, ()) if self._draft.tokens[kid] == token), None)

        for token in tokens[shared:]:
            node = child(node, token)
            if node is None:
                break
            slots.append(shared + node)
        if node is None or self._logits is None:  # feed the last token again for its logits
            shared = min(shared, len(tokens) - 1)
            self._engine.keep(shared, slots)
            return shared + len(slots), _NO_LOGITS
        cached: list[int] = [node]  # by 1 + node of `draft`
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            if (node := child(cached[parent + 1], token)) is None:
                break
            cached.append(node)
        slots += [shared + node for node in cached[1:]]
        self._engine.keep(shared, slots)
        return shared + len(slots), self._logits[torch.tensor(cached, device=self._logits.device) + 1]


MEASURED_ROWS = (1, 2, 5, 8)
_DRAFT_LENGTHS = (1, 2, 4, 7)
NO_COSTS = dict.fromkeys(MEASURED_ROWS, 1.0)  # of passes, if not measured
NO_COST = 1.05  # accepted relative cost of padding
_TIMED_START = 50  # cached tokens
_COMPARED = 24  # tokens
COMPARED_ROWS = max(_DRAFT_LENGTHS) + 1


@dataclass(frozen=True)
class BatchInvariance:
    """Batch invariance, measured by `check_invariance`.

    Compared for up to `COMPARED_ROWS` rows and `compared_context` tokens, unless it holds `by_construction`. `cost[n]`
    is v(n), the cost of a pass over n rows in AR steps.
    """

    equal: bool
    pad: int  # rows of target passes; 1: no padding
    compared: int
    cost: dict[int, float]
    by_construction: bool = False


def check_invariance(model: FusedWeights | torch.nn.Module, budget_s: float = 0.5) -> BatchInvariance:
    """Measure for about `budget_s`."""
    timed = CachedModel(model)
    timed.prepare(MEASURED_ROWS, _TIMED_START, 2 * _TIMED_START)
    cost = _cost(timed, budget_s / 2)
    del timed  # its engine is reused
    if isinstance(model, FusedWeights) and model.batch_invariant:
        return BatchInvariance(True, 1, 0, cost, by_construction=True)
    if not _starts(model):
        return BatchInvariance(False, 1, 0, cost)
    equal, compared = _compare(model, 1, budget_s / 2)
    pad = MEASURED_ROWS[-1]
    if not equal and cost[pad] <= NO_COST:
        equal, compared = _compare(model, pad, budget_s / 2)
        return BatchInvariance(equal, pad if equal else 1, compared, cost)
    return BatchInvariance(equal, 1, compared, cost)


def _tokens(cached: CachedModel, count: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(cached.vocab_size) for _ in range(min(count, cached.context))]


def _cost(cached: CachedModel, budget_s: float) -> dict[int, float]:
    tokens = _tokens(cached, _TIMED_START + MEASURED_ROWS[-1])
    text = tokens[: -MEASURED_ROWS[-1]]
    began = time.perf_counter()
    seconds: dict[int, list[float]] = {n: [] for n in MEASURED_ROWS}
    while len(seconds[1]) < 2 or (len(seconds[1]) < 15 and time.perf_counter() - began < budget_s):
        for n in MEASURED_ROWS:
            give_way()
            cached.score(text[:-1], Draft())  # leaves the last token to be fed
            start = time.perf_counter()
            cached.score(text, Draft.chain(tuple(tokens[len(text) : len(text) + n - 1])))[0, 0].item()  # synchronises
            seconds[n].append(time.perf_counter() - start)
    single = min(seconds[1])
    return {n: round(min(values) / single, 3) for n, values in seconds.items()}


def _starts(model: FusedWeights | torch.nn.Module) -> tuple[int, ...]:
    """Cached tokens at which rows are compared; none on a CPU."""
    return {"cpu": (), "cuda": (50, 600, 2000)}.get(model.device.type, (50,))


def compared_context(model: FusedWeights | torch.nn.Module) -> int:
    return max(_starts(model)) + _COMPARED if _starts(model) else sys.maxsize


def _compare(model: FusedWeights | torch.nn.Module, pad: int, budget_s: float) -> tuple[bool, int]:
    """Compare rows of drafts with AR rows; return (all equal, rows compared)."""
    starts, compared = _starts(model), 0
    for start in starts:
        equal, rows = _compare_from(start, model, pad, budget_s / len(starts))
        compared += rows
        if not equal:
            return False, compared
    return True, compared


def _compare_from(start: int, model: FusedWeights | torch.nn.Module, pad: int, budget_s: float) -> tuple[bool, int]:
    sequential = CachedModel(model, pad)
    tokens = _tokens(sequential, start + _COMPARED)[: sequential.context - MEASURED_ROWS[-1]]  # space for padding
    start = min(start, max(len(tokens) - _COMPARED, len(tokens) // 2))
    sequential.prepare(range(1, COMPARED_ROWS + 1), start, len(tokens) + MEASURED_ROWS[-1])
    sequential.score(tokens[:start], Draft())
    began, rows = time.perf_counter(), []
    for end in range(start + 1, len(tokens) + 1):
        give_way()
        rows.append(sequential.score(tokens[:end], Draft())[0])
        if len(rows) >= 4 and time.perf_counter() - began > budget_s / 2:
            break
    del tokens[start + len(rows) :]
    compared = 0
    for length in _DRAFT_LENGTHS:
        drafted = _draft_rows(CachedModel(model, pad), tokens, start, length)
        compared += len(drafted)
        if not all(torch.equal(row, rows[i]) for i, row in drafted):
            return False, compared
    return True, compared


def _draft_rows(cached: CachedModel, tokens: Sequence[int], start: int, length: int) -> list[tuple[int, torch.Tensor]]:
    cached.score(tokens[:start], Draft())
    indexed = []
    end = start + 1
    while end <= len(tokens):
        give_way()
        draft = tuple(tokens[end : end + length])
        rows = cached.score(tokens[:end], Draft.chain(draft))
        indexed += [(end - 1 - start + i, row) for i, row in enumerate(rows)]
        end += len(draft) + 1
    return indexed
