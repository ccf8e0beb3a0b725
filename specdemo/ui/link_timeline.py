"""SVG timeline of steps over a link: activities of edge, link and cloud."""

from __future__ import annotations

import html
from collections.abc import Sequence

from specdemo.ui.link_metrics import WORDS, Part

WIDTH, LEFT, ROW, TOP = 960, 56, 34, 26
ROWS = {"draft": 0, "idle": 0, "up": 1, "way": 1, "down": 1, "verify": 2, "wait": 1}
NAMES = ("edge", "link", "cloud")
TICKS = 6


def timeline_svg(steps: Sequence[Sequence[Part]], captions: Sequence[str]) -> str:
    """Draw the steps; each part has a tooltip with activity and duration."""
    flat = [part for parts in steps for part in parts]
    if not flat:
        return ""
    start, end = flat[0][1], max(at + seconds for _, at, seconds in flat)
    scale = (WIDTH - LEFT - 8) / max(end - start, 1e-9)
    height = TOP + 3 * ROW + 24

    def x(t: float) -> float:
        return LEFT + (t - start) * scale

    shapes = [f'<text class="name" x="0" y="{TOP + row * ROW + 21}">{name}</text>' for row, name in enumerate(NAMES)]
    for i in range(TICKS + 1):
        t = start + (end - start) * i / TICKS
        anchor = "start" if i == 0 else "end" if i == TICKS else "middle"
        shapes.append(f'<text class="tick" x="{x(t):.1f}" y="{height - 6}" text-anchor="{anchor}">{t:.3f} s</text>')
    last = -1e9
    for parts, caption in zip(steps, captions, strict=True):
        at = x(next((begin for activity, begin, _ in parts if activity != "idle"), parts[-1][1]))
        shapes.append(f'<line class="edge" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{TOP + 3 * ROW}"/>')
        if at - last > 46:
            shapes.append(f'<text class="caption" x="{at + 2:.1f}" y="14">{html.escape(caption)}</text>')
            last = at
        shapes += [_bar(part, x(part[1]), part[2] * scale) for part in parts]
    return (
        f'<div class="timeline" role="region" aria-label="Timeline of steps" tabindex="0"><svg viewBox="0 0 {WIDTH} '
        f'{height}" role="img" aria-label="{html.escape(_label(captions))}">{"".join(shapes)}</svg></div>{_key()}'
    )


def _bar(part: Part, x: float, width: float) -> str:
    activity, _, seconds = part
    y = TOP + ROWS[activity] * ROW + 4
    title = f"<title>{WORDS[activity]}: {1000 * seconds:.2f} ms</title>"
    size = f'width="{max(width, 0.5):.2f}" height="{ROW - 8}"'
    return f'<rect class="{activity}" x="{x:.2f}" y="{y}" {size}>{title}</rect>'


def _label(captions: Sequence[str]) -> str:
    return f"Steps {captions[0].split(':')[0]} to {captions[-1].split(':')[0]} over time"


def _key() -> str:
    items = "".join(f'<li class="{activity}">{words}</li>' for activity, words in WORDS.items())
    return f'<ul class="key">{items}</ul>'
