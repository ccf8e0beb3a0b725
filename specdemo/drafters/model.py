"""Draft a chain of tokens with a smaller model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.distributions import DenseProbs
from specdemo.core.origin import MODEL
from specdemo.core.step import Draft
from specdemo.drafters.method import BuildContext, Method
from specdemo.drafters.universal import UniversalDrafter

if TYPE_CHECKING:
    from torch import Tensor

    from specdemo.core.sampling import SamplingParams


@dataclass(eq=False)
class ModelDrafter(Drafter):
    """Sample a chain with the target's sampling parameters (2211.17192, Algorithm 1).

    `score(tokens, draft)` returns raw logits `[1, own_size]`. Draft distributions have the target's `vocab_size`: ids
    unknown to the target are masked before the softmax, ids unknown to the drafter get no mass and, in the text, cause
    an empty draft. Texts beyond `context` have none. `extend`: see `CachedModel`.
    """

    score: Callable[[Sequence[int], Draft], Tensor]
    sampling: SamplingParams
    noise: Any
    vocab_size: int
    own_size: int | None = None  # None: all ids
    extend: Callable[[Sequence[int], int, Callable[[Tensor, int], Tensor | int]], list[int]] | None = None
    context: int = sys.maxsize

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        import torch

        from specdemo.core.sampling import fitted

        budget = budget.at_most(free_drafts(tokens, self.context))
        if budget.paused or not readable(tokens, self.own_size, self.vocab_size):
            return Draft()
        if self.extend and budget.unconditional and not self.sampling.needs_paths:
            return self._propose_fixed(tokens, budget.unconditional)
        greedy = self.sampling.temperature == 0  # point masses have no distributions to record
        path, distributions = list(tokens), []
        q = []
        while budget.may_extend(len(path) - len(tokens), None):
            logits = fitted(self.score(path, Draft()), self.vocab_size)
            if not budget.may_extend(len(path) - len(tokens), logits[0]):
                break
            logits = self.sampling.process_logits(logits, [path])
            if greedy:
                path.append(int(logits[0].argmax()))
                continue
            probs = self.sampling.logits_to_probs(logits)[0]
            token = self.noise.sample(probs, len(path))
            path.append(token)
            distributions.append(probs)
            q.append(probs[token])
        new = tuple(path[len(tokens) :])
        origin = (MODEL,) * len(new)
        if not distributions:
            return Draft.chain(new, origin=origin)
        return Draft.chain(new, tuple(torch.stack(q).tolist()), DenseProbs(torch.stack(distributions)), origin)

    def _propose_fixed(self, tokens: Sequence[int], count: int) -> Draft:
        from specdemo.core.sampling import ChainSampler

        assert self.extend is not None
        sampler = ChainSampler(self.sampling, self.noise, len(tokens), self.vocab_size)
        drafted = self.extend(tokens, count, sampler)
        return sampler.chain(drafted, (MODEL,) * len(drafted))


def readable(tokens: Sequence[int], own_size: int | None, vocab_size: int) -> bool:
    """Return True if the drafter's `own_size` ids include all `tokens`, which are below `vocab_size`."""
    return own_size is None or own_size >= vocab_size or max(tokens) < own_size


def free_drafts(tokens: Sequence[int], context: int) -> int:
    """Return the longest draft after `tokens`; its last token is not fed."""
    return max(0, context - len(tokens) + 1)


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
    preflight="distributions",
)
