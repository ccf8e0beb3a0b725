"""Rounds over a link as a picture: what edge, link and cloud did, on one clock. SVG from numbers; knows no gradio."""

from __future__ import annotations

import html
from collections.abc import Sequence

from specdemo.ui.link_metrics import WORDS, Part

WIDTH, LEFT, ROW, TOP = 960, 56, 34, 26
ROWS = {"draft": 0, "idle": 0, "up": 1, "way": 1, "down": 1, "verify": 2, "wait": 1}
NAMES = ("edge", "link", "cloud")
TICKS = 6


def picture(rounds: Sequence[Sequence[Part]], captions: Sequence[str]) -> str:
    """The rounds side by side; every part says what it is and how long it took when it is pointed at."""
    some = [part for parts in rounds for part in parts]
    if not some:
        return ""
    start, end = some[0][1], max(at + seconds for _, at, seconds in some)
    scale = (WIDTH - LEFT - 8) / max(end - start, 1e-9)
    height = TOP + 3 * ROW + 24

    def x(t: float) -> float:
        return LEFT + (t - start) * scale

    drawn = [f'<text class="name" x="0" y="{TOP + row * ROW + 21}">{name}</text>' for row, name in enumerate(NAMES)]
    for i in range(TICKS + 1):
        t = start + (end - start) * i / TICKS
        anchor = "start" if i == 0 else "end" if i == TICKS else "middle"
        drawn.append(f'<text class="tick" x="{x(t):.1f}" y="{height - 6}" text-anchor="{anchor}">{t:.3f} s</text>')
    last = -1e9
    for parts, caption in zip(rounds, captions, strict=True):
        at = x(next((at for what, at, _ in parts if what != "idle"), parts[-1][1]))
        drawn.append(f'<line class="edge" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{TOP + 3 * ROW}"/>')
        if at - last > 46:
            drawn.append(f'<text class="caption" x="{at + 2:.1f}" y="14">{html.escape(caption)}</text>')
            last = at
        drawn += [_bar(part, x(part[1]), part[2] * scale) for part in parts]
    return (
        f'<div class="timeline" role="region" aria-label="Timeline of rounds" tabindex="0"><svg viewBox="0 0 {WIDTH} '
        f'{height}" role="img" aria-label="{html.escape(_told(rounds, captions))}">{"".join(drawn)}</svg></div>{_key()}'
    )


def _bar(part: Part, at: float, width: float) -> str:
    what, _, seconds = part
    y = TOP + ROWS[what] * ROW + 4
    title = f"<title>{WORDS[what]}: {1000 * seconds:.2f} ms</title>"
    return f'<rect class="{what}" x="{at:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{ROW - 8}">{title}</rect>'


def _told(rounds: Sequence[Sequence[Part]], captions: Sequence[str]) -> str:
    return f"Rounds {captions[0].split(':')[0]} to {captions[-1].split(':')[0]}, in time" if rounds else ""


def _key() -> str:
    shown = "".join(f'<li class="{what}">{words}</li>' for what, words in WORDS.items())
    return f'<ul class="key">{shown}</ul>'
