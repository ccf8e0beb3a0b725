"""Step inspector, step table and charts of a lane; CSV and SVG export."""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from xml.sax.saxutils import escape

from specdemo.core.events import StepEvent
from specdemo.core.explain import STYLES, Reason, decision_of, explain, reason_of, takes_most_probable
from specdemo.core.policies import CostModel
from specdemo.core.simulate import other_gammas
from specdemo.core.step import Outcome, Step, TopTokens
from specdemo.drafters import METHODS
from specdemo.ui.lane import Lane, mode, title
from specdemo.ui.theme import LIGHT

Bars = list[tuple[str, float | None, float | None]]  # token text, p, q; masses may be unrecorded
TopList = Iterable[tuple[int, float]]

MAX_WHAT_IF = 8  # longest draft of the estimate, in tokens
_LINK_FACTS = (  # name in the trace, label, scale, digits
    ("cloud_s", "cloud, ms", 1000, 1),
    ("rtt_s", "waiting for the link, ms", 1000, 1),
    ("sent", "requests", 1, 0),
    ("bytes_up", "bytes up", 1, 0),
    ("bytes_down", "bytes down", 1, 0),
    ("hard_ratio", "hard", 1, 2),
)
SECOND_TRIP = "The rejection needed a second round trip, which sent the drafter's row to the cloud."
COMPLETE = 1e-4  # unrecorded mass of a distribution that counts as 0
MAX_BARS, VISIBLE = 8, 5e-4  # bars of a distribution, and the smallest mass of a bar
OTHERS = "others"
WIDTH = 96  # characters of a line
LINE, CHAR = 22, 8.0  # pixels of a line and a column
SIZE, EDGE = 13, 16  # pixels of the font and the margin
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
    decision, outcome = decision_of(step, node, lane.recipe), step.outcome(node)
    target = verdict.target_top[step.draft.parents[node] + 1] if verdict.target_top else None
    drafter = verdict.draft_top[node] if verdict.draft_top else None
    return {
        "text": event.draft_texts[node],
        "token": step.draft.tokens[node],
        "parent": step.draft.parents[node],
        "state": Outcome.ACCEPTED if outcome is Outcome.UNVERIFIED else outcome,
        **asdict(decision),
        "point": decision.q is None,
        "beta": None if takes_most_probable(lane.recipe) else verdict.beta[node],
        "entropy_p": target.entropy if target else None,
        "entropy_q": drafter.entropy if drafter else None,
        "bars": _node_bars(target, _draft_top(step, node, drafter), names, step.draft.tokens[node]) if target else [],
        "words": explain(step, node, lane.recipe),
    }


def _draft_top(step: Step, node: int, top: TopTokens | None) -> TopList:
    if top is not None:
        return top.top
    return () if step.draft.token_probs else ((step.draft.tokens[node], 1.0),)


def _node_bars(target: TopTokens, q_top: TopList, names: Mapping[int, str], drafted: int) -> Bars:
    """Return p and q of the most probable and the drafted tokens, and of all others."""
    ps, qs = dict(target.top), dict(q_top)
    missing = [0.0 if sum(masses.values()) > 1 - COMPLETE else None for masses in (ps, qs)]
    tokens = sorted(ps.keys() | qs.keys(), key=lambda token: -max(ps.get(token, 0), qs.get(token, 0)))
    shown = _limited(tokens, drafted)
    bars = [(_name(token, names), ps.get(token, missing[0]), qs.get(token, missing[1])) for token in shown]
    return [*bars, *_others(bars)]


def _limited(tokens: Sequence[int], *required: int) -> list[int]:
    return [token for i, token in enumerate(tokens) if i < MAX_BARS or token in required]


def _others(bars: Bars) -> Bars:
    ps, qs = [p for _, p, _ in bars if p is not None], [q for _, _, q in bars if q is not None]
    p, q = max(0.0, 1 - sum(ps)), max(0.0, 1 - sum(qs)) if qs else None
    return [(OTHERS, p, q)] if max(p, q or 0.0) >= VISIBLE else []


def _name(token: int, names: Mapping[int, str]) -> str:
    return names.get(token, f"id {token}")


def _names(events: Sequence[StepEvent]) -> dict[int, str]:
    names: dict[int, str] = {}
    for event in events:
        names.update(zip(event.step.draft.tokens, event.draft_texts, strict=True))
        names.update(zip(event.step.tokens, event.pieces, strict=False))
    for event in events:  # events are clearer than contributions to a text
        names.update(event.token_texts)
    return names


def _target_token(lane: Lane, event: StepEvent, names: Mapping[int, str]) -> dict[str, Any] | None:
    step, verdict = event.step, event.step.verdict
    if verdict.token is None:
        return None
    residual = reason_of(step, None, lane.recipe) in (Reason.RESIDUAL, Reason.SIBLINGS_RESIDUAL)
    top = _residual(step) if residual else _target_row(step)
    return {
        "text": event.pieces[-1],
        "token": verdict.token,
        "kind": step.kind,
        "law": "residual" if residual and top else "p",
        "words": explain(step, None, lane.recipe),
        "bars": _token_bars(top or _target_row(step), names, verdict.token),
    }


def _target_row(step: Step) -> TopList:
    accepted = step.verdict.accepted
    return step.verdict.target_top[(accepted[-1] if accepted else -1) + 1].top if step.verdict.target_top else ()


def _residual(step: Step) -> TopList:
    """Return the residual of recorded tokens; older traces of chains contain some p and q."""
    verdict = step.verdict
    if verdict.token_top is not None:
        return verdict.token_top.top
    last = verdict.accepted[-1] if verdict.accepted else -1
    child = step.draft.parents.index(last)
    mass = 1 - (verdict.beta[child] or 0.0)
    if not verdict.target_top or mass <= 0 or step.draft.parents.count(last) > 1:
        return ()
    qs = dict(_draft_top(step, child, verdict.draft_top[child] if verdict.draft_top else None))
    missing = 0.0 if sum(qs.values()) > 1 - COMPLETE else None
    pairs = ((token, p, qs.get(token, missing)) for token, p in _target_row(step))
    return [(token, max(p - q, 0) / mass) for token, p, q in pairs if q is not None]


def _token_bars(top: TopList, names: Mapping[int, str], committed: int) -> Bars:
    """Return the distribution of the target's token, including the committed token."""
    masses = dict(top)
    tokens = sorted((token for token in masses if masses[token] > 0 or token == committed), key=lambda t: -masses[t])
    bars = [(_name(token, names), masses[token], None) for token in _limited(tokens, committed)]
    return [*bars, *_others(bars)] if bars else []


def _facts(step: Step) -> list[tuple[str, str]]:
    notes = [(name.replace("_", " "), f"{value:.3g}") for name, value in step.policy.items()]
    link = step.verdict.remote
    facts = [(label, f"{link[name] * scale:,.{digits}f}") for name, label, scale, digits in _LINK_FACTS if name in link]
    return [("γ allowed", str(step.gamma)), *notes, *facts]


def _summary(step: Step) -> str:
    if step.i == 0 and not step.draft.tokens:
        return "Prefill: one pass over the prompt, which gives the first token."
    if step.searched:
        return f"Step of a beam search: all beams agree on {len(step.tokens)} tokens."
    if not step.draft.tokens:
        return "The draft was empty, so the step gave one token."
    if step.unverified:
        return f"Drafted {len(step.draft)}, committed {len(step.tokens)} without the target."
    counts = f"Drafted {len(step.draft)}, accepted {step.accepted}, committed {len(step.tokens)}."
    return f"{counts} {SECOND_TRIP}" if step.verdict.link is not None and step.verdict.link.rows else counts


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
            step.accepted,
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


def figures(lane: Lane, baseline: Lane | None = None) -> dict[str, Any]:
    counts = zip(lane.metrics.accepted_by_position, lane.metrics.tested_by_position, strict=True)
    positions = [[accepted / tested, tested] for accepted, tested in counts if tested]
    rows, why_not = what_if(lane, baseline)
    return {
        "columns": STEP_COLUMNS,
        "rows": step_table(lane),
        "positions": positions,
        "what_if": rows,
        "why_not": why_not,
    }


def what_if(lane: Lane, baseline: Lane | None = None) -> tuple[dict[str, Any] | None, str]:
    """Estimate tokens per pass and per second of other draft lengths, with ranges, or return the obstacle.

    `fits` is False if the lane is outside its own range.
    """
    method = METHODS.get(lane.recipe["method"])
    if method and not method.drafts:
        return None, "This lane did not draft."
    cost = lane.environment.get("parity", {}).get("cost")
    if not cost:
        return None, "The trace does not contain the cost of passes over several rows."
    steps = [event.step for event in lane.steps]
    longest = MAX_WHAT_IF
    if method and method.preflight == "replay" and not method.sampled:  # drafts end with the known context
        longest = max((len(step.draft) for step in steps), default=0)
    cost_model = CostModel({int(rows): value for rows, value in cost.items()})
    plain = [event.step for event in baseline.steps] if baseline and _comparable(lane, baseline) else []
    gamma = lane.recipe["gamma"] if lane.recipe.get("policy", "fixed") == "fixed" else None
    lengths = sorted({*range(longest + 1), *([gamma] if gamma else [])})
    try:
        estimates = other_gammas(steps, lengths, cost_model.verify, plain, counted=lane.counted)
    except ValueError:
        return None, "The drafts are trees: other draft lengths cannot be estimated from them."
    if not estimates:
        return None, "No draft token was tested in this lane."
    measured = lane.metrics.tokens_per_second
    return {
        "rows": [
            [row.gamma, *(round(x, 3) for x in (row.tokens_per_pass, row.tokens_per_second, row.low, row.high))]
            for row in estimates
        ],
        "gamma": gamma,
        "measured": measured,
        "fits": all(row.low <= measured <= row.high for row in estimates if row.gamma == gamma),
    }, ""


def _comparable(lane: Lane, baseline: Lane) -> bool:
    target = ("pair", "target", "dtype", "quantization", "device")
    same = all(lane.recipe.get(name) == baseline.recipe.get(name) for name in target)
    return same and baseline.metrics.decode_steps > 0 and not mode(lane.recipe)


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


def _fitting(text: str, columns: int) -> tuple[int, int]:
    """Return how many characters of `text` fit into `columns`, and their width: wide characters take two."""
    width = 0
    for n, character in enumerate(text):
        step = 2 if unicodedata.east_asian_width(character) in "WF" else 0 if unicodedata.combining(character) else 1
        if width + step > columns:
            return n, width
        width += step
    return len(text), width
