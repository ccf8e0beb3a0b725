"""Suffix decoding (2411.04975): draft the tokens that followed the longest repeated suffix of the text.

A suffix automaton finds it in amortised constant time per token (Blumer et al. 1985).
"""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.step import Draft, Origin
from specdemo.drafters.method import BuildContext, Method, StoreOptions

_STATE_BYTES = 280  # of the Python objects, measured: 267 to 279


class SuffixStore:
    """Suffix automaton over several texts, which finds the longest repeated suffix."""

    def __init__(self) -> None:
        self.text: list[int] = []  # negative numbers separate texts
        self.matched = 0  # length of the longest suffix that occurred earlier
        self._after = 0  # end of that earlier occurrence
        # Each state has transitions, a suffix link, the longest string and the end of its last occurrence.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length = [-1], [0]
        self._end = [0]
        self._last = 0

    def __len__(self) -> int:
        return len(self._next)

    @property
    def size_bytes(self) -> int:
        """Return an estimate."""
        return _STATE_BYTES * len(self._next)

    def begin(self) -> None:
        """Start a new text, which matches do not cross."""
        if self.text:
            self.add(-1 - len(self.text))

    def add(self, token: int) -> None:
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
        """Return up to `count` tokens after the match; an overlapping match repeats periodically."""
        tokens: list[int] = []
        for position in range(self._after, self._after + count if self.matched else 0):
            token = self.text[position] if position < len(self.text) else tokens[position - len(self.text)]
            if token < 0:
                break
            tokens.append(token)
        return tokens

    def position(self, i: int) -> int:
        """Return the position in `text` of token i of the continuation."""
        return self._after + i % (len(self.text) - self._after)

    def _split(self, before: int, known: int, token: int) -> int:
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


class SuffixDrafter(Drafter):
    """Draft chains from a `SuffixStore`, `factor` tokens per matched token.

    `store` contains earlier texts; `source` is additional text, such as an encoder's input.
    """

    def __init__(self, factor: float = 2.0, store: SuffixStore | None = None, source: Sequence[int] = ()) -> None:
        self.store = store or SuffixStore()
        self._factor = factor
        self._added = 0
        self.store.begin()
        if source:
            for token in source:
                self.store.add(token)
            self.store.begin()
        self._start = len(self.store.text)

    def match(self, tokens: Sequence[int]) -> int:
        for token in tokens[self._added :]:
            self.store.add(token)
        self._added = len(tokens)
        return self.store.matched

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        limit = round(self._factor * self.match(tokens))
        drafted: list[int] = []
        for token in self.store.continuation(limit):
            if not budget.may_extend(len(drafted), None):
                break
            drafted.append(token)
        return Draft.chain(tuple(drafted), origin=tuple(map(self._origin, range(len(drafted)))))

    @property
    def store_bytes(self) -> int:
        return self.store.size_bytes

    def _origin(self, i: int) -> Origin:
        position, matched = self.store.position(i) - self._start, self.store.matched
        return Origin("text", position, matched) if position >= 0 else Origin("store", None, matched)


def build_suffix_drafter(context: BuildContext) -> SuffixDrafter:
    return context.with_store(lambda store: SuffixDrafter(store=store, source=context.source))


METHOD = Method(
    name="suffix",
    title="the continuation of the longest repeated ending drafts",
    notes="""\
**Suffix decoding** finds the longest ending of the text that occurred before and drafts its continuation. A suffix
automaton makes this constant amortised time per token. Longer matches give longer drafts. The method is exact. It is
fast on tables, edits and long quotations. *SuffixDecoding 2411.04975.*""",
    build=build_suffix_drafter,
    options=(StoreOptions,),
    copies=True,
)
