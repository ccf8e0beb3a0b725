"""Acceptance rules.

A rule turns a draft and the target's laws into a verdict. Knows laws, never models. Each rule says when it is exact,
that is when the text has the target's own law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdemo.core.sampling import PointMass, SamplingParams
from specdemo.core.step import Draft, Verdict

Probs = Tensor | PointMass  # `[vocab]`
ProbRows = Tensor | Sequence[PointMass]  # `[rows, vocab]`


class AcceptanceTest(Protocol):
    """Where yes and no come from: a `Noise`, or a test that explores both."""

    def test(self, probability: float) -> tuple[bool, float]:
        """Whether an event of this probability happens, and the number that decided it."""


class TokenSampler(Protocol):
    """Where tokens come from: a `Noise`, `Shared` noise, or a test that explores them all."""

    def draw(self, probs: Tensor, place: int) -> int:
        """A token from a law `[vocab]`, to stand at this place of the text."""


def residual(p: Probs, q: Tensor) -> Probs:
    """norm(max(p - q, 0)), `[vocab]`: where a correction comes from (2211.17192, section 2.3).

    Where rounding leaves nothing, p and q were equal and p itself is right. What is left of a point is the point.
    """
    if isinstance(p, PointMass):
        return p
    left = (p - q).clamp_(min=0)
    total = left.sum()
    return left / total if total > 0 else p


def without(p: Probs, token: int) -> Probs:
    """The residual of a point mass: p given that it is not `token`."""
    if isinstance(p, PointMass):
        return p
    left = p.clone()
    left[token] = 0
    total = left.sum()
    return left / total if total > 0 else p


def rejection(
    draft: Draft, p: ProbRows, accept: AcceptanceTest, correct: TokenSampler, start: int, *, adjust: bool = True
) -> Verdict:
    """Speculative sampling for chains and forests, sampled or point-mass drafts; exact.

    `p` has n + 1 rows: row 0 after the last committed token, row i + 1 after node i; `start` is the place of the
    token after row 0. A child y drawn from q is accepted with min(1, p(y) / q(y)); if not, its siblings are tested
    against the residual (2211.17192 Algorithm 1; SpecInfer 2305.09781 Algorithm 3 for siblings). `adjust=False` draws
    corrections from p: lossy.
    """
    return _walk(draft, p, correct, start, adjust, lambda token, chance, q, row: accept.test(min(1.0, chance / q)))


def tested_by(passes: Callable[[int, float, float, Probs, float], bool]) -> Callable[..., Verdict]:
    """A rule without chance: a child is accepted iff `passes(token, p, q, row of p, threshold)`.

    Corrections are drawn from the residual, or with `adjust=False` from p.
    """

    def rule(
        draft: Draft,
        p: ProbRows,
        accept: AcceptanceTest,
        correct: TokenSampler,
        start: int,
        *,
        threshold: float = 0.0,
        adjust: bool = False,
    ) -> Verdict:
        return _walk(
            draft,
            p,
            correct,
            start,
            adjust,
            lambda token, chance, q, row: (passes(token, chance, q, row, threshold), None),
        )

    return rule


# The target's first choice (NASD's verification); p / q and p above a threshold (the practice guide's short cuts);
# Medusa's typical acceptance, p > min(e, sqrt(e) exp(-H(p))) (2401.10774, section 2.3.1).
top1 = tested_by(lambda token, p, q, row, threshold: token == _first(row))
ratio = tested_by(lambda token, p, q, row, threshold: p >= threshold * q)
threshold = tested_by(lambda token, p, q, row, threshold: p >= threshold)
typical = tested_by(
    lambda token, p, q, row, threshold: p > min(threshold, math.sqrt(threshold) * math.exp(-_entropy(row)))
)


def match(draft: Draft, p: ProbRows, accept: AcceptanceTest, correct: TokenSampler, start: int) -> Verdict:
    """Draw from p itself and go on while the draft has what was drawn; what it has not is the correction. Exact.

    With noise that is keyed by place and shared with the drafter this is the coupled rule (2408.07978).
    """
    kids, probability = draft.children(), _at_nodes(draft, p)
    overlap = _overlaps(draft, p, probability)
    betas: list[float | None] = [None] * len(draft)
    accepted: list[int] = []
    node: int | None = -1
    while node is not None:
        token = _drawn(p[node + 1], correct, start + len(accepted))
        siblings = kids.get(node, ())
        for child in siblings:
            betas[child] = overlap[child]
        node = next((child for child in siblings if draft.tokens[child] == token), None)
        if node is not None:
            accepted.append(node)
    return Verdict(tuple(accepted), token, tuple(probability), (None,) * len(draft), tuple(betas))


def _walk(
    draft: Draft,
    p: ProbRows,
    correct: TokenSampler,
    start: int,
    adjust: bool,
    test: Callable[[int, float, float, Probs], tuple[bool, float | None]],
) -> Verdict:
    """From the root down, the first child that passes `test(token, p, q, row)`; a correction where none does."""
    probability = _at_nodes(draft, p)
    draws: list[float | None] = [None] * len(draft)
    betas: list[float | None] = [None] * len(draft)
    overlap = _overlaps(draft, p, probability)
    kids = draft.children()
    accepted: list[int] = []
    node, row = -1, p[0]
    while node in kids:
        untouched = True
        for child in kids[node]:
            token = draft.tokens[child]
            chance = probability[child] if untouched else _chance(row, token)
            q = 1.0 if draft.token_probs is None else draft.token_probs[child]
            kept, draws[child] = test(token, chance, q, row) if q > 0 else (False, None)
            betas[child] = overlap[child]
            if kept:
                accepted.append(child)
                node, row = child, p[child + 1]
                break
            if adjust:
                row = without(row, token) if draft.probs is None else residual(row, draft.probs[child])
                untouched = False
        else:
            break
    token = _drawn(row, correct, start + len(accepted))
    return Verdict(tuple(accepted), token, tuple(probability), tuple(draws), tuple(betas))


def _chance(row: Probs, token: int) -> float:
    return float(row.token == token) if isinstance(row, PointMass) else float(row[token])


def _first(row: Probs) -> int:
    return row.token if isinstance(row, PointMass) else int(row.argmax())


def _entropy(row: Probs) -> float:
    return 0.0 if isinstance(row, PointMass) else float(torch.special.entr(row).sum())


def _drawn(row: Probs, source: TokenSampler, place: int) -> int:
    return row.token if isinstance(row, PointMass) else source.draw(row, place)


def _at_nodes(draft: Draft, p: ProbRows) -> list[float]:
    """The target's probability of each drafted token, `[n]`."""
    if not draft.tokens:
        return []
    if not isinstance(p, Tensor):
        return [_chance(p[parent + 1], token) for token, parent in zip(draft.tokens, draft.parents, strict=True)]
    width = p.shape[1]
    places = [(parent + 1) * width + token for token, parent in zip(draft.tokens, draft.parents, strict=True)]
    return p.take(torch.tensor(places, device=p.device)).tolist()


def _before(draft: Draft, p: Tensor) -> Tensor:
    """The row of p that each node was to follow, `[n, vocab]`."""
    return p[: len(draft)] if draft.is_chain else p[torch.tensor(draft.parents, device=p.device) + 1]


def _overlaps(draft: Draft, p: ProbRows, probability: list[float]) -> list[float]:
    """beta = sum min(p, q) where each node stands, `[n]`; for a point mass that is p of its token.

    Where laws are not all there, min(1, p / q) of the token: its mean over what q draws is beta.
    """
    if draft.probs is None:
        return probability
    if not isinstance(draft.probs, Tensor):
        return [min(1.0, p / q) if q > 0 else 0.0 for p, q in zip(probability, draft.token_probs or (), strict=True)]
    if not isinstance(p, Tensor):
        return [float(q[p[parent + 1].token]) for q, parent in zip(draft.probs, draft.parents, strict=True)]
    return torch.minimum(_before(draft, p), draft.probs).sum(-1).tolist()


@dataclass(frozen=True)
class Rule:
    """A named rule: how it decides, one line for people, and when the text keeps the target's law."""

    apply: Callable[..., Verdict]
    title: str
    exact: Callable[[SamplingParams], bool]
    threshold: float | None = None  # its usual one; None: it has none
    shares_noise: bool = False  # drafter and target draw with the same noise, keyed by place
    adjusts: bool = False  # corrections may be drawn from p instead of the residual
    needs_q: bool = False  # what is accepted depends on the drafter's law


def _always(sampling: SamplingParams) -> bool:
    return True


def _when_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature == 0


RULES = {
    "rejection": Rule(
        rejection, "accept with min(1, p/q), correct from the residual: exact", _always, adjusts=True, needs_q=True
    ),
    "match": Rule(match, "sample from p, accept while the draft contains it: exact", _always),
    "coupled": Rule(
        match,
        "match, with noise shared with the drafter: exact, the text of AR decoding",
        _always,
        shares_noise=True,
    ),
    "top1": Rule(top1, "accept the most probable target token: exact at temperature 0, lossy above", _when_greedy),
    "ratio": Rule(
        ratio, "accept if p/q reaches a threshold: lossy above temperature 0", _when_greedy, threshold=0.5, needs_q=True
    ),
    "threshold": Rule(
        threshold, "accept if p reaches a threshold: lossy above temperature 0", _when_greedy, threshold=0.3
    ),
    "typical": Rule(typical, "Medusa's typical acceptance: lossy above temperature 0", _when_greedy, threshold=0.09),
}
