"""Draft with a different vocabulary by re-encoding tokens as target tokens.

A text has many tokenisations, so the distribution over target tokens is unknown. Verification as point masses is exact,
because drafts depend only on committed text and independent random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.step import MODEL, Draft


@dataclass(eq=False)
class UniversalDrafter(Drafter):
    """Re-encode drafts of `inner` as chains of point masses.

    `read(tokens)` encodes committed text in drafter tokens; `write(tokens, new)` re-encodes drafter tokens `new` as
    target tokens after `tokens`. `context` is the drafter's context length. The budget limits both.
    """

    inner: Drafter
    read: Callable[[Sequence[int]], list[int]]
    write: Callable[[Sequence[int], Sequence[int]], list[int]]
    context: int

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        prefix = self.read(tokens)
        available = self.context - len(prefix)
        if not prefix or available < 1:
            return Draft()
        new = self.write(tokens, self.inner.propose(prefix, budget.at_most(available)).tokens)[: budget.limit]
        return Draft.chain(tuple(new), origin=(MODEL,) * len(new))
