"""Output of long measurements: Markdown tables and a progress line."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

NON_TTY_INTERVAL_S = 30.0  # between two progress lines if standard error is not a terminal


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


class Progress:
    """Progress on standard error: a line updated in place on a terminal, few lines in a file or pipe."""

    def __init__(self) -> None:
        self._shown, self._due = "", 0.0

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            if text != self._shown:
                _write(f"\r\x1b[K{text}")
            self._shown = text
        elif time.monotonic() >= self._due:
            _write(f"{text}\n")
            self._due = time.monotonic() + NON_TTY_INTERVAL_S

    def over(self) -> None:
        if self._shown:
            _write("\r\x1b[K")
        self._shown = ""


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
