"""Step inspector, step table and charts of a lane; CSV export."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specdemo.core.events import StepEvent
from specdemo.core.explain import Reason, decision_of, explain, reason_of, takes_most_probable
from specdemo.core.rules import DecidedBy, rule_traits
from specdemo.core.step import Outcome, Step, TopTokens
from specdemo.drafters import METHODS
from specdemo.ui.draft_sources import LaneText, SourceText, describe_origin, describe_sources
from specdemo.ui.lane import Lane
from specdemo.ui.run_estimate import RunEstimate, estimate_lengths

Bars = list[tuple[str, float | None, float | None]]  # token text, p, q; masses may be unrecorded
TopList = Iterable[tuple[int, float]]

_LINK_FACTS = (  # name in the trace, label, scale, digits
    ("cloud_s", "cloud, ms", 1000, 1),
    ("rtt_s", "waiting for the link, ms", 1000, 1),
    ("sent", "requests", 1, 0),
    ("bytes_up", "bytes up", 1, 0),
    ("bytes_down", "bytes down", 1, 0),
    ("hard_ratio", "hard", 1, 2),
)
SECOND_TRIP = "The rejection needed a second round trip, which sent the drafter's row to the cloud."
_RESIDUALS = (Reason.RESIDUAL, Reason.SIBLINGS_RESIDUAL, Reason.BLOCK_RESIDUAL)
COMPLETE = 1e-4  # unrecorded mass of a distribution that counts as 0
MAX_BARS, VISIBLE = 8, 5e-4  # bars of a distribution, and the smallest mass of a bar
OTHERS = "others"


def step_picture(lane: Lane, i: int) -> dict[str, Any] | None:
    """Return the tokens of step `i` with distributions, outcomes and explanations, and its timings."""
    events = lane.steps
    if not 0 <= i < len(events):
        return None
    return _step_picture(lane, i, _lane_text(lane))


def step_pictures(lane: Lane) -> list[dict[str, Any]]:
    """Return all steps in detail."""
    text = _lane_text(lane)
    return [_step_picture(lane, i, text) for i in range(len(lane.steps))]


def _lane_text(lane: Lane) -> LaneText:
    assert lane.header is not None
    return LaneText(lane.header, lane.steps, _names(lane.steps))


def _step_picture(lane: Lane, i: int, text: LaneText) -> dict[str, Any]:
    events, names = lane.steps, text.names
    step, rule = events[i].step, rule_traits(lane.recipe)
    return {
        "i": i,
        "rounds": len(events),
        "t": step.t,
        "chain": step.draft.is_chain,
        "test": decision_kind(step, lane.recipe),
        "adjusts": rule.adjusts and not lane.recipe.get("skip_sample_adjustment"),
        "scales": rule.threshold is not None and rule.needs_q,  # the bound is a multiple of q
        "kind": step.kind,
        "source": describe_sources(events[i], SourceText(text, i), lane.recipe.get("ngram") or 0),
        "nodes": [_node(lane, events[i], node, names) for node in range(len(step.draft))],
        "path": list(step.verdict.accepted),
        "last": _target_token(lane, events[i], names),
        "facts": _facts(step, lane.recipe),
        "times": {"draft": step.draft_s, "verify": step.verify_s, "host": step.host_s},
        "words": _summary(step),
    }


def decision_kind(step: Step, recipe: Mapping[str, Any]) -> str:
    """Return the quantity that decides in the step player: draw, block, bound (of p), rank, sample; else `none`."""
    rule = rule_traits(recipe)
    untested = not step.draft.tokens or all(beta is None for beta in step.verdict.beta)
    if step.unverified or untested or rule.lenient:  # the player has no bounds with a threshold
        return "none"
    if takes_most_probable(recipe):
        return "rank"
    if rule.decided_by in (DecidedBy.SAMPLE, DecidedBy.SHARED_DRAW):
        return "sample"
    if rule.chains_only:
        return "block"
    return "draw" if rule.threshold is None else "bound"


def _node(lane: Lane, event: StepEvent, node: int, names: Mapping[int, str]) -> dict[str, Any]:
    step, verdict = event.step, event.step.verdict
    decision = decision_of(step, node, lane.recipe)
    target = verdict.target_top[step.draft.parents[node] + 1] if verdict.target_top else None
    drafter = verdict.draft_top[node] if verdict.draft_top else None
    return {
        "text": event.draft_texts[node],
        "token": step.draft.tokens[node],
        "parent": step.draft.parents[node],
        "state": step.outcome(node),
        **asdict(decision),
        "point": decision.q is None,
        "beta": None if takes_most_probable(lane.recipe) else verdict.beta[node],
        "entropy_p": target.entropy if target else None,
        "entropy_q": drafter.entropy if drafter else None,
        "bars": _node_bars(target, _draft_top(step, node, drafter), names, step.draft.tokens[node]) if target else [],
        "rival": _rival(target, step.draft.tokens[node]),
        "origin": describe_origin(step.draft.origin[node]) if step.draft.origin else "",
        "words": explain(step, node, lane.recipe),
    }


def _rival(target: TopTokens | None, drafted: int) -> float | None:
    """Return the largest recorded p of the other tokens."""
    return max((p for token, p in target.top if token != drafted), default=None) if target else None


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
    residual = reason_of(step, None, lane.recipe) in _RESIDUALS
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
    bars: Bars = [(_name(token, names), masses[token], None) for token in _limited(tokens, committed)]
    return [*bars, *_others(bars)] if bars else []


def _facts(step: Step, recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    fixed = recipe.get("policy", "fixed") == "fixed"
    allowed = ("γ allowed", str(step.gamma)) if fixed else ("γ:", f"start {recipe['gamma']}, this step {step.gamma}")
    length = [allowed] if _drafts(recipe) else []
    notes = [(name.replace("_", " "), f"{value:.3g}") for name, value in step.policy.items()]
    link = step.verdict.remote
    facts = [(label, f"{link[name] * scale:,.{digits}f}") for name, label, scale, digits in _LINK_FACTS if name in link]
    return [*length, *notes, *facts]


def _summary(step: Step) -> str:
    if step.i == 0 and not step.draft.tokens:
        return "Prefill: one pass over the prompt, which gives the first token."
    if step.searched:
        return f"Step of a beam search: all beams agree on {len(step.tokens)} tokens."
    if step.unverified:
        return f"Drafted {len(step.draft)}, committed {len(step.tokens)} without the target."
    if step.kind is Outcome.UNKNOWN:
        return "The counts of the engine do not show how this token was chosen."
    if not step.draft.size:
        return "The draft was empty, so the step gave one token."
    counts = f"Drafted {step.draft.size}, accepted {step.accepted}, committed {len(step.tokens)}."
    if step.draft.undisclosed:
        counts += f" {step.draft.undisclosed} draft tokens are not reported by the engine."
    return f"{counts} {SECOND_TRIP}" if step.verdict.link is not None and step.verdict.link.rows else counts


STEP_COLUMNS = (
    "round", "t_s", "gamma", "drafted", "tested", "accepted", "committed", "ends_with", "mean_beta",
    "draft_ms", "verify_ms", "host_ms", "text",
)  # fmt: skip


def step_table(lane: Lane) -> list[list[Any]]:
    drafts = _drafts(lane.recipe)
    return [
        [
            step.i,
            round(step.t, 4),
            step.gamma if drafts else None,
            step.draft.size,
            step.tested,
            step.accepted,
            len(step.tokens),
            step.kind,
            round(sum(step.betas) / len(step.betas), 3) if step.betas else None,
            *(_milliseconds(seconds) for seconds in (step.draft_s, step.verify_s, step.host_s)),
            event.text,
        ]
        for event in lane.steps
        for step in (event.step,)
    ]


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def _drafts(recipe: Mapping[str, Any]) -> bool:
    method = METHODS.get(recipe["method"])
    return method is None or method.drafts


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
    estimate = estimate_lengths(lane, baseline)
    return {
        "columns": STEP_COLUMNS,
        "rows": step_table(lane),
        "positions": positions,
        "what_if": _what_if(estimate) if isinstance(estimate, RunEstimate) else None,
        "why_not": estimate if isinstance(estimate, str) else "",
    }


def _what_if(estimate: RunEstimate) -> dict[str, Any]:
    rows = [(row.tokens_per_pass, row.tokens_per_second, row.low, row.high) for row in estimate.rows]
    return {
        "rows": [
            [row.gamma, *(round(x, 3) for x in figures)] for row, figures in zip(estimate.rows, rows, strict=True)
        ],
        "gamma": estimate.gamma,
        "measured": estimate.measured,
        "fits": estimate.fits,
    }
