"""Distributions over tokens (dense, sparse or one-hot) and the distributions that draft tokens are sampled from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PointMass:
    """One-hot distribution, stored as its token, with the `row` of `logits` it is the maximum of, if known."""

    token: int
    logits: Tensor | None = field(default=None, compare=False, repr=False)  # `[rows, vocab]`
    row: int = field(default=0, compare=False, repr=False)

    def relative(self, token: int) -> float:
        """Return the probability of `token` at temperature 1, divided by the largest."""
        if self.logits is None or token == self.token:
            return float(token == self.token)
        return math.exp(float(self.logits[self.row, token] - self.logits[self.row, self.token]))


@dataclass(frozen=True, slots=True, eq=False)
class SparseRow:
    """Distribution on different tokens `ids` `[k]` with `values` `[k]`, such as that of a draft vocabulary."""

    ids: Tensor
    values: Tensor
    vocab_size: int

    def dense(self) -> Tensor:
        return self.values.new_zeros(self.vocab_size).scatter_(0, self.ids, self.values)


Probs: TypeAlias = "Tensor | PointMass"  # a distribution `[vocab]`
ProbRows: TypeAlias = "Tensor | Sequence[PointMass]"  # distributions `[rows, vocab]`
DraftRowProbs: TypeAlias = "Tensor | SparseRow | PointMass"  # a distribution `[vocab]`
AnyProbs = TypeVar("AnyProbs", "Tensor", SparseRow, PointMass)
Comparison = tuple[list[float], list[float]]


class DraftProbs(Protocol):
    """Interface of the distributions that the tokens of a draft were sampled from."""

    @property
    def device(self) -> torch.device: ...

    def row(self, node: int) -> DraftRowProbs: ...

    def dense(self) -> Tensor | None:
        """Return all rows `[n, vocab]`; None for point masses and incomplete rows."""

    def to(self, device: torch.device) -> DraftProbs: ...

    def compare(self, p: ProbRows, tokens: Sequence[int], parents: Sequence[int]) -> Comparison:
        """Compare with the target's rows `[n + 1, vocab]`."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseProbs:
    """Draft distributions stored as the matrix `rows` `[n, vocab]`."""

    rows: Tensor

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def row(self, node: int) -> Tensor:
        return self.rows[node]

    def dense(self) -> Tensor:
        return self.rows

    def to(self, device: torch.device) -> DenseProbs:
        return DenseProbs(self.rows.to(device))

    def compare(self, p: ProbRows, tokens: Sequence[int], parents: Sequence[int]) -> Comparison:
        import torch

        from specdemo.native import sampling as native

        q = self.rows
        if isinstance(p, torch.Tensor):
            return native.compare_drafts(p, q, parents, tokens)
        overlaps = [float(row[p[parent + 1].token]) for row, parent in zip(q, parents, strict=True)]
        return node_probs(p, tokens, parents), overlaps


@dataclass(frozen=True, slots=True, eq=False)
class SparseProbs:
    """Draft distributions on the different tokens `ids` `[k]` with `values` `[n, k]`."""

    ids: Tensor
    values: Tensor
    vocab_size: int

    @property
    def device(self) -> torch.device:
        return self.values.device

    def row(self, node: int) -> SparseRow:
        return SparseRow(self.ids, self.values[node], self.vocab_size)

    def dense(self) -> Tensor:
        return self.values.new_zeros(len(self.values), self.vocab_size).index_copy_(1, self.ids, self.values)

    def to(self, device: torch.device) -> SparseProbs:
        return SparseProbs(self.ids.to(device), self.values.to(device), self.vocab_size)

    def compare(self, p: ProbRows, tokens: Sequence[int], parents: Sequence[int]) -> Comparison:
        import torch

        from specdemo.native import sampling as native

        if isinstance(p, torch.Tensor):
            return native.compare_drafts(p, self.values, parents, tokens, self.ids)
        targets = torch.tensor([p[parent + 1].token for parent in parents], device=self.device)
        overlaps = (self.values * (self.ids == targets[:, None])).sum(-1)
        return node_probs(p, tokens, parents), overlaps.tolist()


@dataclass(frozen=True, slots=True)
class PointMasses:
    """Distributions of tokens drafted without sampling."""

    tokens: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def row(self, node: int) -> PointMass:
        return PointMass(self.tokens[node])

    def dense(self) -> None:
        return None

    def to(self, device: torch.device) -> PointMasses:
        return self

    def compare(self, p: ProbRows, tokens: Sequence[int], parents: Sequence[int]) -> Comparison:
        probs = node_probs(p, tokens, parents)
        return probs, probs


def node_probs(p: ProbRows, tokens: Sequence[int], parents: Sequence[int]) -> list[float]:
    """Return the target probability of each draft token, `[n]`."""
    import torch

    if not isinstance(p, torch.Tensor):
        return [token_prob(p[parent + 1], token) for token, parent in zip(tokens, parents, strict=True)]
    from specdemo.native import sampling as native

    return native.probs_of_tokens(p, parents, tokens)


class TokenSampler(Protocol):
    """Source of random tokens: `Noise`, `SharedNoise` or an enumeration."""

    def sample(self, probs: Tensor, position: int) -> int:
        """Sample a token from `probs` `[vocab]`."""


def sample_token(row: Probs, sampler: TokenSampler, position: int) -> int:
    return row.token if isinstance(row, PointMass) else sampler.sample(row, position)


def dense_or_none(row: Probs) -> Tensor | None:
    return None if isinstance(row, PointMass) else row


def token_prob(row: Probs, token: int) -> float:
    return float(row.token == token) if isinstance(row, PointMass) else float(row[token])


def draft_prob(row: DraftRowProbs, token: int) -> float:
    return float(row.values[row.ids == token].sum()) if isinstance(row, SparseRow) else token_prob(row, token)


def top_token(row: Probs) -> int:
    return row.token if isinstance(row, PointMass) else int(row.argmax())


def entropy(row: Probs) -> float:
    """Return the entropy in nats."""
    import torch

    return 0.0 if isinstance(row, PointMass) else float(torch.special.entr(row).sum())


def excess(p: Probs, q: DraftRowProbs, weight: float) -> float:
    """Return the sum of max(weight p - q, 0)."""
    if isinstance(p, PointMass):
        return max(0.0, weight - draft_prob(q, p.token))
    if isinstance(q, PointMass):
        return weight * (1 - float(p[q.token]))
    if isinstance(q, SparseRow):
        covered = p[q.ids]
        return float(weight * (1 - covered.sum()) + (weight * covered - q.values).clamp_(min=0).sum())
    from specdemo.native import sampling as native

    return native.excess_mass(p, q, weight)


def residual(p: Probs, q: DraftRowProbs, weight: float = 1.0) -> Probs:
    """Return norm(max(weight p - q, 0)) `[vocab]`, the distribution of corrections (2211.17192, section 2.3).

    Return p if the residual is zero (p equals q up to rounding) or p is a point mass.
    """
    if isinstance(p, PointMass):
        return p
    if isinstance(q, PointMass):
        return without(p, q.token)
    from specdemo.native import sampling as native

    if isinstance(q, SparseRow):
        return native.sparse_residual_probs(p, q.ids, q.values, weight)
    return native.residual_probs(p, q, weight)


def without(p: AnyProbs, token: int) -> AnyProbs:
    """Return p conditioned on any token except `token`: the residual for a point-mass draft."""
    if isinstance(p, PointMass):
        return p
    if isinstance(p, SparseRow):
        values = p.values.masked_fill(p.ids == token, 0)
        total = values.sum()
        return SparseRow(p.ids, values / total, p.vocab_size) if total > 0 else p
    remainder = p.clone()
    remainder[token] = 0
    total = remainder.sum()
    return remainder / total if total > 0 else p
