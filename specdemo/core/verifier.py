"""Verification by a local model; beam search has a verifier in `core/beam.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdemo.core.rules import AcceptanceTest, ProbRows, TokenSampler
from specdemo.core.sampling import PointMass, SamplingParams, top_tokens
from specdemo.core.step import Draft, Verdict


class ModelVerifier:
    """Applies an acceptance rule to the target's distributions.

    `score(tokens, draft)` returns raw target logits `[n + 1, vocab]`. The verdict records the `candidates` most
    probable tokens per row, and with `top` the most probable tokens of each distribution.
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
        if self._top:
            # Point masses are recorded as the softmax that they were taken from.
            verdict = with_top_tokens(verdict, draft, p if isinstance(p, Tensor) else logits.softmax(-1), self._top)
        return replace(verdict, residual=None)


def with_top_tokens(verdict: Verdict, draft: Draft, p: Tensor, count: int) -> Verdict:
    """Record the `count` most probable tokens of every distribution, and the rank of each draft token.

    `p` `[n + 1, vocab]`. The distributions of one position are recorded for the same tokens: the most probable of
    either, the drafted ones and the token of the target. A residual can then be computed from the recorded values.
    """
    q = draft.probs if isinstance(draft.probs, Tensor) else None
    tokens = position_tokens(draft, verdict.token, verdict.accepted)
    tops = list(p.topk(min(count, p.shape[-1])).indices.tolist())
    for row, top in zip(tokens, tops, strict=True):
        row.update(top)
    if q is not None:
        for parent, top in zip(draft.parents, q.topk(min(count, q.shape[-1])).indices.tolist(), strict=True):
            tokens[parent + 1].update(top)
    end = (verdict.accepted[-1] if verdict.accepted else -1) + 1
    return replace(
        verdict,
        rank=_ranks(p, draft),
        target_top=top_tokens(p, count, tokens),
        draft_top=() if q is None else top_tokens(q, count, [tokens[parent + 1] for parent in draft.parents]),
        token_top=None if verdict.residual is None else top_tokens(verdict.residual[None], count, [tokens[end]])[0],
    )


def position_tokens(draft: Draft, token: int | None, accepted: Sequence[int]) -> list[set[int]]:
    """Return for each row r the drafted tokens that follow node r - 1, and the target's token after its row."""
    tokens: list[set[int]] = [set() for _ in range(len(draft) + 1)]
    for node, parent in enumerate(draft.parents):
        tokens[parent + 1].add(draft.tokens[node])
    if token is not None:
        tokens[(accepted[-1] if accepted else -1) + 1].add(token)
    return tokens


def _ranks(p: Tensor, draft: Draft) -> tuple[int, ...]:
    if not draft.tokens:
        return ()
    rows = p[torch.tensor(draft.parents, device=p.device) + 1]
    chosen = rows.gather(-1, torch.tensor(draft.tokens, device=p.device)[:, None])
    return tuple((1 + (rows > chosen).sum(-1)).tolist())
