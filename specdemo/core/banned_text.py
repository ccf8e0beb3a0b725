"""Exclude texts in every tokenisation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


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
