"""The judge of every method but searches: the target's laws, and a rule that is applied to them. Knows no models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from specdemo.core.rules import AcceptanceTest, ProbRows, TokenSampler
from specdemo.core.sampling import PointMass, SamplingParams, top_tokens
from specdemo.core.step import Draft, Verdict


class ModelVerifier:
    """A judge: the target's laws under a rule."""

    def __init__(
        self,
        score: Callable[[Sequence[int], Draft], Tensor],
        sampling: SamplingParams,
        rule: Callable[[Draft, ProbRows, Any, Any, int], Verdict],
        accept: AcceptanceTest,
        correct: TokenSampler,
        candidates: int = 1,
        top: int = 0,
    ) -> None:
        """`candidates` first choices per row and `top` tokens of every law are written into the verdict."""
        self._top = top
        self._score, self._sampling, self._rule = score, sampling, rule
        self._accept, self._correct, self._candidates = accept, correct, candidates

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        """One pass of the target over `tokens` and `draft`, and the rule's verdict."""
        logits = self._score(tokens, draft)  # [n + 1, vocab]
        nodes = range(-1, len(draft)) if self._sampling.needs_paths else ()
        logits = self._sampling.process_logits(
            logits, [[*tokens, *(draft.tokens[i] for i in draft.path(node))] for node in nodes]
        )
        many = self._candidates > 1  # for a single one this is several times faster
        choices = logits.topk(self._candidates).indices if many else logits.argmax(-1, keepdim=True)
        greedy = self._sampling.temperature == 0
        firsts = (logits.argmax(-1) if many else choices[:, 0]).tolist() if greedy else ()
        p = [PointMass(token) for token in firsts] if greedy else self._sampling.logits_to_probs(logits)
        if (
            isinstance(draft.probs, Tensor) and draft.probs.device != logits.device
        ):  # the drafter has a device of its own
            draft = replace(draft, probs=draft.probs.to(logits.device))
        verdict = self._rule(draft, p, self._accept, self._correct, len(tokens))
        verdict = replace(verdict, choices=tuple(map(tuple, choices.tolist())))
        if not self._top:
            return verdict
        # Of a point mass there is nothing to see: then the law that it is the peak of.
        distributions = top_tokens(p if isinstance(p, Tensor) else logits.softmax(-1), self._top)
        return replace(
            verdict,
            target_top=distributions,
            draft_top=top_tokens(draft.probs, self._top) if isinstance(draft.probs, Tensor) else (),
        )
