"""Model calls of a run over time, a row per lane, to scale (2211.17192, Figure 5).

A trace has the time of a draft, so its calls get equal shares. Encoders run in the first call of their model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdemo.core.events import StepEvent
from specdemo.core.origin import HEAD, MODEL
from specdemo.ui.charts import Block, timeline
from specdemo.ui.frames import Run
from specdemo.ui.lane import Lane

KINDS = {  # words, colour
    "prompt": ("prompt", "var(--line)"),
    "draft": ("drafter call", "var(--accepted-ink)"),
    "search": ("draft without a model", "var(--link-wait)"),
    "target": ("target pass", "var(--link-verify)"),
}


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


def call_timeline(lanes: Sequence[Lane], first_token: int, tokens: int) -> str:
    """Draw the local lanes; the slowest shows about `tokens` tokens."""
    rows = [
        (lane, calls(lane, first_token)) for lane in lanes if lane.steps and lane.timed and not lane.recipe.get("cloud")
    ]
    rows = [(lane, row) for lane, row in rows if row]
    if not rows:
        return ""
    span = max(_span(lane, row, first_token + tokens) for lane, row in rows)
    blocks = [_block(i, call, row[0].start, span) for i, (_, row) in enumerate(rows) for call in row]
    shown = [block for block in blocks if block.duration > 0]
    return timeline("Model calls over time", [lane.title for lane, _ in rows], shown, KINDS)


def _span(lane: Lane, row: Sequence[Call], last_token: int) -> float:
    ends = accumulate(len(event.step.tokens) for event in lane.steps)
    times = [event.step.t for event, end in zip(lane.steps, ends, strict=True) if end >= last_token]
    return max((times[0] if times else lane.steps[-1].step.t) - row[0].start, 1e-9)


def _block(row: int, call: Call, begin: float, span: float) -> Block:
    """Cut a call at the end of the time axis."""
    start = call.start - begin
    words = f"{call.words} ({1000 * call.seconds:.2f} ms)"
    return Block(row, call.kind, 1000 * start, 1000 * min(call.seconds, span - start), words)


def calls_view(run: Run | None, first_token: int, tokens: int) -> str:
    """Draw the calls of a run, or explain their absence."""
    if run is None or not run.over:
        return "<p>No run available: press Run, tick Compare, and add other draft lengths.</p>"
    lanes = list(run.lanes.values())
    if picture := call_timeline(lanes, first_token, tokens):
        return picture
    if call_timeline(lanes, 0, tokens):
        return "<p>The run ends before this token: choose an earlier first token.</p>"
    return "<p>No lane has times of local steps: choose mode off and no external engine, then press Run.</p>"
