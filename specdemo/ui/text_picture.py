"""SVG export of the tokens of a lane."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from xml.sax.saxutils import escape

from specdemo.core.explain import STYLES
from specdemo.core.step import Outcome
from specdemo.ui.lane import Lane
from specdemo.ui.theme import LIGHT

WIDTH = 96  # characters of a line
LINE, CHAR = 22, 8.0  # pixels of a line and a column
SIZE, EDGE = 13, 16  # pixels of the font and the margin
MAX_LINES = 2_000
LEGEND = (Outcome.ACCEPTED, Outcome.REJECTED, Outcome.IGNORED, Outcome.CORRECTION, Outcome.BONUS)
Piece = tuple[int, int, int, Outcome | None, str]  # line, column, width in columns, outcome (None: prompt), text


def as_svg(lane: Lane) -> str:
    pieces = list(_layout(_tokens(lane)))
    lines = max((line for line, *_ in pieces), default=0) + 1
    width, height = 2 * EDGE + WIDTH * CHAR, 2 * EDGE + (lines + 3) * LINE
    m = lane.metrics
    rate = "" if m.tokens_per_second is None else f", {m.tokens_per_second:.1f} tokens per second"
    share = "" if m.acceptance_rate is None else f", {m.acceptance_rate:.0%} of the draft tokens accepted"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" role="img" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="ui-monospace, Menlo, Consolas, monospace" '
        f'font-size="{SIZE}">',
        f"<title>{escape(lane.title)}{rate}{share}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]
    for line, column, columns, outcome, text in pieces:
        parts += _draw(EDGE + column * CHAR, EDGE + line * LINE, columns * CHAR, outcome, text)
    x, y = float(EDGE), height - EDGE - 2 * LINE
    for outcome in LEGEND:
        label = STYLES[outcome].label
        parts += _draw(x, y, len(label) * CHAR, outcome, label)
        x += (len(label) + 2) * CHAR
    parts.append(f'<text x="{EDGE}" y="{y + LINE + 15:g}" fill="{LIGHT["quiet"]}">{escape(lane.title)}{rate}</text>')
    return "\n".join([*parts, "</svg>\n"])


def colours_of(outcome: Outcome | None) -> tuple[str, str]:
    """Return the background (may be empty) and the ink of a token. `None` stands for the prompt."""
    if outcome is None:
        return "", LIGHT["quiet"]
    name = "unseen" if outcome is Outcome.UNVERIFIED else outcome.value
    return LIGHT.get(name, ""), LIGHT.get(f"{name}-ink", LIGHT["ink"])


def _draw(x: float, y: float, width: float, outcome: Outcome | None, text: str) -> Iterator[str]:
    background, ink = colours_of(outcome)
    style = STYLES[outcome or Outcome.PLAIN]
    if background:
        yield f'<rect x="{x:g}" y="{y:g}" width="{width - 1:g}" height="{LINE - 3}" rx="3" fill="{background}"/>'
    decoration = f' text-decoration="{style.decoration}"' if style.decoration else ""
    decoration += ' font-style="italic"' if style.italic else ""
    if text.strip():
        yield (
            f'<text x="{x:g}" y="{y + 14:g}" textLength="{width:g}" lengthAdjust="spacingAndGlyphs" '
            f'fill="{ink}"{decoration} xml:space="preserve">{escape(_printable(text))}</text>'
        )


def _printable(text: str) -> str:
    return "".join(c if unicodedata.category(c)[0] != "C" else "\ufffd" for c in text)


def _tokens(lane: Lane) -> Iterator[tuple[Outcome | None, str]]:
    if lane.header is not None:
        yield None, lane.header.prompt
    for event in lane.steps:
        unknown = event.step.draft.undisclosed or 0
        for shown in event.shown():
            if unknown and shown.outcome is Outcome.CORRECTION:
                yield Outcome.IGNORED, f"+{unknown}"
            yield shown.outcome, shown.text if shown.outcome.committed else shown.text.replace("\n", "⏎")


def _layout(tokens: Iterator[tuple[Outcome | None, str]]) -> Iterator[Piece]:
    line = column = 0
    for outcome, text in tokens:
        for i, part in enumerate(text.expandtabs(4).split("\n")):
            if i:
                line, column = line + 1, 0
            while part and line < MAX_LINES:
                count, columns = _fitting(part, WIDTH - column)
                if not count:
                    line, column = line + 1, 0
                    continue
                yield line, column, columns, outcome, part[:count]
                column += columns
                part = part[count:]


def _fitting(text: str, columns: int) -> tuple[int, int]:
    width = 0
    for n, character in enumerate(text):
        step = 2 if unicodedata.east_asian_width(character) in "WF" else 0 if unicodedata.combining(character) else 1
        if width + step > columns:
            return n, width
        width += step
    return len(text), width
