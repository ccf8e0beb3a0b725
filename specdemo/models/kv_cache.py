"""A language model with a KV cache.

Callers always pass all tokens; `CachedModel` feeds the difference to the cached tokens and decides every rollback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.core.sampling import ChainSampler, UnreadDraft, unread
from specdemo.core.step import Draft, TokenLogprob, Verdict, common_prefix
from specdemo.core.verifier import committed_logprobs
from specdemo.models.engines.cuda_graphs import on_device
from specdemo.models.engines.engine import Cache, Entry, RepeatedPasses
from specdemo.models.engines.select import engine_of
from specdemo.worker import Stopped, job_clock, shared_pass

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdemo.core.comparison import ChainComparison
    from specdemo.models.cached_head import CachedHead
    from specdemo.models.engines.engine import FusedWeights

Model: TypeAlias = "PreTrainedModel | FusedWeights"

_NO_LOGITS = torch.empty(0, 0)
_SCORED_ROWS = 64  # logits of a prompt in memory
CHUNK_S = 0.5
MOST_ROWS = 512  # masks grow with the rows
_BYTES_PER_S = 32e9  # weights per row and second of a CPU, about


def first_rows(weight_bytes: int, device: torch.device) -> int:
    """Estimate the rows of the first chunk of a prompt, a power of two."""
    rows = int(CHUNK_S * _BYTES_PER_S / max(1, weight_bytes)) if device.type == "cpu" else MOST_ROWS
    return 1 << min(max(1, rows), MOST_ROWS).bit_length() - 1


class ChunkSize:
    """Rows of the next chunk of a prompt, which takes at most about `CHUNK_S` seconds; then other jobs have a turn.

    Fast models always use the same sizes, and hence compute the same bits.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def observe(self, seconds: float) -> None:
        """Adapt the size to the duration of a chunk."""
        if 2 * seconds <= CHUNK_S:
            self.rows = min(2 * self.rows, MOST_ROWS)
        while seconds > CHUNK_S and self.rows > 1:
            self.rows, seconds = self.rows // 2, seconds / 2


def context_length(model: Model) -> int:
    """Return the longest text in tokens; T5 has no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


class CachedModel:
    """Function from tokens and a draft to logits, with the KV cache of a text until `close`.

    Instances share `model`. Passes are padded to `pad` rows (`BatchInvariance`). An encoder-decoder encodes `source`;
    tokens are decoder tokens. A copy of the model of `cache_owner` shares its cache. `taps`: stored hidden states, see
    `Cache`. Raises `UserError` if `source` exceeds the context, or the engine stores no hidden states.
    """

    def __init__(
        self,
        model: Model,
        pad: int = 1,
        source: Sequence[int] = (),
        cache_owner: CachedModel | None = None,
        taps: tuple[int, ...] = (),
    ) -> None:
        config = model.config.get_text_config()
        self.model = model
        self.vocab_size: int = config.vocab_size
        self.context = context_length(model)
        if len(source) > self.context:
            raise UserError(
                f"the prompt has {len(source):,} tokens and the encoder reads {self.context:,}: shorten it by at least "
                f"{len(source) - self.context:,}"
            )
        self._cache_owner, self.passes = cache_owner, 0
        self._cache_owner_passes = -1
        self.engine = engine_of(model)
        self.chains_only = self.engine.chains_only
        if taps and not self.engine.hidden_states:
            raise UserError(
                f"{type(model).__name__} stores no hidden states, from which heads draft: choose a decoder with a KV "
                "cache, or a method without a head"
            )
        if taps and not 0 <= min(taps) <= max(taps) <= config.num_hidden_layers:
            raise ValueError(f"the model has hidden states 0 to {config.num_hidden_layers}, not {list(taps)}")
        self._cache: Cache = cache_owner._cache if cache_owner else self.engine.open(source, taps)
        self._pad, self._closed = pad, False
        self._cached_tokens: list[int] = []
        self._draft = Draft()
        self._logits: Tensor | None = None  # rows after the last token and after each draft node
        self.head: CachedHead | None = None  # a head of the same text, closed with this object

    def close(self) -> None:
        """Clear the cache; the object cannot be used any more. A cache of `cache_owner` is closed by it."""
        if not self._closed and self._cache_owner is None:
            self.engine.close(self._cache)
        if self.head is not None:
            self.head.close()
        self.head = None  # ends the reference cycle: garbage collections may be far apart
        self._closed = True
        self._cached_tokens, self._draft = [], Draft()
        self._logits = None

    def prefill(self, tokens: Sequence[int], clock: Callable[[], float] = job_clock) -> Iterator[int]:
        """Feed `tokens` in chunks up to the last, which `score` feeds; yield the number of cached tokens after each.

        Closing the iterator keeps the cache usable.
        """
        if self._cache_owner is not None or not self.engine.divides_prompts:
            return
        size = ChunkSize(first_rows(self.weight_bytes, self.model.device))
        while len(tokens) - (held := common_prefix(self._cached_tokens, tokens)) > size.rows:
            end, start = held + size.rows, clock()
            self.score(tokens[:end], Draft())
            size.observe(clock() - start)
            yield end

    def score(self, tokens: Sequence[int], draft: Draft, comparison: ChainComparison | None = None) -> Tensor:
        """Compute raw logits `[len(draft) + 1, vocab]`, in a single pass after `prefill`, possibly with a comparison.

        Row 0 follows `tokens`, row i + 1 follows node i. Raises `UserError` for an unsupported draft shape.
        """
        if self.chains_only and not draft.is_chain:
            raise UserError(
                f"{type(self.model).__name__} supports chains only, because it {self.chains_only}: choose a method "
                "that drafts a chain"
            )
        if not tokens:
            raise UserError("the prompt is empty: give a prompt of at least one token")
        if self._cache_owner is not None:
            self._synchronise(self._cache_owner, tokens)
        chain = None if comparison is None else self._unread(tokens, draft)
        held, known = self._keep(tokens, draft if chain is None else Draft())
        scored = draft if chain is None else Draft.chain((0,) * len(chain.ids))
        padded = self._padded(scored, held, len(tokens))
        rows = len(scored) + 1
        if known.shape[0] >= rows:
            logits = known
        else:
            self.passes += 1
            try:
                new = self._new_ids(tokens, held, padded, chain)
                compared = comparison if held < len(tokens) else None  # of all rows of the draft
                entry = Entry(self._cache, new, held, padded, compared)
                if self.engine.batch_invariant:
                    logits = shared_pass(self.engine.run, entry, len(new))
                else:
                    (logits,) = self.engine.run([entry])
            except BaseException as error:
                self._forget(tokens[:held] if isinstance(error, Stopped) else ())
                raise
            if known.shape[0]:
                logits = torch.cat([known, logits])
        self._cached_tokens, self._draft = list(tokens), draft
        self._logits = logits if logits.shape[0] == rows else logits[:rows]
        return self._logits

    def _unread(self, tokens: Sequence[int], draft: Draft) -> UnreadDraft | None:
        """Return a draft that is on the device of the model, if a pass has rows before those of the draft."""
        chain = unread(draft)
        shared, nodes = self._passed(tokens)
        if chain is None or shared + len(nodes) == len(tokens) or chain.ids.device != self.model.device:
            return None
        return chain

    def _new_ids(self, tokens: Sequence[int], held: int, draft: Draft, chain: UnreadDraft | None) -> list[int] | Tensor:
        """Return the tokens of a pass after `held` positions, on the device if those of the draft are."""
        first = [*tokens[held:], *draft.tokens[max(0, held - len(tokens)) :]]
        self._check_ids(first)
        if chain is None:
            return first
        new = on_device(first, self.model.device)
        end = len(tokens) - held
        new[end : end + len(chain.ids)] = chain.ids
        return new

    def cached_count(self, tokens: Sequence[int]) -> int:
        """Return the number of leading `tokens` in the cache."""
        return common_prefix(self._cached_tokens, tokens)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Compute raw logits `[len(tokens), vocab]` after each of `tokens` in a single pass."""
        return self.score(tokens[:1], Draft.chain(tuple(tokens[1:])))

    def states(self, tokens: Sequence[int], start: int) -> Tensor | None:
        """Return hidden states `[len(tokens) - start, taps, width]` from position `start`, without a pass.

        Returns None if a position was never passed; nodes of the last draft count. The result is valid until the next
        pass.
        """
        shared, nodes = self._passed(tokens)
        if shared + len(nodes) < len(tokens):
            return None
        if nodes == tuple(range(len(nodes))):
            return self._cache.states[start : len(tokens)]
        slots = [*range(start, shared), *(shared + node for node in nodes[max(0, start - shared) :])]
        return self._cache.states[slots]

    def extend(
        self,
        tokens: Sequence[int],
        count: int,
        pick: Callable[[Tensor, int], Tensor | int],
        limits: Sequence[float] = (),
    ) -> list[int] | UnreadDraft | None:
        """Generate `count` tokens with `pick(logits, i)`; tensors `[1]` are transferred at the end.

        Returns `None` if the engine cannot end chains by `limits`, see `DraftScorer.sample_chain`.
        """
        if isinstance(pick, ChainSampler) and self.engine.samples_chains and tokens:
            drafted = self._sample_chain(tokens, pick, limits or [0.0] * count)
            if drafted is not None:
                return drafted
        if any(limits):
            return None
        logits = self.score(tokens, Draft())
        picked = [pick(logits, 0)]
        try:
            for i in range(1, count):
                last = picked[-1]
                new = [last] if isinstance(last, int) else last
                self.passes += 1
                (logits,) = self.engine.run([Entry(self._cache, new, len(tokens) + i - 1, Draft())])
                picked.append(pick(logits, i))
        except BaseException:
            self._forget()
            raise
        tensors = [token for token in picked if isinstance(token, Tensor)]
        chain = torch.cat(tensors).tolist() if tensors else [token for token in picked if isinstance(token, int)]
        self._cached_tokens, self._logits = [*tokens, *chain[:-1]], logits
        return chain

    def prepare(self, passes: RepeatedPasses) -> None:
        """Record passes on CUDA. Chains are those of the head, if there is one."""
        rows = frozenset(max(n, self._pad) for n in passes.rows)
        chain = passes.chain if self.head is None else None
        self.engine.prepare(self._cache, replace(passes, rows=rows, chain=chain))
        if self.head is not None:
            self.head.prepare(passes)

    def _sample_chain(
        self, tokens: Sequence[int], sampler: ChainSampler, limits: Sequence[float]
    ) -> list[int] | UnreadDraft | None:
        if self._cache_owner is not None:
            self._synchronise(self._cache_owner, tokens)
        held = len(self._truncate(tokens))
        if self._logits is not None:
            return None
        new = list(tokens[held:])
        try:
            self._check_ids(new)
            drafted = self.engine.sample_chain(self._cache, new, held, sampler, limits)
        except BaseException:
            self._forget()
            raise
        if drafted is not None:
            self.passes += len(limits)
            self._cached_tokens = list(tokens)
            if isinstance(drafted, UnreadDraft):
                drafted.on_read = partial(self._hold_draft, self._cached_tokens)
            else:
                self._hold_draft(self._cached_tokens, drafted)
        return drafted

    def _hold_draft(self, tokens: list[int], drafted: list[int]) -> None:
        """Add the drafted tokens in the cache, all except the last, unless another text replaced `tokens`."""
        if self._cached_tokens is tokens:
            self._cached_tokens = [*tokens, *drafted[:-1]]

    def _check_ids(self, tokens: Sequence[int]) -> None:
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise UserError(
                f"token id {wrong:,} is outside the vocabulary of {self.vocab_size:,} tokens: use a drafter or prompt "
                "of the same vocabulary"
            )

    def _forget(self, tokens: Sequence[int] = ()) -> None:
        """Cut the cache to `tokens` after a failed pass, in which layers may have different lengths."""
        self._cache.keep(len(tokens))
        self._cached_tokens, self._draft = list(tokens), Draft()
        self._logits = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the text and its draft, without padding and what a device drafts after the end of a draft."""
        if self._cache_owner is not None:
            return 0
        of_head = 0 if self.head is None else self.head.cache.kv_bytes
        return self._cache.bytes_of(len(self._cached_tokens) + len(self._draft)) + of_head

    @property
    def weight_bytes(self) -> int:
        return self.engine.weight_bytes

    @property
    def reserved_bytes(self) -> int:
        logits = 0 if self._logits is None else self._logits.untyped_storage().nbytes()
        return self._cache.reserved_bytes + logits + (self.head.reserved_bytes if self.head else 0)

    def drop_recordings(self) -> None:
        self._cache.drop_recordings()
        if self.head is not None:
            self.head.cache.drop_recordings()

    def _padded(self, draft: Draft, held: int, length: int) -> Draft:
        """Append unused nodes, up to `pad` rows in the pass or the end of the context."""
        spare = min(self._pad - (length - held), self.context - length) - len(draft)
        return draft.padded(spare) if spare > 0 else draft

    def _synchronise(self, cache_owner: CachedModel, tokens: Sequence[int]) -> None:
        held = cache_owner._truncate(tokens[:-1])
        if self._cache_owner_passes != cache_owner.passes:
            self._cached_tokens, self._draft = held, Draft()
            self._logits = None
            self._cache_owner_passes = cache_owner.passes

    def _truncate(self, tokens: Sequence[int]) -> list[int]:
        count, known = self._keep(tokens, Draft()) if tokens else (0, _NO_LOGITS)
        self._cached_tokens, self._draft = list(tokens[:count]), Draft()
        self._logits = known if len(known) else None
        return self._cached_tokens

    def _passed(self, tokens: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return the length of the common prefix with the cached text, and the draft nodes that continue it."""
        shared = common_prefix(self._cached_tokens, tokens)
        return shared, self._draft.follow(tokens[shared:]) if shared == len(self._cached_tokens) else ()

    def _keep(self, tokens: Sequence[int], draft: Draft) -> tuple[int, Tensor]:
        """Cut the cache to its common prefix with `tokens` and the first nodes of `draft`.

        Returns the remaining positions and the known logits `[rows, vocab]`.
        """
        if self._closed:  # another text may use the cache
            raise ValueError("the cached model is closed")
        shared, path = self._passed(tokens)
        slots = [shared + node for node in path]
        if shared < len(self._cached_tokens) or shared + len(path) < len(tokens) or self._logits is None:
            shared = min(shared, len(tokens) - 1)  # feed the last token again for its logits
            self._cache.keep(shared, slots)
            return shared + len(slots), _NO_LOGITS
        cached = [path[-1] if path else -1]  # indices by 1 + node of `draft`
        children = self._draft.children()
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            known = [kid for kid in children.get(cached[parent + 1], ()) if self._draft.tokens[kid] == token]
            if not known:
                break
            cached.append(known[0])
        slots += [shared + node for node in cached[1:]]
        self._cache.keep(shared, slots)
        return shared + len(slots), self._logits[torch.tensor(cached, device=self._logits.device) + 1]


class UncachedModel(CachedModel):
    """Language model that computes all tokens in each pass, to compare with `CachedModel`."""

    def prefill(self, tokens: Sequence[int], clock: Any = None) -> Iterator[int]:
        """Return no chunks: each pass reads the prompt again."""
        return iter(())

    def extend(
        self,
        tokens: Sequence[int],
        count: int,
        pick: Callable[[Tensor, int], Tensor | int],
        limits: Sequence[float] = (),
    ) -> None:
        """Return None: each token is drafted by a pass over the complete text."""

    def _keep(self, tokens: Sequence[int], draft: Draft) -> tuple[int, Tensor]:
        super()._keep(tokens[:1], Draft())
        self._cache.keep(0)
        return 0, _NO_LOGITS


def score_prompt(cache: CachedModel, tokens: Sequence[int], count: int) -> Iterator[tuple[TokenLogprob, ...]]:
    """Yield the log-probabilities of the tokens after the first, by pass, with `count` alternatives."""
    for start in range(1, len(tokens), _SCORED_ROWS):
        draft = Draft.chain(tuple(tokens[start : start + _SCORED_ROWS]))
        verdict = Verdict(tuple(range(len(draft))), None)
        yield committed_logprobs(cache.score(tokens[:start], draft), draft, verdict, count)
