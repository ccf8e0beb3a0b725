"""Rounds as pictures, rows and figures: what the inspector, the table and the charts show. Everything from the trace.

Knows lanes and trace lines; no gradio, no models. What it returns is plain JSON values.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdemo.core.policies import CostModel
from specdemo.core.simulate import other_gammas
from specdemo.core.step import Step
from specdemo.drafters import METHODS
from specdemo.ui.labels import Lane, unseen
from specdemo.ui.link_metrics import link_facts

Line = Mapping[str, Any]
Bars = list[tuple[str, float | None, float | None]]  # a token's text, p, q; None: not among those recorded

LONGEST = 8  # tokens of a draft that is asked "what if"
NEAR = 1e-4  # of the mass of a law: what is left when all of it was recorded


def steps(lane: Lane) -> list[dict[str, Any]]:
    """The lines of the lane's rounds; the prefill is round 0."""
    return [line for line in lane.lines if "i" in line]


def picture(lane: Lane, i: int) -> dict[str, Any] | None:
    """Round `i` of a lane: every drafted token with its laws and its verdict, what came after it, and in words why."""
    lines = steps(lane)
    if not 0 <= i < len(lines):
        return None
    line = lines[i]
    names = _names(lines)
    path = [*line["accepted"]]
    nodes = [_node(lane, line, n, names) for n in range(len(line["draft"]))]
    return {
        "i": i,
        "rounds": len(lines),
        "t": line["t"],
        "chain": all(parent == n - 1 for n, parent in enumerate(line["parents"])),
        "nodes": nodes,
        "path": path,
        "last": _last(lane, line, names),
        "facts": _facts(line),
        "times": {part: line[f"{part}_s"] for part in ("draft", "verify", "host")},
        "words": _summary(line),
    }


def _node(lane: Lane, line: Line, n: int, names: Mapping[int, str]) -> dict[str, Any]:
    tested = line["beta"][n] is not None
    q = 1.0 if line["q"] is None else line["q"][n]
    distributions, drafted = line.get("laws"), line.get("drafted")
    row = line["parents"][n] + 1
    p_top = distributions[row]["top"] if distributions else []
    q_top = drafted[n]["top"] if drafted else [] if line["q"] else [[line["draft"][n], 1.0]]
    return {
        "text": line["draft_text"][n],
        "token": line["draft"][n],
        "parent": line["parents"][n],
        "state": "accepted" if n in line["accepted"] else "rejected" if tested else "ignored",
        "p": line["p"][n],
        "q": q,
        "bound": None if line["p"][n] is None else min(1.0, line["p"][n] / q) if q else 0.0,
        "draw": line["draw"][n],
        "beta": line["beta"][n],
        "point": line["q"] is None,
        "entropy_p": distributions[row]["entropy"] if distributions else None,
        "entropy_q": drafted[n]["entropy"] if drafted else None,
        "bars": _bars(p_top, q_top, names) if distributions else [],
        "words": _why(lane, line, n, q),
    }


def _bars(p_top: Sequence, q_top: Sequence, names: Mapping[int, str]) -> Bars:
    """Tokens that either law puts first, the likelier first. A mass that was not recorded is None, unless it is 0."""
    ps, qs = dict(p_top), dict(q_top)
    rest = [0.0 if sum(some.values()) > 1 - NEAR else None for some in (ps, qs)]
    tokens = sorted(ps.keys() | qs.keys(), key=lambda token: -max(ps.get(token, 0), qs.get(token, 0)))
    return [(names.get(token, f"id {token}"), ps.get(token, rest[0]), qs.get(token, rest[1])) for token in tokens]


def _names(lines: Sequence[Line]) -> dict[int, str]:
    """Texts of tokens, as far as the trace has them."""
    names: dict[int, str] = {}
    for line in lines:
        names.update(zip(line["draft"], line["draft_text"], strict=True))
        names.update(zip(line["tokens"], line["pieces"], strict=False))
    for line in lines:  # a token's own text is better than what it added to a text
        names.update({int(token): text for token, text in line.get("texts", {}).items()})
    return names


def _why(lane: Lane, line: Line, n: int, q: float) -> str:
    """Why the rule kept the token or did not, in one sentence with its numbers."""
    accepted, rule = n in line["accepted"], lane.recipe.get("rule", "rejection")
    if line["p"][n] is None:
        kept = "The cloud's late answer said so." if accepted else "The cloud's late answer said otherwise."
        return "Not judged by the target: the drafter's own." if unseen(line) else kept
    if line["beta"][n] is None:
        return "Never tested: a token before it was not kept."
    elder = any(line["beta"][m] is not None for m in range(n) if line["parents"][m] == line["parents"][n])
    p, draw = line["p"][n], line["draw"][n]
    if rule in ("match", "coupled"):
        shared = " with the noise that both share" if rule == "coupled" else ""
        return f"{'Kept' if accepted else 'Rejected'}: the target drew {'it too' if accepted else 'another'}{shared}."
    if lane.recipe.get("temperature") == 0 or rule == "top1":
        return f"{'Kept: it is' if accepted else 'Rejected: it is not'} the target's first choice."
    if draw is None:
        return f"{'Kept' if accepted else 'Rejected'} by the rule {rule}, without a draw: p is {p:.3g}, q {q:.3g}."
    if elder:  # what its siblings left of p is not in the trace
        return (
            f"{'Kept' if accepted else 'Rejected'} by the draw {draw:.2f}, against what its elder siblings left of p."
        )
    name = "p" if line["q"] is None else "p/q"
    ratio = p / q if q else 0.0
    if ratio >= 1:
        return f"Kept, whatever the draw: {name} = {ratio:.3g} is at least 1."
    return (
        f"Kept because the draw {draw:.2f} was below {name} = {ratio:.3g}."
        if accepted
        else f"Rejected because the draw {draw:.2f} was above {name} = {ratio:.3g}."
    )


def _last(lane: Lane, line: Line, names: Mapping[int, str]) -> dict[str, Any] | None:
    """The token that the target added, and the law it came from where that was recorded."""
    if line["token"] is None:
        return None
    distributions, drafted, kind = line.get("laws"), line.get("drafted"), line["kind"]
    node = line["accepted"][-1] if line["accepted"] else -1
    words = (
        "The drafter's own: the cloud is lost."
        if unseen(line)
        else {
            "plain": "Nothing was drafted: the target's own choice.",
            "bonus": "All was kept to the end of the draft: the pass that verified it gave one token more.",
            "correction": "The target's own choice where the draft was turned down.",
        }[kind]
    )
    bars: Bars = []
    probs = "p"
    if distributions:
        top = distributions[node + 1]["top"]
        children = [n for n, parent in enumerate(line["parents"]) if parent == node]
        rejection = lane.recipe.get("rule", "rejection") == "rejection" and lane.recipe.get("temperature") != 0
        if kind == "correction" and rejection and len(children) == 1 and not lane.recipe.get("skip_sample_adjustment"):
            probs = "residual"
            words = "Drawn from the residual, max(p − q, 0) made to sum to 1: what the drafter gave too seldom."
            q_top = drafted[children[0]]["top"] if drafted else [[line["draft"][children[0]], 1.0]]
            left = 1 - (line["beta"][children[0]] or 0.0)
            bars = [
                (text, max(p - q, 0) / left if left > 0 else p, None)
                for text, p, q in _bars(top, q_top, names)
                if p is not None and q is not None
            ]
        else:
            bars = [(text, p, None) for text, p, _ in _bars(top, [], names)]
    return {
        "text": line["pieces"][-1],
        "token": line["token"],
        "kind": kind,
        "law": probs,
        "words": words,
        "bars": bars,
    }


def _facts(line: Line) -> list[tuple[str, str]]:
    """What the draft-length policy allowed, and what it went by."""
    notes = [(name.replace("_", " "), f"{value:.3g}") for name, value in line.get("policy", {}).items()]
    return [("γ allowed", str(line["gamma"])), *notes, *link_facts(line)]


def _summary(line: Line) -> str:
    drafted, kept, committed = len(line["draft"]), len(line["accepted"]), len(line["tokens"])
    if line["i"] == 0:
        return "The prefill: one pass over the prompt, which gives the first token."
    if "pending" in line:
        return f"A round of the search: {committed} tokens on which all beams agree."
    if not drafted:
        return "Nothing was drafted, so one token was won."
    return f"Drafted {drafted}, kept {kept}, committed {committed}."


COLUMNS = (
    "round", "t_s", "gamma", "drafted", "tested", "accepted", "committed", "ends_with", "mean_beta",
    "draft_ms", "verify_ms", "host_ms", "text",
)  # fmt: skip


def table(lane: Lane) -> list[list[Any]]:
    """A row per round, in the order of `COLUMNS`."""
    rows = []
    for line in steps(lane):
        betas = [beta for beta in line["beta"] if beta is not None]
        rows.append(
            [
                line["i"],
                round(line["t"], 4),
                line["gamma"],
                len(line["draft"]),
                len(betas),
                len(line["accepted"]),
                len(line["tokens"]),
                line["kind"],
                round(sum(betas) / len(betas), 3) if betas else None,
                *(round(1000 * line[f"{part}_s"], 3) for part in ("draft", "verify", "host")),
                line["text"],
            ]
        )
    return rows


def as_csv(lane: Lane) -> str:
    """The table as CSV. Texts are written as JSON strings, so that none is taken for a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in table(lane):
        writer.writerow([*row[:-1], json.dumps(row[-1], ensure_ascii=False)])
    return out.getvalue()


def figures(lane: Lane) -> dict[str, Any]:
    """What the charts under the lanes draw: acceptance by position, and other gammas on the same text."""
    m = lane.metrics.as_dict()
    positions = [
        [accepted / tested, tested]
        for accepted, tested in zip(m["accepted_by_position"], m["tested_by_position"], strict=True)
        if tested
    ]
    others, why = what_if(lane)
    return {"columns": COLUMNS, "rows": table(lane), "positions": positions, "what_if": others, "why_not": why}


def what_if(lane: Lane) -> tuple[dict[str, Any] | None, str]:
    """Tokens per pass and per second of other gammas on this very text, or a sentence why they cannot be told."""
    method = METHODS.get(lane.recipe["method"])
    if method and not method.drafts:
        return None, "Nothing was drafted in this lane."
    lines = steps(lane)
    cost = next((line["environment"].get("parity", {}).get("cost") for line in lane.lines if "environment" in line), 0)
    if not cost:
        return None, "The trace does not say what passes over several rows cost."
    m = lane.metrics.as_dict()
    longest = LONGEST
    if method and method.preflight == "replay":  # drafts end at the last known token
        longest = max((len(line["draft"]) for line in lines), default=0)
    price = CostModel({int(rows): value for rows, value in cost.items()})
    try:
        found = other_gammas([Step.from_json(line) for line in lines], range(longest + 1), price.verify)
    except ValueError:
        return None, "The drafts are forests: what is known of their positions says nothing of other lengths."
    if not found:
        return None, "No draft was tested in this lane."
    return {
        "rows": [[one.gamma, round(one.tokens_per_pass, 3), round(one.tokens_per_second, 2)] for one in found],
        "gamma": lane.recipe["gamma"] if lane.recipe.get("policy", "fixed") == "fixed" else None,
        "measured": m["tokens_per_second"],
    }, ""
