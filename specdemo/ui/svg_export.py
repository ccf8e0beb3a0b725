"""The token stream as an SVG picture: a lane's text in the colours of its verdicts, to put into a talk or a report.

Knows lanes and the palette; one monospaced column grid, so that nothing has to be measured.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from xml.sax.saxutils import escape

from specdemo.ui.frames import NOT_KEPT, cells
from specdemo.ui.labels import Lane, title

COLUMNS = 96  # characters of a line
LINE, CHAR, SIZE, EDGE = 22, 8.0, 13, 16  # pixels
MOST_LINES = 2_000
PALETTE = {  # background, ink, decoration: the page's own colours
    "accepted": ("#d6f2df", "#0c4526", ""),
    "rejected": ("#fbe0de", "#8f1d18", "line-through"),
    "ignored": ("#eceff3", "#566173", ""),
    "correction": ("#dbe8fd", "#123a8c", "underline"),
    "bonus": ("#e8f1fe", "#123a8c", "underline"),
    "plain": ("", "#1c2430", ""),
    "given": ("", "#566173", ""),
}
Piece = tuple[int, int, int, str, str]  # line, column, columns wide, kind, text


def as_svg(lane: Lane) -> str:
    """The lane as an SVG document, light, as wide as `COLUMNS` characters."""
    pieces = list(_laid_out(_tokens(lane)))
    lines = max((line for line, *_ in pieces), default=0) + 1
    width, height = 2 * EDGE + COLUMNS * CHAR, 2 * EDGE + (lines + 2) * LINE
    m = lane.metrics.as_dict()
    rate = "" if m["tokens_per_second"] is None else f", {m['tokens_per_second']:.1f} tokens per second"
    share = "" if m["acceptance_rate"] is None else f", {m['acceptance_rate']:.0%} of the drafted tokens accepted"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" role="img" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="ui-monospace, Menlo, Consolas, monospace" '
        f'font-size="{SIZE}">',
        f"<title>{escape(title(lane.recipe))}{rate}{share}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]
    for line, column, wide, kind, text in pieces:
        parts += _drawn(EDGE + column * CHAR, EDGE + line * LINE, wide * CHAR, kind, text)
    x, y = float(EDGE), height - EDGE - LINE
    for kind in ("accepted", "rejected", "ignored", "correction", "bonus"):
        label = {"ignored": "never tested"}.get(kind, kind)
        parts += _drawn(x, y, len(label) * CHAR, kind, label)
        x += (len(label) + 2) * CHAR
    parts.append(
        f'<text x="{width - EDGE:g}" y="{y + 15:g}" text-anchor="end" fill="#566173">'
        f"{escape(title(lane.recipe))}{rate}</text>"
    )
    return "\n".join([*parts, "</svg>\n"])


def _drawn(x: float, y: float, width: float, kind: str, text: str) -> Iterator[str]:
    ground, ink, decoration = PALETTE[kind]
    if ground:
        yield f'<rect x="{x:g}" y="{y:g}" width="{width - 1:g}" height="{LINE - 3}" rx="3" fill="{ground}"/>'
    more = f' text-decoration="{decoration}"' if decoration else ""
    more += ' font-style="italic"' if kind == "ignored" else ""
    if text.strip():
        yield (
            f'<text x="{x:g}" y="{y + 14:g}" textLength="{width:g}" lengthAdjust="spacingAndGlyphs" fill="{ink}"'
            f'{more} xml:space="preserve">{escape(_printable(text))}</text>'
        )


def _printable(text: str) -> str:
    """Control characters have no place in XML."""
    return "".join(c if unicodedata.category(c)[0] != "C" else "\ufffd" for c in text)


def _tokens(lane: Lane) -> Iterator[tuple[str, str]]:
    """Kind and text, in reading order; a line break that was not kept must not break the line."""
    for line in lane.lines:
        if "specdemo" in line:
            yield "given", line["prompt"]
        elif "i" in line:
            for kind, text, *_ in cells(line):
                yield kind, text.replace("\n", "⏎") if kind in NOT_KEPT else text


def _laid_out(tokens: Iterator[tuple[str, str]]) -> Iterator[Piece]:
    """Each token on the grid, cut where a line ends."""
    line = column = 0
    for kind, text in tokens:
        for i, part in enumerate(text.expandtabs(4).split("\n")):
            if i:
                line, column = line + 1, 0
            while part and line < MOST_LINES:
                fits, wide = _fitting(part, COLUMNS - column)
                if not fits:
                    line, column = line + 1, 0
                    continue
                yield line, column, wide, kind, part[:fits]
                column += wide
                part = part[fits:]


def _fitting(text: str, room: int) -> tuple[int, int]:
    """How many characters of `text` fit, and the columns they take: wide ones take two."""
    wide = 0
    for n, character in enumerate(text):
        step = 2 if unicodedata.east_asian_width(character) in "WF" else 0 if unicodedata.combining(character) else 1
        if wide + step > room:
            return n, wide
        wide += step
    return len(text), wide
