"""Tables that compare measured acceptance with published figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdemo.bench.table import BenchRow, markdown_table
from specdemo.core.formats import number
from specdemo.core.published import NASD_ACCEPTANCE

_REPETITION = {  # classes of prompts of each row
    "long repetition": ("repetitive", "rewriting"),
    "short repetition": ("code", "list"),
    "no repetition": ("adversarial", "random"),
}


def repetition_table(rows: Sequence[BenchRow]) -> str:
    """Return the NASD document's table with the measured alpha of each lane; empty without NASD."""
    drafting = [row for row in rows if row.alpha is not None]
    if not any(row.lane.startswith("nasd") for row in drafting):
        return ""
    cells = []
    for repetition, model, ngrams in NASD_ACCEPTANCE:
        for row in _of_classes(drafting, _REPETITION[repetition]):
            expected = ngrams if row.lane.startswith(("nasd", "suffix", "lookup")) else model
            cells.append((repetition, row.kind, row.lane, expected, number(row.alpha, 2)))
    head = ("text", "class", "lane", "expected by the document", "measured alpha")
    return f"Acceptance by repetition of the text:\n\n{markdown_table(head, cells)}" if cells else ""


def _of_classes(rows: Iterable[BenchRow], kinds: Sequence[str]) -> list[BenchRow]:
    return [row for row in rows if row.kind in kinds]
