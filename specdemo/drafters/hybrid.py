"""Suffix drafts for repeated text, model drafts otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.step import Draft, Step
from specdemo.drafters.suffix import SuffixDrafter


class HybridDrafter:
    """Use the suffix drafter if its match has at least `trusted` tokens, otherwise the model."""

    def __init__(self, suffixes: SuffixDrafter, model: Drafter, trusted: int = 4) -> None:
        self._suffixes, self._model, self._trusted = suffixes, model, trusted

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        drafter = self._suffixes if self._suffixes.match(tokens) >= self._trusted else self._model
        return drafter.propose(tokens, budget)

    def observe(self, step: Step) -> None:
        self._suffixes.observe(step)
        self._model.observe(step)
