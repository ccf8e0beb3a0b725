"""How far something long is, on the terminal's error stream."""

from __future__ import annotations

import sys
import time

EVERY_S = 30.0  # between two lines where nobody sees one change


class Progress:
    """A line that changes where somebody sees it change; in a file or a pipe a line now and then."""

    def __init__(self) -> None:
        self._shown, self._due = "", 0.0

    def show(self, text: str) -> None:
        """Say how far it is now."""
        if sys.stderr.isatty():
            if text != self._shown:
                _write(f"\r\x1b[K{text}")
            self._shown = text
        elif time.monotonic() >= self._due:
            _write(f"{text}\n")
            self._due = time.monotonic() + EVERY_S

    def over(self) -> None:
        """Wipe the line: what follows speaks for itself."""
        if self._shown:
            _write("\r\x1b[K")
        self._shown = ""


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
