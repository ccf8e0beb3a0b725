"""Views of a lane: data of the step inspector, the table of steps and the charts; CSV and SVG export."""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from specdemo.core.events import StepEvent
from specdemo.core.explain import STYLES, Reason, draft_prob, explain, reason_of
from specdemo.core.policies import CostModel
from specdemo.core.simulate import other_gammas
from specdemo.core.step import Outcome, Step, TopTokens
from specdemo.drafters import METHODS
from specdemo.ui.lane import Lane, title
from specdemo.ui.theme import LIGHT

Bars = list[tuple[str, float | None, float | None]]  # token text, p, q; masses may be unrecorded
TopList = Iterable[tuple[int, float]]

MAX_WHAT_IF = 8  # draft tokens
_LINK_FACTS = (  # name in the trace, label, scale, digits
    ("cloud_s", "cloud, ms", 1000, 1),
    ("rtt_s", "link, ms", 1000, 1),
    ("bytes_up", "bytes up", 1, 0),
    ("bytes_down", "bytes down", 1, 0),
    ("hard_ratio", "hard", 1, 2),
)
COMPLETE = 1e-4  # unrecorded mass of a distribution that counts as 0
WIDTH = 96  # characters of a line
LINE, CHAR, SIZE, EDGE = 22, 8.0, 13, 16  # pixels
MAX_LINES = 2_000
LEGEND = (Outcome.ACCEPTED, Outcome.REJECTED, Outcome.IGNORED, Outcome.CORRECTION, Outcome.BONUS)
Piece = tuple[int, int, int, Outcome | None, str]  # line, column, width in columns, outcome (None: prompt), text


def step_picture(lane: Lane, i: int) -> dict[str, Any] | None:
    """Return the tokens of step `i` with distributions, outcomes and explanations, and its timings."""
    events = lane.steps
    if not 0 <= i < len(events):
        return None
    step, names = events[i].step, _names(events)
    return {
        "i": i,
        "rounds": len(events),
        "t": step.t,
        "chain": step.draft.is_chain,
        "nodes": [_node(lane, events[i], node, names) for node in range(len(step.draft))],
        "path": list(step.verdict.accepted),
        "last": _target_token(lane, events[i], names),
        "facts": _facts(step),
        "times": {"draft": step.draft_s, "verify": step.verify_s, "host": step.host_s},
        "words": _summary(step),
    }


def _node(lane: Lane, event: StepEvent, node: int, names: Mapping[int, str]) -> dict[str, Any]:
    step, verdict = event.step, event.step.verdict
    p, q, outcome = verdict.p[node], draft_prob(step, node), step.outcome(node)
    target = verdict.target_top[step.draft.parents[node] + 1] if verdict.target_top else None
    drafter = verdict.draft_top[node] if verdict.draft_top else None
    return {
        "text": event.draft_texts[node],
        "token": step.draft.tokens[node],
        "parent": step.draft.parents[node],
        "state": Outcome.ACCEPTED if outcome is Outcome.UNVERIFIED else outcome,
        "p": p,
        "q": q,
        "bound": None if p is None else min(1.0, p / q) if q else 0.0,
        "draw": verdict.draw[node],
        "beta": verdict.beta[node],
        "point": step.draft.token_probs is None,
        "entropy_p": target.entropy if target else None,
        "entropy_q": drafter.entropy if drafter else None,
        "bars": _bars(target.top, _draft_top(step, node, drafter), names) if target else [],
        "words": explain(step, node, lane.recipe),
    }


def _draft_top(step: Step, node: int, top: TopTokens | None) -> TopList:
    if top is not None:
        return top.top
    return () if step.draft.token_probs else ((step.draft.tokens[node], 1.0),)


def _bars(p_top: TopList, q_top: TopList, names: Mapping[int, str]) -> Bars:
    """Top tokens of either distribution, by probability. Unrecorded masses are None."""
    ps, qs = dict(p_top), dict(q_top)
    missing = [0.0 if sum(masses.values()) > 1 - COMPLETE else None for masses in (ps, qs)]
    tokens = sorted(ps.keys() | qs.keys(), key=lambda token: -max(ps.get(token, 0), qs.get(token, 0)))
    return [(names.get(token, f"id {token}"), ps.get(token, missing[0]), qs.get(token, missing[1])) for token in tokens]


def _names(events: Sequence[StepEvent]) -> dict[int, str]:
    names: dict[int, str] = {}
    for event in events:
        names.update(zip(event.step.draft.tokens, event.draft_texts, strict=True))
        names.update(zip(event.step.tokens, event.pieces, strict=False))
    for event in events:  # clearer than contributions to a text
        names.update(event.token_texts)
    return names


def _target_token(lane: Lane, event: StepEvent, names: Mapping[int, str]) -> dict[str, Any] | None:
    step, verdict = event.step, event.step.verdict
    if verdict.token is None:
        return None
    residual = reason_of(step, None, lane.recipe) is Reason.RESIDUAL and bool(verdict.target_top)
    return {
        "text": event.pieces[-1],
        "token": verdict.token,
        "kind": step.kind,
        "law": "residual" if residual else "p",
        "words": explain(step, None, lane.recipe),
        "bars": _target_bars(step, names, residual) if verdict.target_top else [],
    }


def _target_bars(step: Step, names: Mapping[int, str], residual: bool) -> Bars:
    verdict = step.verdict
    last = verdict.accepted[-1] if verdict.accepted else -1
    top = verdict.target_top[last + 1].top
    if not residual:
        return [(text, p, None) for text, p, _ in _bars(top, (), names)]
    child = step.draft.parents.index(last)
    mass = 1 - (verdict.beta[child] or 0.0)
    q_top = verdict.draft_top[child].top if verdict.draft_top else ((step.draft.tokens[child], 1.0),)
    return [
        (text, max(p - q, 0) / mass if mass > 0 else p, None)
        for text, p, q in _bars(top, q_top, names)
        if p is not None and q is not None
    ]


def _facts(step: Step) -> list[tuple[str, str]]:
    notes = [(name.replace("_", " "), f"{value:.3g}") for name, value in step.policy.items()]
    link = step.verdict.notes
    facts = [(label, f"{link[name] * scale:,.{digits}f}") for name, label, scale, digits in _LINK_FACTS if name in link]
    return [("γ allowed", str(step.gamma)), *notes, *facts]


def _summary(step: Step) -> str:
    if step.i == 0:
        return "Prefill: one pass over the prompt, which gives the first token."
    if step.searched:
        return f"Step of a beam search: all beams agree on {len(step.tokens)} tokens."
    if not step.draft.tokens:
        return "The draft was empty, so the step gave one token."
    return f"Drafted {len(step.draft)}, accepted {len(step.verdict.accepted)}, committed {len(step.tokens)}."


STEP_COLUMNS = (
    "round", "t_s", "gamma", "drafted", "tested", "accepted", "committed", "ends_with", "mean_beta",
    "draft_ms", "verify_ms", "host_ms", "text",
)  # fmt: skip


def step_table(lane: Lane) -> list[list[Any]]:
    return [
        [
            step.i,
            round(step.t, 4),
            step.gamma,
            len(step.draft),
            step.tested,
            len(step.verdict.accepted),
            len(step.tokens),
            step.kind,
            round(sum(step.betas) / step.tested, 3) if step.tested else None,
            *(round(1000 * seconds, 3) for seconds in (step.draft_s, step.verify_s, step.host_s)),
            event.text,
        ]
        for event in lane.steps
        for step in (event.step,)
    ]


def as_csv(lane: Lane) -> str:
    """Return the table as CSV; texts are JSON strings, which spreadsheets do not evaluate as formulas."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(STEP_COLUMNS)
    for row in step_table(lane):
        writer.writerow([*row[:-1], json.dumps(row[-1], ensure_ascii=False)])
    return out.getvalue()


def figures(lane: Lane) -> dict[str, Any]:
    """Return data of table and charts: steps, acceptance by position, other draft lengths on the same text."""
    counts = zip(lane.metrics.accepted_by_position, lane.metrics.tested_by_position, strict=True)
    positions = [[accepted / tested, tested] for accepted, tested in counts if tested]
    rows, why_not = what_if(lane)
    return {
        "columns": STEP_COLUMNS,
        "rows": step_table(lane),
        "positions": positions,
        "what_if": rows,
        "why_not": why_not,
    }


def what_if(lane: Lane) -> tuple[dict[str, Any] | None, str]:
    """Estimate tokens per pass and per second of other draft lengths on this text, or return the obstacle."""
    method = METHODS.get(lane.recipe["method"])
    if method and not method.drafts:
        return None, "This lane did not draft."
    cost = lane.environment.get("parity", {}).get("cost")
    if not cost:
        return None, "The trace does not contain the cost of passes over several rows."
    steps = [event.step for event in lane.steps]
    longest = MAX_WHAT_IF
    if method and method.preflight == "replay":  # drafts end with the known context
        longest = max((len(step.draft) for step in steps), default=0)
    cost_model = CostModel({int(rows): value for rows, value in cost.items()})
    try:
        estimates = other_gammas(steps, range(longest + 1), cost_model.verify)
    except ValueError:
        return None, "The drafts are trees: other draft lengths cannot be estimated from them."
    if not estimates:
        return None, "No draft token was tested in this lane."
    return {
        "rows": [[row.gamma, round(row.tokens_per_pass, 3), round(row.tokens_per_second, 2)] for row in estimates],
        "gamma": lane.recipe["gamma"] if lane.recipe.get("policy", "fixed") == "fixed" else None,
        "measured": lane.metrics.tokens_per_second,
    }, ""


def as_svg(lane: Lane) -> str:
    pieces = list(_layout(_tokens(lane)))
    lines = max((line for line, *_ in pieces), default=0) + 1
    width, height = 2 * EDGE + WIDTH * CHAR, 2 * EDGE + (lines + 2) * LINE
    m = lane.metrics
    rate = "" if m.tokens_per_second is None else f", {m.tokens_per_second:.1f} tokens per second"
    share = "" if m.acceptance_rate is None else f", {m.acceptance_rate:.0%} of the draft tokens accepted"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" role="img" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="ui-monospace, Menlo, Consolas, monospace" '
        f'font-size="{SIZE}">',
        f"<title>{escape(title(lane.recipe))}{rate}{share}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]
    for line, column, columns, outcome, text in pieces:
        parts += _draw(EDGE + column * CHAR, EDGE + line * LINE, columns * CHAR, outcome, text)
    x, y = float(EDGE), height - EDGE - LINE
    for outcome in LEGEND:
        label = STYLES[outcome].label
        parts += _draw(x, y, len(label) * CHAR, outcome, label)
        x += (len(label) + 2) * CHAR
    parts.append(
        f'<text x="{width - EDGE:g}" y="{y + 15:g}" text-anchor="end" fill="{LIGHT["quiet"]}">'
        f"{escape(title(lane.recipe))}{rate}</text>"
    )
    return "\n".join([*parts, "</svg>\n"])


def colours_of(outcome: Outcome | None) -> tuple[str, str]:
    """Background (may be empty) and ink of a token; None: the prompt."""
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
    """Replace control characters, which are invalid in XML."""
    return "".join(c if unicodedata.category(c)[0] != "C" else "\ufffd" for c in text)


def _tokens(lane: Lane) -> Iterator[tuple[Outcome | None, str]]:
    if lane.header is not None:
        yield None, lane.header.prompt
    for event in lane.steps:
        for shown in event.shown():
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


def _fitting(text: str, room: int) -> tuple[int, int]:
    """Return how many characters of `text` fit, and their width in columns: wide characters take two."""
    width = 0
    for n, character in enumerate(text):
        step = 2 if unicodedata.east_asian_width(character) in "WF" else 0 if unicodedata.combining(character) else 1
        if width + step > room:
            return n, width
        width += step
    return len(text), width
