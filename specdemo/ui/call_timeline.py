"""Model calls of a run over time, a row per lane, to scale (2211.17192, Figure 5).

A trace has the time of a draft, so its calls get equal shares. Encoders run in the first call of their model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from specdemo.core.events import StepEvent
from specdemo.core.step import HEAD, MODEL
from specdemo.ui.charts import Block, timeline
from specdemo.ui.frames import Run
from specdemo.ui.lane import Lane

KINDS = {  # words, colour
    "prompt": ("prompt", "var(--line)"),
    "draft": ("drafter call", "var(--accepted-ink)"),
    "search": ("draft without a model", "var(--link-wait)"),
    "target": ("target pass", "var(--link-verify)"),
}


def calls(lane: Lane, first_token: int = 0) -> list[Block]:
    """Return the calls from the step that commits token `first_token` on, since the start of the lane."""
    ends = list(accumulate(len(event.step.tokens) for event in lane.steps))
    encoder = lane.header is not None and lane.header.encoder
    result: list[Block] = []
    finished = 0.0
    for event, end in zip(lane.steps, ends, strict=True):
        step = event.step
        if end > first_token:
            start = max(finished, step.t - sum(step.seconds))
            result += _draft_calls(event, start)
            result.append(_target_call(event, start + step.seconds.draft, encoder))
        finished = step.t
    return [call for call in result if call.duration > 0]


def _draft_calls(event: StepEvent, start: float) -> Iterator[Block]:
    draft, seconds = event.step.draft, event.step.seconds.draft
    if not draft.tokens:
        return
    if draft.origin and draft.origin[0].source not in (MODEL.source, HEAD.source):
        yield _call("search", start, seconds, f"draft without a model: {_words(event, range(len(draft)))}")
        return
    levels: dict[int, list[int]] = defaultdict(list)
    for node in range(len(draft)):
        levels[len(draft.path(node))].append(node)
    share = seconds / len(levels)
    for depth, nodes in levels.items():
        words = f"drafter call {depth} of {len(levels)}: {_words(event, nodes)}"
        yield _call("draft", start + (depth - 1) * share, share, words)


def _target_call(event: StepEvent, start: float, encoder: bool) -> Block:
    step, rows = event.step, len(event.step.draft) + 1
    passed = f"target pass over {rows} row{'' if rows == 1 else 's'}"
    if step.i == 0:
        passed = "encoder and first pass" if encoder else "prompt"
    committed = ", ".join(f"{shown.text!r} {shown.outcome}" for shown in event.shown() if shown.outcome.committed)
    return _call("target" if step.i else "prompt", start, step.seconds.verify, f"{passed}: {committed}")


def _words(event: StepEvent, nodes: Sequence[int]) -> str:
    return ", ".join(f"{event.draft_texts[node]!r} {event.step.outcome(node)}" for node in nodes)


def _call(kind: str, start: float, seconds: float, words: str) -> Block:
    return Block(0, kind, 1000 * start, 1000 * seconds, f"{words} ({1000 * seconds:.2f} ms)")


def call_timeline(lanes: Sequence[Lane], first_token: int, tokens: int) -> str:
    """Draw the local lanes; the slowest shows about `tokens` tokens."""
    local = [lane for lane in lanes if lane.steps and lane.timed and not lane.recipe.get("cloud")]
    rows = [(lane, row) for lane in local if (row := calls(lane, first_token))]
    span = max((_end(lane, first_token + tokens) - row[0].start for lane, row in rows), default=0.0)
    blocks = []
    for i, (_, row) in enumerate(rows):
        for call in row:
            start = call.start - row[0].start
            if start < span:  # cut at the end of the time axis
                blocks.append(replace(call, row=i, start=start, duration=min(call.duration, span - start)))
    return timeline("Model calls over time", [lane.title for lane, _ in rows], blocks, KINDS) if blocks else ""


def _end(lane: Lane, token: int) -> float:
    """Return the time of a token, by default the last."""
    ends = accumulate(len(event.step.tokens) for event in lane.steps)
    times = [event.step.t for event, end in zip(lane.steps, ends, strict=True) if end >= token]
    return 1000 * (times[0] if times else lane.steps[-1].step.t)


def calls_view(run: Run | None, first_token: int, tokens: int) -> str:
    if run is None or not run.over:
        return "<p>No run available: press Run, tick Compare, and add other draft lengths.</p>"
    lanes = list(run.lanes.values())
    if picture := call_timeline(lanes, first_token, tokens):
        return picture
    if call_timeline(lanes, 0, tokens):
        return "<p>The run ends before this token: choose an earlier first token.</p>"
    return "<p>No lane has times of local steps: choose mode off and no external engine, then press Run.</p>"
