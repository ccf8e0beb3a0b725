"""A language model without KV cache between passes, to compare with `CachedModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.kv_cache import CachedModel


class UncachedModel(CachedModel):
    """Function from tokens and a draft to logits that computes all tokens in each pass."""

    def prefill(self, tokens: Sequence[int], clock: Any = None) -> Iterator[int]:
        """Return no chunks: each pass reads the prompt again."""
        return iter(())

    def extend(
        self,
        tokens: Sequence[int],
        count: int,
        pick: Callable[[Tensor, int], Tensor | int],
        limits: Sequence[float] = (),
    ) -> None:
        """Return None: each token is drafted by a pass over the complete text."""

    def _keep(self, tokens: Sequence[int], draft: Draft) -> tuple[int, Tensor]:
        super()._keep(tokens[:1], Draft())
        self._cache.keep(0)
        return 0, torch.empty(0, 0)
