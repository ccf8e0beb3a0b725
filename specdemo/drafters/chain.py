"""Draft a chain of tokens by a model or a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.step import Draft, Origin, Step
from specdemo.drafters.draft_vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from specdemo.core.sampling import ChainSampler, SamplingParams, UnreadDraft


class DraftScorer(Protocol):
    """Interface of a model or head that drafts after the text of a run."""

    @property
    def origin(self) -> Origin:
        """Origin of its tokens."""

    @property
    def ids(self) -> Tensor | None:
        """Target ids of the logits `[size]` since `start`; None: all."""

    @property
    def confidence(self) -> float | None:
        """Return the chance that the token of the last logits is accepted, predicted before it is chosen, if known."""

    def longest_draft(self, tokens: Sequence[int]) -> int:
        """Return the most draft tokens after `tokens`."""

    def start(self, tokens: Sequence[int]) -> Tensor | None:
        """Return raw logits `[size]` after `tokens`; None if they have no drafts yet."""

    def step(self, token: int) -> Tensor:
        """Return raw logits `[size]` after a draft token."""

    def score_nodes(self, tokens: Sequence[int], draft: Draft, nodes: Sequence[int]) -> Sequence[Tensor] | None:
        """Return raw logits `[size]` after each of `nodes` of a tree, whose parents were scored, or None like `start`.

        Node -1 is the text.
        """

    def sample_chain(
        self, tokens: Sequence[int], sampler: ChainSampler, limits: Sequence[float]
    ) -> list[int] | UnreadDraft | None:
        """Draft up to `len(limits)` tokens in a single call; return None if impossible.

        The draft ends before token i if the product of the largest probabilities (of raw logits) up to it is below
        `limits[i]`.
        """

    def expect(self) -> None:
        """Prepare for a draft while the caller does other work."""


@dataclass(eq=False)
class ChainDrafter(Drafter):
    """Sample a chain with the target's sampling parameters over the scorer's tokens (2211.17192, Algorithm 1)."""

    scorer: DraftScorer
    sampling: SamplingParams
    noise: Any
    vocab_size: int

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        longest, limits = self.scorer.longest_draft(tokens), budget.chain_limits
        if limits is not None:
            limits = limits[:longest]
            if not limits or limits[0] > 1:
                return Draft()
            draft = self._propose_at_once(tokens, limits)
            if draft is not None:
                return draft
        return self._propose_by_token(tokens, budget.at_most(longest))

    def observe(self, step: Step) -> None:
        """Expect a further draft after a draft."""
        if self.scorer.origin in step.draft.origin:
            self.scorer.expect()

    def _propose_at_once(self, tokens: Sequence[int], limits: Sequence[float]) -> Draft | None:
        from specdemo.core.sampling import ChainSampler

        if self.sampling.needs_paths:
            return None
        sampler = ChainSampler(self.sampling, self.noise, len(tokens), self.vocab_size, self.scorer.origin)
        drafted = self.scorer.sample_chain(tokens, sampler, limits)
        return drafted if drafted is None or isinstance(drafted, Draft) else sampler.chain(drafted)

    def _propose_by_token(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        import torch

        path, distributions = list(tokens), []
        q: list[Tensor] = []
        confidences: list[float] = []
        while budget.may_extend(n := len(path) - len(tokens), None):
            logits = self.scorer.step(path[-1]) if n else self.scorer.start(path)
            if logits is None or not self._continues(n, logits, budget, confidences):
                break
            vocabulary = DraftVocabulary(self.scorer.ids, self.vocab_size)
            processed = vocabulary.process(self.sampling, logits, path)
            if processed is None:
                break
            if self.sampling.temperature == 0:
                path.append(vocabulary.token(int(processed.argmax())))
                continue
            probs = self.sampling.logits_to_probs(processed[None])[0]
            path.append(vocabulary.sample(probs, self.noise, len(path)))
            distributions.append(probs)
            q.append(probs[vocabulary.index(path[-1])])
        new = tuple(path[len(tokens) :])
        origin = (self.scorer.origin,) * len(new)
        if confidences:
            origin = tuple(replace(self.scorer.origin, confidence=round(value, 3)) for value in confidences[: len(new)])
        if not distributions:
            return Draft.chain(new, origin=origin)
        return Draft.chain(new, tuple(torch.stack(q).tolist()), vocabulary.rows(distributions), origin)

    def _continues(self, n: int, logits: Tensor, budget: DraftBudget, confidences: list[float]) -> bool:
        """Return True if token n may be drafted; append its confidence, which precedes the choice of the token."""
        if (confidence := self.scorer.confidence) is None or (limits := budget.chain_limits) is None:
            return budget.may_extend(n, logits)
        confidences.append(confidence)
        return prod(confidences) >= limits[n]
