"""Texts and tables in Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from specdemo.bench.table import markdown_table
from specdemo.core.formats import NOTHING, number


def escape_markdown(text: str) -> str:
    """Escape text of traces: an image in Markdown sends a request to another host."""
    return re.sub(r"(?=[\x00-\x7f])([^\w\s,.])", r"\\\1", text)


def link_papers(text: str) -> str:
    """Turn arXiv numbers into links."""
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", text)


def figures_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows in Markdown: two digits, halves rounded up as in the papers, dash for None and NaN."""

    def cell(value: object) -> object:
        if isinstance(value, float) and not math.isnan(value):
            return number(value + 1e-9, 2)
        return NOTHING if value is None or isinstance(value, float) else value

    return markdown_table(head, [[cell(value) for value in row] for row in rows])
