"""Combine suffix drafts for repeated text with drafts of a model or a head for other text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.step import Draft, Step
from specdemo.drafters.heads import build_head_drafter
from specdemo.drafters.method import BuildContext, Method, StoreOptions
from specdemo.drafters.model import build_model_drafter
from specdemo.drafters.suffix import SuffixDrafter, build_suffix_drafter


@dataclass(eq=False)
class HybridDrafter:
    """Draft with `model`, if any, unless the suffix drafter matches at least `trusted` tokens."""

    suffixes: SuffixDrafter
    model: Drafter | None
    trusted: int = 4

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        if self.model is None or self.suffixes.match(tokens) >= self.trusted:
            return self.suffixes.propose(tokens, budget)
        return self.model.propose(tokens, budget)

    @property
    def store_bytes(self) -> int:
        return self.suffixes.store_bytes

    def observe(self, step: Step) -> None:
        if self.model is not None:
            self.model.observe(step)


def _build(context: BuildContext) -> HybridDrafter:
    model: Drafter | None = None
    if context.head() is not None:
        model = build_head_drafter(context)
    elif context.has_drafter:
        model = build_model_drafter(context)
    return HybridDrafter(build_suffix_drafter(context), model)


METHOD = Method(
    name="hybrid",
    title="suffix decoding on repeated text, a smaller model or a head otherwise",
    notes="""\
**The hybrid** drafts from suffixes after a long repetition and with the draft model or a head otherwise. The method
is chosen before any token is drawn, so the text stays exact. It is fast on mixed text on a CPU; with heads, the
speed was not measured on GPUs. Without a model and a head, suffixes draft all text.""",
    build=_build,
    options=(StoreOptions,),
    sampled=True,
    drafter="model",
    accepts_head=True,
    optional_model=True,
    copies=True,
)
