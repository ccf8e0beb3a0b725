"""Distributions over a draft vocabulary: the part of the target's tokens that a drafter has logits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdemo.core.distributions import DenseProbs, SparseProbs, SparseRow

if TYPE_CHECKING:
    from torch import Tensor

    from specdemo.core.sampling import SamplingParams

_EXCLUDED = -1e30  # finite, since a text may exclude all of a draft vocabulary


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Target tokens `ids` `[size]` of the logits; None: all `vocab_size` tokens."""

    ids: Tensor | None
    vocab_size: int

    def process(self, sampling: SamplingParams, logits: Tensor, path: Sequence[int]) -> Tensor | None:
        """Process raw logits `[size]` after the text `path`; return None if that excludes all tokens."""
        logits = logits.float()
        if sampling.needs_paths and self.ids is not None:
            logits = logits.new_full((self.vocab_size,), _EXCLUDED).index_put_((self.ids,), logits)
            logits = sampling.constrain(logits[None], [path])[0, self.ids]
        elif sampling.needs_paths:
            logits = sampling.constrain(logits[None], [path])[0]
        best = float(logits.max())
        if self.ids is not None and best <= _EXCLUDED:
            return None
        sampling.refuse_broken([best])
        return logits

    def token(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])

    def index(self, token: int) -> int:
        return token if self.ids is None else int((self.ids == token).nonzero())

    def sample(self, values: Tensor, noise: Any, position: int) -> int:
        """Sample a token from the probabilities `values` `[size]`."""
        if self.ids is None:
            return noise.sample(values, position)
        return noise.sample_sparse(SparseRow(self.ids, values, self.vocab_size), position)

    def rows(self, values: Sequence[Tensor]) -> DenseProbs | SparseProbs:
        """Return the distributions of a draft."""
        import torch

        stacked = torch.stack(list(values))
        if self.ids is None:
            return DenseProbs(stacked)
        return SparseProbs(self.ids, stacked, self.vocab_size)
