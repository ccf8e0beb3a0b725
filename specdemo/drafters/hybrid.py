"""Combine suffix drafts for repeated text with model drafts for other text."""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.step import Draft, Step
from specdemo.drafters.method import Method, StoreOptions
from specdemo.drafters.model import build_model_drafter
from specdemo.drafters.suffix import SuffixDrafter, build_suffix_drafter


class HybridDrafter:
    """Draft with `model` unless the suffix drafter matches at least `trusted` tokens."""

    def __init__(self, suffixes: SuffixDrafter, model: Drafter, trusted: int = 4) -> None:
        self._suffixes, self._model = suffixes, model
        self._trusted = trusted

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        return (self.repeating(tokens) or self._model).propose(tokens, budget)

    def repeating(self, tokens: Sequence[int]) -> SuffixDrafter | None:
        """Return the suffix drafter after a long repetition, None where the model drafts."""
        return self._suffixes if self._suffixes.match(tokens) >= self._trusted else None

    def observe(self, step: Step) -> None:
        self._suffixes.observe(step)
        self._model.observe(step)


METHOD = Method(
    name="hybrid",
    title="suffix decoding on repeated text, the smaller model otherwise",
    notes="""\
**The hybrid** drafts from suffixes after a long repetition and with the draft model otherwise. The choice precedes
sampling, so both proofs of exactness apply. It is fast on mixed text.""",
    build=lambda context: HybridDrafter(build_suffix_drafter(context), build_model_drafter(context)),
    options=(StoreOptions,),
    sampled=True,
    second_model=True,
    preflight="replay",
    replayed=HybridDrafter.repeating,
)
