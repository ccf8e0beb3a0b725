"""Prompt lookup as in transformers: copy the tokens after an earlier occurrence of the last few tokens.

A baseline that scans the text in each step.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.core.decode import DraftBudget
from specdemo.core.origin import Origin
from specdemo.core.step import Draft, Step
from specdemo.drafters.method import Method


class LookupDrafter:
    """Copy from the earliest match of the longest suffix of up to `longest` tokens."""

    def __init__(self, longest: int = 2) -> None:
        self._longest = longest

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        tokens = list(tokens)
        for size in range(min(self._longest, len(tokens) - 1), 0, -1):
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

    def observe(self, step: Step) -> None:
        pass


METHOD = Method(
    name="lookup",
    title="prompt lookup as in transformers, for comparison",
    notes="""\
**Prompt lookup** copies the continuation of the first earlier occurrence of the last two tokens. It reproduces the
method of `transformers` for comparison. It is exact, ignores later occurrences and searches the full text in every
step.""",
    build=lambda context: LookupDrafter(),
    preflight="replay",
)
