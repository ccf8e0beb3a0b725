"""Model calls of a run over time, a row per lane, to scale (2211.17192, Figure 5).

A trace has the time of a draft, so its calls get equal shares. Encoders run in the first call of their model.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdemo.core.events import StepEvent
from specdemo.core.origin import HEAD, MODEL
from specdemo.ui.lane import Lane

KINDS = {"prompt": "prompt", "draft": "drafter call", "search": "draft without a model", "target": "target pass"}
WIDTH, ROW = 960, 46  # pixels
_BAR, _FOOT = 22, 24
_TICKS = 6
_LEAST_WIDTH = 0.5
CALLS_CSS = """.calls { overflow-x: auto; }
svg { width: 100%; min-width: 720px; display: block; }
text { fill: var(--ink); font-size: 12px; font-family: var(--font); } .tick { fill: var(--quiet); font-size: 11px; }
rect { stroke: var(--paper); stroke-width: 0.5; fill: var(--of); } rect:hover { stroke: var(--ink); stroke-width: 1.5; }
.prompt { --of: var(--line); } .draft { --of: var(--accepted-ink); } .search { --of: var(--link-wait); }
.target { --of: var(--link-verify); }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 6px 0 0; list-style: none; font-size: 13px; }
.key li::before { content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 6px; }
.key li::before { background: var(--of); }"""


@dataclass(frozen=True)
class Call:
    """Block of a row; seconds since the start of the lane."""

    kind: str  # key of `KINDS`
    start: float
    seconds: float
    words: str


def calls(lane: Lane, first_token: int = 0) -> list[Call]:
    """Return the calls from the step that commits token `first_token` on."""
    events = lane.steps
    ends = list(accumulate(len(event.step.tokens) for event in events))
    shown = [event for event, end in zip(events, ends, strict=True) if end > first_token]
    skipped = len(events) - len(shown)
    finished = events[skipped - 1].step.t if skipped else 0.0
    result: list[Call] = []
    encoder = lane.header is not None and lane.header.encoder
    for event in shown:
        step = event.step
        start = max(finished, step.t - sum(step.seconds))
        result += _draft_calls(event, start)
        result.append(_target_call(event, start + step.seconds.draft, encoder))
        finished = step.t
    return [call for call in result if call.seconds > 0]


def _draft_calls(event: StepEvent, start: float) -> Iterator[Call]:
    draft = event.step.draft
    if not draft.tokens:
        return
    if draft.origin and draft.origin[0].source not in (MODEL.source, HEAD.source):
        words = f"draft without a model: {_words(event, range(len(draft)))}"
        yield Call("search", start, event.step.seconds.draft, words)
        return
    levels: dict[int, list[int]] = defaultdict(list)
    for node in range(len(draft)):
        levels[len(draft.path(node))].append(node)
    share = event.step.seconds.draft / len(levels)
    for depth, nodes in levels.items():
        words = f"drafter call {depth} of {len(levels)}: {_words(event, nodes)}"
        yield Call("draft", start + (depth - 1) * share, share, words)


def _target_call(event: StepEvent, start: float, encoder: bool) -> Call:
    step = event.step
    kind = "prompt" if step.i == 0 else "target"
    rows = len(step.draft) + 1
    passed = "encoder and first pass" if encoder and step.i == 0 else "prompt" if step.i == 0 else "target pass"
    committed = ", ".join(f"{shown.text!r} {shown.outcome}" for shown in event.shown() if shown.outcome.committed)
    size = "" if step.i == 0 else f" over {rows} row{'' if rows == 1 else 's'}"
    return Call(kind, start, step.seconds.verify, f"{passed}{size}: {committed}")


def _words(event: StepEvent, nodes: Sequence[int]) -> str:
    return ", ".join(f"{event.draft_texts[node]!r} {event.step.outcome(node)}" for node in nodes)


def calls_svg(lanes: Sequence[Lane], first_token: int, tokens: int) -> str:
    """Draw the lanes that were decoded on this machine; the slowest shows about `tokens` tokens."""
    rows = [
        (lane, calls(lane, first_token)) for lane in lanes if lane.steps and lane.timed and not lane.recipe.get("cloud")
    ]
    rows = [(lane, row) for lane, row in rows if row]
    if not rows:
        return ""
    span = max(_span(lane, row, first_token + tokens) for lane, row in rows)
    height = len(rows) * ROW + _FOOT
    shapes = []
    for i, (lane, row) in enumerate(rows):
        y = i * ROW + 16
        shapes.append(f'<text x="0" y="{y - 4}">{html.escape(lane.title)}</text>')
        begin = row[0].start
        for call in row:
            left, right = (min(max(t - begin, 0), span) for t in (call.start, call.start + call.seconds))
            if right > left:
                shapes.append(_block(call, left / span * WIDTH, (right - left) / span * WIDTH, y))
    for i in range(_TICKS + 1):
        anchor = "start" if i == 0 else "end" if i == _TICKS else "middle"
        x, t = WIDTH * i / _TICKS, 1000 * span * i / _TICKS
        shapes.append(f'<text class="tick" x="{x:.0f}" y="{height - 6}" text-anchor="{anchor}">{t:.1f} ms</text>')
    key = "".join(f'<li class="{kind}">{words}</li>' for kind, words in KINDS.items())
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="A row of calls per run">{"".join(shapes)}</svg>'
    region = f'<div class="calls" role="region" aria-label="Model calls over time" tabindex="0">{svg}</div>'
    return f'{region}<ul class="key">{key}</ul>'


def _span(lane: Lane, row: Sequence[Call], last_token: int) -> float:
    ends = accumulate(len(event.step.tokens) for event in lane.steps)
    times = [event.step.t for event, end in zip(lane.steps, ends, strict=True) if end >= last_token]
    return max((times[0] if times else lane.steps[-1].step.t) - row[0].start, 1e-9)


def _block(call: Call, x: float, width: float, y: int) -> str:
    words = html.escape(f"{call.words} ({1000 * call.seconds:.2f} ms)")
    size = f'width="{max(width, _LEAST_WIDTH):.2f}" height="{_BAR}"'
    return f'<rect class="{call.kind}" x="{x:.2f}" y="{y}" {size}><title>{words}</title></rect>'
