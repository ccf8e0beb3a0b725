"""Tokens of a text that extend the draft vocabulary of a head."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

MOST_CONTEXT_TOKENS = 1024


class ContextTokens:
    """The first `MOST_CONTEXT_TOKENS` different tokens of a text besides the `static` ones.

    They depend on the text alone, so drafts remain exact.
    """

    def __init__(self, static: Collection[int]) -> None:
        self._static = static
        self.tokens: list[int] = []
        self._own: set[int] = set()
        self._first_positions: list[int] = []

    def update(self, following: Sequence[int], held: int) -> int:
        """Read the tokens `following` position `held`; return the number of unchanged `tokens`."""
        unchanged = bisect_right(self._first_positions, held)
        self._own.difference_update(self.tokens[unchanged:])
        del self.tokens[unchanged:], self._first_positions[unchanged:]
        for position, token in enumerate(following, held + 1):
            if token not in self._static and token not in self._own and len(self.tokens) < MOST_CONTEXT_TOKENS:
                self._own.add(token)
                self.tokens.append(token)
                self._first_positions.append(position)
        return unchanged
