"""Prompt lookup as in transformers: copy the tokens after an earlier occurrence of the last few tokens.

A baseline that scans the text in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.step import Draft, Origin
from specdemo.drafters.method import Method


@dataclass(eq=False)
class LookupDrafter(Drafter):
    """Copy from the earliest match of the longest suffix of up to `longest` tokens."""

    longest: int = 2

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        tokens = list(tokens)
        for size in range(self.longest, 0, -1):
            suffix = tokens[-size:]
            for start in range(len(tokens) - size):
                if tokens[start : start + size] == suffix:
                    after = start + size
                    count = 0
                    while after + count < len(tokens) and budget.may_extend(count, None):
                        count += 1
                    origin = tuple(Origin("text", after + i, matched=size) for i in range(count))
                    return Draft.chain(tuple(tokens[after : after + count]), origin=origin)
        return Draft()


METHOD = Method(
    name="lookup",
    title="prompt lookup as in transformers, for comparison",
    notes="""\
**Prompt lookup** copies the continuation of the first earlier occurrence of the last two tokens, or of the last one. It
reproduces the method of `transformers` for comparison. It is exact, ignores later occurrences and searches the full
text in every step.""",
    build=lambda context: LookupDrafter(),
    copies=True,
)
