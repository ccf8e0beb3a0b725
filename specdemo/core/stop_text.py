"""End a text before the first stop text, for any drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class StopTexts:
    """Text pieces up to the first of the stop texts; a possible beginning is withheld until later pieces decide."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self._texts = texts
        self._withheld = ""
        self.reached = False

    def feed(self, pieces: Iterable[str], last: bool = False) -> list[str]:
        """Return the shown text of each piece, up to a completed stop text; `last` ends the text."""
        shown = []
        for piece in pieces:
            if self.reached:
                break
            shown.append(self._next(piece) if self._texts else piece)
        if shown and last:
            shown[-1] += self._withheld
        return shown

    def _next(self, piece: str) -> str:
        text = self._withheld + piece
        starts = [start for stop in self._texts if (start := text.find(stop)) >= 0]
        if starts:
            self.reached, self._withheld = True, ""
            return text[: min(starts)]
        size = max(_overlap(text, stop) for stop in self._texts)
        self._withheld = text[len(text) - size :]
        return text[: len(text) - size]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
