"""Draft a chain of tokens with a smaller model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specdemo.core.step import MODEL, Draft
from specdemo.drafters.chain import ChainDrafter
from specdemo.drafters.method import BuildContext, Method
from specdemo.drafters.universal import UniversalDrafter

if TYPE_CHECKING:
    from torch import Tensor

    from specdemo.core.sampling import ChainSampler, SamplingParams, UnreadDraft

ScoreDraft = Callable[[Sequence[int], Draft], "Tensor"]
ExtendText = Callable[[Sequence[int], int, "ChainSampler", Sequence[float]], "list[int] | UnreadDraft | None"]


@dataclass(eq=False)
class ModelScorer:
    """Logits of a model for the target's `vocab_size` tokens.

    `model(tokens, draft)` returns raw logits `[len(draft) + 1, own_size]`. Ids unknown to the target are masked before
    the softmax; ids unknown to the drafter get no mass and, in the text, prevent drafts, like texts beyond `context`.
    `extend`: see `CachedModel`.
    """

    model: ScoreDraft
    vocab_size: int
    own_size: int | None = None  # None: all ids
    context: int = sys.maxsize
    extend: ExtendText | None = None
    origin = MODEL
    ids = None
    confidence = None

    def longest_draft(self, tokens: Sequence[int]) -> int:
        """Return the most draft tokens after `tokens`, of which the last is not fed."""
        if self.own_size is not None and self.own_size < self.vocab_size and max(tokens) >= self.own_size:
            return 0
        return max(0, self.context - len(tokens) + 1)

    def logits(self, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Return raw logits `[len(draft) + 1, vocab_size]`."""
        from specdemo.core.sampling import fitted

        return fitted(self.model(tokens, draft), self.vocab_size)

    def start(self, tokens: Sequence[int]) -> Tensor:
        self._path = list(tokens)
        return self.logits(self._path, Draft())[0]

    def step(self, token: int) -> Tensor:
        self._path.append(token)
        return self.logits(self._path, Draft())[0]

    def score_nodes(self, tokens: Sequence[int], draft: Draft, nodes: Sequence[int]) -> list[Tensor]:
        logits = self.logits(tokens, draft)
        return [logits[node + 1] for node in nodes]

    def sample_chain(
        self, tokens: Sequence[int], sampler: ChainSampler, limits: Sequence[float]
    ) -> list[int] | UnreadDraft | None:
        return None if self.extend is None else self.extend(tokens, len(limits), sampler, limits)

    def expect(self) -> None:
        """Ignore preparations."""


class ModelDrafter(ChainDrafter):
    """Sample a chain from a model, see `ModelScorer`."""

    def __init__(
        self,
        score: ScoreDraft,
        sampling: SamplingParams,
        noise: Any,
        vocab_size: int,
        own_size: int | None = None,
        extend: ExtendText | None = None,
        context: int = sys.maxsize,
    ) -> None:
        super().__init__(ModelScorer(score, vocab_size, own_size, context, extend), sampling, noise, vocab_size)


def build_model_drafter(context: BuildContext) -> ModelDrafter | UniversalDrafter:
    model = context.scorer("drafter")
    if context.bridge is None:
        sampling, noise = context.draft_sampling, context.noise("draft")
        sizes = context.vocab_size, model.vocab_size
        return ModelDrafter(model.score, sampling, noise, *sizes, model.extend, model.context)
    # Point masses: the most probable token is accepted more often than a sampled one.
    sampling, noise = replace(context.drafter_sampling, temperature=0), context.noise("draft", shared=False)
    inner = ModelDrafter(model.score, sampling, noise, model.vocab_size, extend=model.extend)
    return UniversalDrafter(inner, context.bridge.read, context.bridge.write, model.context)


METHOD = Method(
    name="draft",
    title="a smaller model drafts, the target verifies",
    notes="""\
**A draft model** samples up to γ tokens from its distribution q. The target scores all of them in one pass. Token x is
accepted with probability min(1, p(x)/q(x)). The first rejected token is replaced by a sample from norm(max(p − q, 0)),
so the text follows p exactly. Speed-up is (1 − α^(γ+1)) / ((1 − α)(γc + 1)). It is high for a large
α = accepted/tested, which the mean overlap β = Σ min(p, q) estimates with less noise, and a small cost ratio c.
*Leviathan et al. 2211.17192; Chen et al. 2302.01318.*""",
    build=build_model_drafter,
    sampled=True,
    drafter="model",
    gates=True,
)
