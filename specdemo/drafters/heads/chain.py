"""Draft a chain with a head on hidden states of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.errors import UserError
from specdemo.core.origin import HEAD, Origin
from specdemo.core.step import Draft, Step
from specdemo.drafters.draft_vocabulary import DraftVocabulary
from specdemo.drafters.method import BuildContext

if TYPE_CHECKING:
    from torch import Tensor

    from specdemo.core.sampling import ChainSampler, SamplingParams


class DraftingHead(Protocol):
    """Interface of a head with the rows of a text."""

    @property
    def kind(self) -> str:
        """Name of the method that drafts with the head."""

    @property
    def ids(self) -> Tensor | None:
        """Target ids of the logits `[size]` since `start`; None: all."""

    def longest_draft(self, tokens: Sequence[int]) -> int:
        """Return the most draft tokens after `tokens`."""

    def expect(self) -> None:
        """Prepare for a draft while the caller does other work."""

    def start(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the logits `[size]` after `tokens`, None without hidden states."""

    def step(self, token: int) -> Tensor:
        """Return the logits `[size]` after a draft token."""

    @property
    def confidence(self) -> float | None:
        """Return the chance that the token of the last logits is accepted, if the head predicts it."""

    def draft_rows(self) -> Any:
        """Return the rows of the draft so far, for `restore`."""

    def restore(self, rows: Any) -> None:
        """Continue after these draft rows."""

    def sample_chain(
        self, tokens: Sequence[int], sampler: ChainSampler, count: int, threshold: float
    ) -> list[int] | None:
        """Draft in a single call; return None if impossible."""


@dataclass(eq=False)
class HeadDrafter(Drafter):
    """Sample a chain from the head, with the target's sampling parameters over the draft vocabulary."""

    head: DraftingHead
    sampling: SamplingParams
    noise: Any
    vocab_size: int

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        budget = budget.at_most(self.head.longest_draft(tokens))
        if budget.paused:
            return Draft()
        draft = self._propose_chain(tokens, budget)
        return self._propose_tokens(tokens, budget) if draft is None else draft

    def observe(self, step: Step) -> None:
        """Expect a further draft after a draft."""
        if HEAD in step.draft.origin:
            self.head.expect()

    def _propose_chain(self, tokens: Sequence[int], budget: DraftBudget) -> Draft | None:
        from specdemo.core.sampling import ChainSampler

        limits = budget.chain_limits
        if self.sampling.needs_paths or limits is None or not limits[0]:
            return None
        sampler = ChainSampler(self.sampling, self.noise, len(tokens), self.vocab_size)
        drafted = self.head.sample_chain(tokens, sampler, *limits)
        return None if drafted is None else sampler.chain(drafted, (HEAD,) * len(drafted))

    def _propose_tokens(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        path, distributions = list(tokens), []
        q: list[float] = []
        confidences: list[float] = []
        while budget.may_extend(n := len(path) - len(tokens), None):
            logits = self.head.step(path[-1]) if n else self.head.start(path)
            if logits is None or not self._continues(n, logits, budget, confidences):
                break
            vocabulary = DraftVocabulary(self.head.ids, self.vocab_size)
            processed = vocabulary.process(self.sampling, logits, path)
            if processed is None:
                break
            if self.sampling.temperature == 0:
                path.append(vocabulary.token(int(processed.argmax())))
                continue
            probs = self.sampling.logits_to_probs(processed[None])[0]
            path.append(vocabulary.sample(probs, self.noise, len(path)))
            distributions.append(probs)
            q.append(float(probs[vocabulary.index(path[-1])]))
        new = tuple(path[len(tokens) :])
        draft = Draft.chain(new, tuple(q), vocabulary.rows(distributions)) if distributions else Draft.chain(new)
        return _named(draft, confidences)

    def _continues(self, n: int, logits: Tensor, budget: DraftBudget, confidences: list[float]) -> bool:
        """Return True if token n may be drafted; append its confidence, which precedes the choice of the token."""
        if (confidence := self.head.confidence) is None or (limits := budget.chain_limits) is None:
            return budget.may_extend(n, logits)
        confidences.append(confidence)
        return prod(confidences) >= limits[1]


def _named(draft: Draft, confidences: Sequence[float] = ()) -> Draft:
    """Return `draft` with its origin."""
    origins = tuple(Origin("head", confidence=round(value, 3)) for value in confidences[: len(draft)])
    return replace(draft, origin=origins or (HEAD,) * len(draft))


def build_head_drafter(context: BuildContext, kind: str | None = None) -> HeadDrafter:
    """Build the drafter of a head. Raises `UserError` for a head of another kind than `kind`, if given."""
    head = context.head()
    if head is None:
        raise UserError("this method needs a head: set head to a directory or Hugging Face id")
    if kind is not None and head.kind != kind:
        raise UserError(f"the head is not of kind {kind}: choose method {head.kind} or hybrid")
    return HeadDrafter(head, context.draft_sampling, context.noise("draft"), context.vocab_size)
