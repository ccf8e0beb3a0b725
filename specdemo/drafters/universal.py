"""Draft with a model of another vocabulary: its words are put into the target's tokens before they are judged.

What the drafter may draw from is a law over its own tokens, and of the target's tokens that come of it nobody knows the
law: a word may be cut in many ways. So they are judged as point masses, and that is exact even where the drafter drew.
A draft is a function of the committed text and of the drafter's own random numbers; both are settled before the target
draws, and what it draws is independent of them. Given the draft, whatever it is, a point mass y is accepted with p(y)
and corrected from p without y (or compared with a draw from p): every token has its probability under p, so it has it
over all drafts too. It costs acceptance: p(y) instead of sum min(p, q), and most where y is not the likeliest token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.step import Draft, Step


class UniversalDrafter:
    """Chains of point masses, whatever `inner` drafts in its own tokens.

    `read(tokens)` is the committed text in the drafter's tokens, `write(tokens, new)` what `new` of them, drafted
    behind that, are in the target's; either may be empty. `context`: tokens that the drafter can hold. The draft length
    counts the drafter's tokens first, then bounds the target's.
    """

    def __init__(
        self,
        inner: Drafter,
        read: Callable[[Sequence[int]], list[int]],
        write: Callable[[Sequence[int], Sequence[int]], list[int]],
        context: int,
    ) -> None:
        self._inner, self._read, self._write, self._context = inner, read, write, context

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """What the drafter goes on with, as far as it can be said in the target's tokens."""
        own = self._read(tokens)
        room = self._context - len(own)
        if not own or room < 1:
            return Draft()
        new = self._write(tokens, self._inner.propose(own, budget.at_most(room)).tokens)
        count = 0
        while count < len(new) and budget.may_extend(count, None):
            count += 1
        return Draft.chain(tuple(new[:count]))

    def observe(self, step: Step) -> None:
        """Nothing to learn: the step is in other tokens than the drafter's."""
