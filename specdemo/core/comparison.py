"""Comparison of a chain with the target's logits on a device, without host synchronisation.

A step reads the result in one transfer: most probable tokens, p and sum min(p, q) of the draft tokens, and the token
that follows if the draft is accepted up to a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specdemo.core.distributions import PointMass, ProbRows, dense_or_none, residual
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft, Verdict

ComparedRows = tuple[Tensor, Tensor]  # values `[rows, 2]`, above temperature 0 `[rows, 5]`, and distributions


@dataclass(frozen=True)
class ComparedProbs:
    """Draft distributions that have been compared with the target's."""

    node_probs: list[float]
    overlaps: list[float]

    def compare(self, p: ProbRows, tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[float], list[float]]:
        return self.node_probs, self.overlaps


@dataclass(frozen=True)
class RuleInputs:
    """Draft and target rows for an acceptance rule, with the most probable tokens."""

    best: list[int]
    draft: Draft
    p: ProbRows
    probs: Tensor | None  # distributions `[rows, vocab]` above temperature 0

    def with_residual(self, verdict: Verdict, draft: Draft) -> Verdict:
        """Add the distribution of a correction that was sampled before the rule."""
        end = len(verdict.accepted)
        if self.probs is None or self.p is self.probs or end == len(draft):
            return verdict
        q = PointMass(draft.tokens[end]) if draft.probs is None else draft.probs.row(end)
        return replace(verdict, residual=dense_or_none(residual(self.probs[end], q)))


@dataclass(eq=False)
class ChainComparison:
    """Comparison of `draft`, a chain, by rule `rejection`, or by any rule at temperature 0.

    An engine that has recorded it sets `result`. `correct` samples the token of the target above temperature 0.
    """

    sampling: SamplingParams
    draft: Draft
    correct: Any  # `Noise`
    result: ComparedRows | None = field(default=None, init=False)

    def write(self, first: int, q: Tensor, arrivals: Tensor) -> None:
        """Write the draft distributions `[rows, vocab]` from row `first` on, others 0, and random numbers `[vocab]`."""
        if self.sampling.temperature == 0:
            return
        rows, probs = q[first : first + len(self.draft)], self.draft.probs
        dense = None if probs is None else probs.dense()
        q.zero_()
        if dense is None:
            tokens = torch.tensor(self.draft.tokens, dtype=torch.int64, device=q.device)
            rows.scatter_(1, tokens[:, None], 1.0)
        else:
            rows.copy_(dense)
        self.correct.write_arrivals(arrivals)

    def read(self, logits: Tensor) -> RuleInputs | None:
        """Transfer the result, if there is one; `logits` `[rows, vocab]`."""
        if self.result is None:
            return None
        values, probs = self.result
        tokens, largest, *compared = values.T.tolist()
        self.sampling.refuse_broken(largest)
        best = [int(token) for token in tokens]
        if not compared:
            return RuleInputs(best, self.draft, point_masses(best, logits), None)
        node_probs, overlaps, corrections = compared
        count = len(self.draft)
        figures: Any = ComparedProbs(node_probs[:count], overlaps[:count])
        p = [PointMass(int(token)) for token in corrections]
        return RuleInputs(best, replace(self.draft, probs=figures), p, probs)


def point_masses(best: Sequence[int], logits: Tensor) -> list[PointMass]:
    """Return the target's distributions at temperature 0."""
    return [PointMass(token, logits, row) for row, token in enumerate(best)]


def comparison_buffers(
    sampling: SamplingParams, rows: int, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the buffers of `ChainComparison.write`."""
    q = torch.zeros(rows if sampling.temperature else 0, vocab_size, dtype=torch.float32, device=device)
    return q, torch.ones(vocab_size, dtype=torch.float32, device=device)


def compared_rows(sampling: SamplingParams, logits: Tensor, ids: Tensor, q: Tensor, arrivals: Tensor) -> ComparedRows:
    """Compare raw logits `[rows, vocab]` of the passed tokens `ids` `[rows]` with q, see `ChainComparison.write`.

    Values: most probable token, its logit, p of the next token, sum min(p, q), sample of the residual.
    """
    logits = logits.float()
    best = logits.argmax(1, keepdim=True)
    largest = logits.gather(1, best)
    if sampling.temperature == 0:
        return torch.cat((best, largest), 1), logits
    p = sampling.logits_to_probs(logits)
    overlaps = torch.minimum(p, q).sum(1, keepdim=True)
    excess = (p - q).clamp_(min=0)
    mass = excess.sum(1, keepdim=True)
    remainder = torch.where(mass > 0, excess / mass, p)
    corrections = (remainder / arrivals).argmax(1, keepdim=True)
    return torch.cat((best, largest, p.gather(1, ids.roll(-1)[:, None]), overlaps, corrections), 1), p
