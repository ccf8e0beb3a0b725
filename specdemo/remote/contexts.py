"""The texts that a cloud holds for its edges: found by id, checked by digest, forgotten when room or patience runs out.

A context is no more than a cache: an edge whose context is gone sends its whole text and goes on. Used by one thread
only, the one that owns the device. Knows messages and caches; knows no HTTP.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.remote.cloud_verifier import Sources, decide, draft_of, keyed, known_ids, target
from specdemo.remote.protocol import StreamRequest, VerifyConfig, VerifyRequest, VerifyResponse, digest


class UnknownContext(UserError):
    """The text is not held here (any more): the whole of it is needed."""


class StaleRequest(UserError):
    """A round of an earlier epoch, or one that was overtaken: whoever sends it no longer owns the context."""


class ScoringCache(Protocol):
    """What scores a text and remembers it: a `CachedModel`."""

    def score(self, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Raw logits `[len(draft) + 1, vocab]`."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers that they are held in, and of whatever else is large."""


@dataclass
class HeldContext:
    """One edge's text, and the last round that was answered."""

    epoch: int
    settings: VerifyConfig
    cache: ScoringCache
    tokens: list[int]
    used: float
    asked: VerifyRequest | None = None
    answer: VerifyResponse | None = None

    @property
    def reserved_bytes(self) -> int:
        """Bytes of what is large: the cache, and the rows that came with the last round."""
        rows = self.asked.rows or () if self.asked else ()
        return self.cache.reserved_bytes + sum(len(row.values) + len(row.ids or b"") for row in rows)


class Contexts:
    """Answers rounds. At most `most` contexts, of `budget_bytes` together, outlive a round, each for `expiry_s`."""

    def __init__(
        self,
        make: Callable[[], ScoringCache],
        *,
        vocab_size: int,
        context: int,
        stop: frozenset[int] = frozenset(),
        device: torch.device | str = "cpu",
        budget_bytes: int = 2 << 30,
        most: int = 256,
        expiry_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        sources: Sources = keyed,
    ) -> None:
        self._make, self._vocab_size, self._context, self._stop = make, vocab_size, context, stop
        self._device, self._sources, self._clock = torch.device(device), sources, clock
        self._budget_bytes, self._most, self._expiry_s = budget_bytes, most, expiry_s
        self._held: OrderedDict[str, HeldContext] = OrderedDict()  # longest unused first

    def __len__(self) -> int:
        return len(self._held)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of what is large in all contexts."""
        return sum(one.reserved_bytes for one in self._held.values())

    def forget(self, ctx_id: str) -> bool:
        """Drop a context; whether there was one."""
        return self._held.pop(ctx_id, None) is not None

    def answer(self, round: VerifyRequest) -> VerifyResponse:
        """The verdict on a round; the same one if it was given before.

        Raises `Unknown` where the whole text is needed, `Stale` where another round has the context, `UserError` for
        what no model could judge.
        """
        self._forget_old()
        draft = draft_of(round, self._vocab_size, self._device)
        held = self._held.get(round.ctx_id)
        if held is not None and self._is_repeat(held, round):
            assert held.answer is not None
            return held.answer
        held = self._open(round) if round.base == 0 else self._known(held, round)
        tokens = [*held.tokens[: round.base], *round.tokens]
        self._fits(tokens, len(draft))
        began = self._clock()
        answer = decide(round, tokens, draft, held.settings, held.cache.score, self._sources)
        answer.metrics.cloud_s = self._clock() - began
        held.asked, held.answer, held.used = round, answer, self._clock()
        held.tokens = tokens
        if answer.wants is None:
            chain = range(answer.accepted_len)
            nodes = chain if answer.accepted is None else answer.accepted
            own = answer.bonus if answer.correction is None else answer.correction
            held.tokens = [*tokens, *(draft.tokens[node] for node in nodes), *([] if own is None else [own])]
        self._held[round.ctx_id] = held
        self._held.move_to_end(round.ctx_id)
        while len(self._held) > self._most or (self._held and self.reserved_bytes > self._budget_bytes):
            self._held.popitem(last=False)
        return answer

    def continued(self, text: StreamRequest) -> Iterator[int]:
        """Plain decoding, a token at a time, through the first stop token or as far as the model's context reaches.

        Nothing of it is held afterwards.
        """
        self._check(text.sampling_cfg)
        tokens, cache = list(text.tokens), self._make()
        known_ids(tokens, self._vocab_size)
        self._fits(tokens, 0)
        for _ in range(min(text.max_tokens, self._context - len(tokens) + 1)):
            verifier = target(text.sampling_cfg, cache.score, len(tokens), self._sources)
            token = verifier.verify(tokens, Draft()).token
            assert token is not None
            tokens.append(token)
            yield token
            if token in self._stop:
                return

    def _is_repeat(self, held: HeldContext, round: VerifyRequest) -> bool:
        """Whether this very round was answered last. `Stale` for one that was overtaken, in its epoch or by another."""
        if round.epoch < held.epoch:
            raise StaleRequest(
                f"epoch {round.epoch} of this context is over (it is at {held.epoch}): open another context"
            )
        if round.epoch > held.epoch or held.asked is None:
            return False
        if held.asked == round:
            return True
        last = held.asked.round
        waits = held.answer is not None and held.answer.wants is not None  # for a row of the drafter's
        if round.round < last or (round.round == last and not (waits and round.rows)):
            raise StaleRequest(f"round {round.round} comes after round {last}, which was another: open another context")
        return False

    def _open(self, round: VerifyRequest) -> HeldContext:
        """A new context; the keys and values of one that it takes the place of are kept as far as they are right."""
        if round.sampling_cfg is None:
            raise UserError("a context is opened with sampling_cfg: send it along with the whole text")
        if not round.tokens:
            raise UserError("there is nothing to continue: send the text's tokens")
        self._check(round.sampling_cfg)
        old = self._held.get(round.ctx_id)
        return HeldContext(round.epoch, round.sampling_cfg, old.cache if old else self._make(), [], self._clock())

    def _known(self, held: HeldContext | None, round: VerifyRequest) -> HeldContext:
        """The context that a round goes on with. `Unknown` if it is not there or not at one with the edge."""
        if held is None or round.epoch > held.epoch:
            raise UnknownContext("this context is not held: send the whole text")
        if round.base > len(held.tokens) or digest(held.tokens[: round.base]) != round.digest:
            raise UnknownContext("the texts at both ends have come apart: send the whole text")
        if round.sampling_cfg is not None and round.sampling_cfg != held.settings:
            raise UserError("sampling_cfg was fixed when the context was opened: open another context to change it")
        return held

    def _check(self, settings: VerifyConfig) -> None:
        """Refuse settings that no model here could follow."""
        target(settings, _no_score, 0, self._sources)  # a rule that there is not
        known_ids([token for word in settings.bad_words for token in word], self._vocab_size)

    def _fits(self, tokens: Sequence[int], drafted: int) -> None:
        count = len(tokens) + drafted
        if count > self._context:
            raise UserError(f"{count:,} tokens do not fit the model's {self._context:,}: shorten the text")

    def _forget_old(self) -> None:
        before = self._clock() - self._expiry_s
        while self._held and next(iter(self._held.values())).used < before:
            self._held.popitem(last=False)


def _no_score(tokens: Sequence[int], draft: Draft) -> Tensor:
    raise AssertionError("nothing is scored while a context is opened")
