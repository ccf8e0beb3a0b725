"""Draft what followed when the text's longest repeated ending was last met (suffix decoding, 2411.04975).

A suffix automaton over prompt and output, grown token by token in constant amortised time (Blumer et al. 1985), finds
that ending however long it is. Drafts are point masses, so any rule for point masses verifies them.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.core.decode import DraftBudget
from specdemo.core.step import Draft, Step
from specdemo.drafters.method import BuildContext, Method, StoreOptions


class SuffixStore:
    """All that was said so far, with every substring of it findable."""

    def __init__(self) -> None:
        self.text: list[int] = []  # negative numbers stand between texts
        self.matched = 0  # length of the text's longest ending that was there before
        self._after = 0  # the place after that ending's former occurrence
        # By state: the state that each token leads to, the state of the longest suffix that stands in more places,
        # the length of its longest string, and where one of its strings ended when it was last met.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]
        self._last = 0

    def __len__(self) -> int:
        """States of the automaton: at most two per token."""
        return len(self._next)

    def begin(self) -> None:
        """A new text: no match reaches over what is put between it and the one before."""
        if self.text:
            self.add(-1 - len(self.text))

    def add(self, token: int) -> None:
        """Append a token and find the longest ending that occurred before."""
        self.text.append(token)
        before, new = self._last, self._state({}, 0, self._length[self._last] + 1, len(self.text))
        while before >= 0 and token not in self._next[before]:
            self._next[before][token] = new
            before = self._link[before]
        if before >= 0:
            known = self._next[before][token]
            fits = self._length[known] == self._length[before] + 1
            self._link[new] = known if fits else self._split(before, known, token)
        self._last, link = new, self._link[new]
        self.matched, self._after = self._length[link], self._end[link]
        self._end[link] = len(self.text)

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that followed last time; an ending that overlaps itself goes on in rounds."""
        found: list[int] = []
        for place in range(self._after, self._after + count if self.matched else 0):
            token = self.text[place] if place < len(self.text) else found[place - len(self.text)]
            if token < 0:
                break
            found.append(token)
        return found

    def _split(self, before: int, known: int, token: int) -> int:
        """Give the shorter strings of `known` a state of their own."""
        short = self._state(dict(self._next[known]), self._link[known], self._length[before] + 1, self._end[known])
        while before >= 0 and self._next[before].get(token) == known:
            self._next[before][token] = short
            before = self._link[before]
        self._link[known] = short
        return short

    def _state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class SuffixDrafter:
    """Chains from a `SuffixStore` that learns prompt and output as they come.

    The longer the ending that matched, the longer the draft: `factor` tokens for each of its tokens. Give an earlier
    `store` to draft from former texts too, and a `source` that is no part of the text but may well come up in it: what
    an encoder read.
    """

    def __init__(self, factor: float = 2.0, store: SuffixStore | None = None, source: Sequence[int] = ()) -> None:
        self.store = store or SuffixStore()
        self._factor = factor
        self._seen = 0
        self.store.begin()
        if source:
            for token in source:
                self.store.add(token)
            self.store.begin()

    def match(self, tokens: Sequence[int]) -> int:
        """Length of the longest ending of `tokens` that occurred before: how far a draft may be trusted."""
        for token in tokens[self._seen :]:
            self.store.add(token)
        self._seen = len(tokens)
        return self.store.matched

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """What followed last time, for as long as the match deserves."""
        longest = round(self._factor * self.match(tokens))
        drafted: list[int] = []
        for token in self.store.continuation(longest):
            if not budget.may_extend(len(drafted), None):
                break
            drafted.append(token)
        return Draft.chain(tuple(drafted))

    def observe(self, step: Step) -> None:
        """Nothing to learn from what was not kept."""


def build_suffix_drafter(context: BuildContext) -> SuffixDrafter:
    """Build a drafter on the store of earlier runs, or on a new one."""
    return context.with_store(lambda store: SuffixDrafter(store=store, source=context.source))


METHOD = Method(
    name="suffix",
    title="the continuation of the longest repeated ending drafts",
    notes="""\
**Suffix decoding** finds the longest ending of the text that occurred before and drafts its continuation. A suffix
automaton makes this constant amortised time per token. Longer matches give longer drafts. Drafts are point masses, so
the method is exact. It is fast on tables, edits and long quotations. *SuffixDecoding 2411.04975.*""",
    build=build_suffix_drafter,
    options=(StoreOptions,),
    preflight="replay",
)
