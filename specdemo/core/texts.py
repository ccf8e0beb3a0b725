"""Texts that a run never contains, in any tokenisation, or ends before, for any drafts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

_MARKS = 0xF0000  # first of the private characters that stand for special tokens


class StopTexts:
    """Text pieces up to the first of the stop texts; a possible beginning is withheld until later pieces decide.

    `marks`: texts of special tokens, which are not shown.
    """

    def __init__(self, texts: Sequence[str] = (), marks: Mapping[int, str] | None = None) -> None:
        named = [(token, text) for token, text in (marks or {}).items() if any(text in stop for stop in texts)]
        named.sort(key=lambda mark: -len(mark[1]))
        self._characters = {token: chr(_MARKS + i) for i, (token, _) in enumerate(named)}
        self._invisible = dict.fromkeys(map(ord, self._characters.values()))
        replaced = list(texts)
        for token, text in named:
            replaced = [stop.replace(text, self._characters[token]) for stop in replaced]
        self._texts = [*dict.fromkeys((*texts, *replaced))]
        self._withheld = ""
        self.reached = False

    def mark(self, token: int) -> str:
        """Return an invisible character for the piece of a special token."""
        return self._characters.get(token, "")

    def feed(self, pieces: Iterable[str], last: bool = False) -> list[str]:
        """Return the shown text of each piece, up to a completed stop text; `last` ends the text."""
        shown = []
        for piece in pieces:
            if self.reached:
                break
            shown.append(self._next(piece) if self._texts else piece)
        if shown and last:
            shown[-1] += self._withheld
        return [text.translate(self._invisible) for text in shown]

    def _next(self, piece: str) -> str:
        text = self._withheld + piece
        starts = [start for stop in self._texts if (start := text.find(stop)) >= 0]
        if starts:
            self.reached, self._withheld = True, ""
            return text[: min(starts)]
        beginnings = (stop[:size] for stop in self._texts for size in range(1, len(stop)))
        size = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
        self._withheld = text[len(text) - size :]
        return text[: len(text) - size]


class BannedText:
    """Tokens that complete a banned text, for a vocabulary with the byte strings `pieces`."""

    def __init__(self, texts: Sequence[str], pieces: Sequence[bytes]) -> None:
        words = [text.encode() for text in texts]
        self._pieces = pieces
        self._order = sorted(range(len(pieces)), key=pieces.__getitem__)
        self._sorted = [pieces[token] for token in self._order]
        self._always = {token for token, piece in enumerate(pieces) if any(word in piece for word in words)}
        # maps the beginning of a banned text to the tokens that complete it
        self._completing: dict[bytes, set[int]] = {}
        for word in words:
            for split in range(1, len(word)):
                tokens = self._starting_with(word[split:])
                if tokens:
                    self._completing.setdefault(word[:split], set()).update(tokens)
        self._lengths = sorted({len(beginning) for beginning in self._completing})

    def tokens(self, path: Sequence[int]) -> set[int]:
        """Return the tokens that complete a banned text after `path`."""
        before = self._tail(path)
        banned = set(self._always)
        for length in self._lengths:
            if length <= len(before):
                banned |= self._completing.get(before[len(before) - length :], set())
        return banned

    def _tail(self, path: Sequence[int]) -> bytes:
        needed, last = self._lengths[-1] if self._lengths else 0, []
        for token in reversed(path):
            if needed <= 0:
                break
            last.append(self._pieces[token] if token < len(self._pieces) else b"")
            needed -= len(last[-1])
        return b"".join(reversed(last))

    def _starting_with(self, rest: bytes) -> list[int]:
        first = bisect_left(self._sorted, rest)
        end = first
        while end < len(self._sorted) and self._sorted[end].startswith(rest):
            end += 1
        return self._order[first:end]
