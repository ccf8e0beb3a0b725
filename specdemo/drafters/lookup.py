"""Prompt lookup: copy what followed an earlier occurrence of the last few tokens, as `transformers` does.

For comparison: it looks the whole text through in every round.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.core.decode import DraftBudget
from specdemo.core.step import Draft, Step
from specdemo.drafters.method import Method


class LookupDrafter:
    """Chains copied from the earliest match of the longest ending of up to `longest` tokens."""

    def __init__(self, longest: int = 2) -> None:
        self._longest = longest

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """The tokens that followed, as far as the text has them."""
        tokens = list(tokens)
        for size in range(min(self._longest, len(tokens) - 1), 0, -1):
            ending = tokens[-size:]
            for start in range(len(tokens) - size):
                if tokens[start : start + size] == ending:
                    after = start + size
                    count = 0
                    while after + count < len(tokens) and budget.may_extend(count, None):
                        count += 1
                    return Draft.chain(tuple(tokens[after : after + count]))
        return Draft()

    def observe(self, step: Step) -> None:
        """Nothing to learn."""


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
