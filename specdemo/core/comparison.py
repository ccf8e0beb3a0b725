"""Comparison of a chain with the target's logits on a device, without host synchronisation.

A step reads the result in one transfer: the draft, if it is on the device, most probable tokens, p and sum min(p, q) of
the draft tokens, and the token that follows if the draft is accepted up to a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specdemo.core.distributions import PointMass, ProbRows, dense_or_none, residual
from specdemo.core.sampling import SamplingParams, unread
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

    An engine that has recorded it sets `result`, of all tokens of a draft that is on the device. `correct` samples the
    token of the target above temperature 0.
    """

    sampling: SamplingParams
    draft: Draft
    correct: Any  # `Noise`
    result: ComparedRows | None = field(default=None, init=False)

    @property
    def length(self) -> int:
        """Number of compared tokens."""
        chain = unread(self.draft)
        return len(self.draft) if chain is None else len(chain.ids)

    def write(self, first: int, q: Tensor, exp_noise: Tensor) -> None:
        """Write the draft distributions `[rows, vocab]` from row `first` on, others 0, and random numbers `[vocab]`."""
        if self.sampling.temperature == 0:
            return
        q.zero_()
        if (chain := unread(self.draft)) is not None:
            ids, included = chain.ids, chain.included
            dense = chain.probs_on_device()
        else:
            ids = torch.tensor(self.draft.tokens, dtype=torch.int64, device=q.device)
            included = torch.ones(len(ids), 1, device=q.device)
            dense = None if self.draft.probs is None else self.draft.probs.dense()
        rows = q[first : first + len(ids)]
        if dense is None:
            rows.scatter_(1, ids[:, None], included)
        else:
            rows.copy_(dense)
        self.correct.write_exp_noise(exp_noise)

    def read(self, logits: Tensor) -> RuleInputs | None:
        """Transfer the result, if there is one, and the draft; `logits` `[rows, vocab]`."""
        if self.result is None:
            return None
        values, probs = self.result
        columns = self._transfer(values)
        draft = self.draft.read()
        count = len(draft)
        tokens, largest, *compared = (column[: count + 1] for column in columns)
        self.sampling.refuse_broken(largest)
        best = [int(token) for token in tokens]
        if not compared:
            return RuleInputs(best, draft, point_masses(best, logits), None)
        node_probs, overlaps, corrections = compared
        figures: Any = ComparedProbs(node_probs[:count], overlaps[:count])
        p = [PointMass(int(token)) for token in corrections]
        return RuleInputs(best, replace(draft, probs=figures), p, probs[: count + 1])

    def _transfer(self, values: Tensor) -> list[list[float]]:
        """Return the columns of `values`, together with those of the draft."""
        if (chain := unread(self.draft)) is None:
            return values.T.tolist()
        numbers = torch.cat((chain.values.flatten(), values.flatten())).tolist()
        end = chain.values.numel()
        chain.fill(_columns(numbers[:end], chain.values.shape[1]))
        return _columns(numbers[end:], values.shape[1])


def _columns(numbers: Sequence[float], width: int) -> list[list[float]]:
    """Return the columns of a matrix of `width` columns."""
    return [list(numbers[i::width]) for i in range(width)]


def point_masses(best: Sequence[int], logits: Tensor) -> list[PointMass]:
    """Return the target's distributions at temperature 0."""
    return [PointMass(token, logits, row) for row, token in enumerate(best)]


def comparison_buffers(
    sampling: SamplingParams, rows: int, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the buffers of `ChainComparison.write`."""
    q = torch.zeros(rows if sampling.temperature else 0, vocab_size, dtype=torch.float32, device=device)
    return q, torch.ones(vocab_size, dtype=torch.float32, device=device)


def compared_rows(sampling: SamplingParams, logits: Tensor, ids: Tensor, q: Tensor, exp_noise: Tensor) -> ComparedRows:
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
    corrections = (remainder / exp_noise).argmax(1, keepdim=True)
    return torch.cat((best, largest, p.gather(1, ids.roll(-1)[:, None]), overlaps, corrections), 1), p
