"""Verification by a local model; beam search has a verifier in `core/beam.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from specdemo.core.rules import AcceptanceTest, PointMass, ProbRows, TokenSampler
from specdemo.core.sampling import SamplingParams, top_tokens
from specdemo.core.step import Draft, Verdict


class ModelVerifier:
    """Applies an acceptance rule to the target's distributions.

    `score(tokens, draft)` returns raw target logits `[n + 1, vocab]`. The verdict records the `candidates` most
    probable tokens per row, and the `top` most probable tokens of each distribution with their probabilities.
    """

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
        self._top = top
        self._score, self._sampling, self._rule = score, sampling, rule
        self._accept, self._correct, self._candidates = accept, correct, candidates

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        logits = self._score(tokens, draft)
        nodes = range(-1, len(draft)) if self._sampling.needs_paths else ()
        logits = self._sampling.process_logits(
            logits, [[*tokens, *(draft.tokens[i] for i in draft.path(node))] for node in nodes]
        )
        several = self._candidates > 1  # argmax is several times faster than top-1
        choices = logits.topk(self._candidates).indices if several else logits.argmax(-1, keepdim=True)
        greedy = self._sampling.temperature == 0
        argmax = (logits.argmax(-1) if several else choices[:, 0]).tolist() if greedy else ()
        p = [PointMass(token) for token in argmax] if greedy else self._sampling.logits_to_probs(logits)
        if isinstance(draft.probs, Tensor) and draft.probs.device != logits.device:
            draft = replace(draft, probs=draft.probs.to(logits.device))
        verdict = self._rule(draft, p, self._accept, self._correct, len(tokens))
        verdict = replace(verdict, choices=tuple(map(tuple, choices.tolist())))
        if not self._top:
            return verdict
        # Point masses are recorded as the softmax that they were taken from.
        return replace(
            verdict,
            target_top=top_tokens(p if isinstance(p, Tensor) else logits.softmax(-1), self._top),
            draft_top=top_tokens(draft.probs, self._top) if isinstance(draft.probs, Tensor) else (),
        )
