"""Result of a run in words and figures: headline, verdict, tiles, table, and how the texts compare."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specdemo.core.explain import explain_engine
from specdemo.core.formats import NOTHING, format_bytes, latency, number, percent
from specdemo.core.rules import rule_traits
from specdemo.core.simulate import GammaEstimate
from specdemo.core.theory import CostTerms, can_improve, expected_tokens, walltime_improvement
from specdemo.core.theory import speedup as cost_model
from specdemo.drafters import METHODS, draft_shape
from specdemo.ui.lane import ALONE, PLAIN, SPEC, Lane, linked, mode, model_name, speed
from specdemo.ui.run_estimate import RunEstimate, cost_terms, estimate_lengths
from specdemo.ui.text_comparison import Relation, compare_texts, differing_inputs, guarantee

Lanes = Mapping[str, Lane]
Speeds = Mapping[str, Sequence[float]]  # tokens per second of each repetition, by lane

FASTER, SLOWER = 1.05, 0.95  # ratios of a single run that are a result
ENOUGH_PAIRS = 5  # equal speeds give 5 ratios on one side of 1 in 6 % of the repetitions
DISTURBED = 0.9  # ratio of the times of passes below which noise is the cause
MOSTLY_WAITING = 0.5  # share of the time
REPEAT, DISABLE = "confirm with Repeat", "disable speculation (method ar)"
PRESS_REPEAT = {"label": "Repeat ×5", "press": "repeat"}
CHOOSE_BASELINE = {"label": "Turn speculation off", "set": {"method": "ar"}}
TABLE_HEAD = ("settings", "model", "speed-up", "tokens per pass", "acceptance", "α", "first token", "guarantee")
_FORM = {"quantization", "activations"}
_SMALLER_DRAFT = {
    "tree": "Each node of the tree costs drafting and verification: lower “Nodes per draft”",
    "lookahead": "Each guess adds a row to the pass: lower “Window, positions” or “Order n”",
}


def summarise(lanes: Lanes, speeds: Speeds) -> dict[str, Any]:
    """Return the summary of a finished run."""
    return {
        "verdict": " ".join(filter(None, (verdict(lanes, speeds), _waiting(lanes), _engines(lanes)))),
        "lengths": _unequal_lengths(lanes),
        "headline": headline(lanes, speeds),
        "passes": pass_costs(lanes),
        "table": [TABLE_HEAD, *(_row(name, lane, lanes, speeds) for name, lane in lanes.items() if lane.begun)],
        "texts": _texts(lanes),
    }


# --- speed -------------------------------------------------------------------------------------------------------


def lane_speedup(lanes: Lanes, name: str = SPEC) -> float | None:
    """Speed of a lane relative to the AR lane, once both have ended; over a link including the first token."""
    if name == PLAIN or not all(lane in lanes and lanes[lane].ended for lane in (name, PLAIN)):
        return None
    if "prompt" in differing_inputs(lanes[name], lanes[PLAIN]):
        return None
    value, baseline = (speed(lanes[lane].metrics, linked(lanes)) for lane in (name, PLAIN))
    return value / baseline if value and baseline else None


def ratio_text(value: float) -> str:
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def _pairs(speeds: Speeds, name: str = SPEC) -> list[float]:
    """Return the speed-up of each pair; empty without repetitions."""
    pairs = zip(speeds.get(name, ()), speeds.get(PLAIN, ()), strict=False)
    ratios = [value / baseline for value, baseline in pairs if value and baseline]
    return ratios if len(ratios) > 1 else []


def _tone(spec: Lane, ratio: float, pairs: Sequence[float]) -> str:
    """Return good, bad, even, or none if speed is not the aim."""
    if spec.recipe["method"] == "beam" or mode(spec.recipe) in ALONE:
        return "none"
    if len(pairs) >= ENOUGH_PAIRS:
        faster, slower = min(pairs) > 1, max(pairs) <= 1
    else:
        faster, slower = _median(ratio, pairs) >= FASTER, _median(ratio, pairs) < SLOWER
    return "good" if faster else "bad" if slower else "even"


def _median(ratio: float, pairs: Sequence[float]) -> float:
    return statistics.median(pairs) if pairs else ratio


def _outcome(spec: Lane, ratio: float, pairs: Sequence[float], total: bool) -> str:
    value = f"{ratio_text(_median(ratio, pairs))}×"
    measure = " in total time" if total else ""
    times = "in this run" if not pairs else f"in {len(pairs)} pairs, too few for a result"
    if len(pairs) >= ENOUGH_PAIRS:
        times = f"in all {len(pairs)} pairs"
    return {
        "good": f"{value} faster with drafts{measure} {times}",
        "bad": f"{value}, slower with drafts{measure} {times}",
        "even": f"No clear difference: {value}{measure}",
        "none": f"{value} the speed of the baseline",
    }[_tone(spec, ratio, pairs)]


def headline(lanes: Lanes, speeds: Speeds) -> dict[str, Any] | None:
    """Return the result line with its tone, one reason and one suggestion; None before the first token."""
    lane = next((lane for lane in lanes.values() if lane.begun and lane.metrics.steps), None)
    if lane is None:
        return None
    ratio = lane_speedup(lanes)
    if ratio is None or SPEC not in lanes:
        return _line(_single(lane))
    spec, plain = lanes[SPEC], lanes[PLAIN]
    pairs = _pairs(speeds)
    tone, outcome = _tone(spec, ratio, pairs), _outcome(spec, ratio, pairs, linked(lanes))
    if tone == "none":
        return _line(f"{outcome}, another text.")
    return _line(
        f"{outcome}, {_same_words(spec, plain)}. {_passes(spec, plain)}",
        tone,
        "" if linked(lanes) else _reason(spec, plain, repeated=bool(pairs)),
        _suggestion(spec, plain, tone, repeated=len(pairs) >= ENOUGH_PAIRS),
    )


def _line(
    text: str, tone: str = "none", reason: str = "", suggestion: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {"text": text, "tone": tone, "reason": reason, "suggestion": suggestion}


def _single(lane: Lane) -> str:
    m = lane.metrics
    if not m.decode_steps:
        return "The first target pass gave all tokens: no speed is measured."
    passes = f"{m.target_passes} target passes after the first"
    return f"{m.tokens} tokens in {passes}, {number(m.tokens_per_second, 0)} tokens per second."


def _same_words(spec: Lane, plain: Lane) -> str:
    compared = compare_texts(spec, plain)
    if compared.tone or compared.relation is Relation.SAME:
        return compared.badge if compared.relation is Relation.SAME else f"text {compared.badge}"
    return "another random draw of the text" if compared.relation is Relation.OTHER_DRAW else "another text"


def _passes(spec: Lane, plain: Lane) -> str:
    m, baseline = spec.metrics, plain.metrics
    if m.tokens == baseline.tokens:
        return f"{m.target_passes} target passes instead of {baseline.target_passes}."
    return f"{number(m.tokens_per_target_pass, 1)} tokens per target pass instead of 1."


def _reason(spec: Lane, plain: Lane, repeated: bool) -> str:
    terms = cost_terms(spec.metrics, plain.metrics)
    if terms is None:
        return ""
    subject = "In the displayed pair, a step" if repeated else "A step"
    figures = f"gave {spec.metrics.tokens_per_step:.1f} tokens and took {terms.step:.1f} times as long as a step"
    shared = any(event.step.policy.get("texts", 1) > 1 for event in spec.steps)
    others = " Other runs shared its passes, which takes longer." if shared else ""
    return f"{subject} {figures} of the baseline.{others}"


def _suggestion(spec: Lane, plain: Lane, tone: str, repeated: bool) -> Mapping[str, Any] | None:
    better = _better_length(spec, plain) if tone != "good" else None
    if better and better.gamma:
        return {"label": f"Try γ {better.gamma}", "set": {"gamma": better.gamma}}
    if not repeated:
        return PRESS_REPEAT
    return CHOOSE_BASELINE if tone == "bad" else None


def _better_length(spec: Lane, plain: Lane) -> GammaEstimate | None:
    estimate = estimate_lengths(spec, plain)
    return estimate.better if isinstance(estimate, RunEstimate) else None


def _texts(lanes: Lanes) -> dict[str, tuple[str, str, str]]:
    """Return badge, sentence and tone of each compared lane."""
    plain = lanes.get(PLAIN)
    if plain is None or not (plain.begun and plain.ended):
        return {}
    ended = {name: lane for name, lane in lanes.items() if name != PLAIN and lane.begun and lane.ended}
    compared = {name: compare_texts(lane, plain) for name, lane in ended.items() if lane.metrics.steps}
    return {name: (text.badge, text.why, text.tone) for name, text in compared.items()}


# --- verdict: the causes of the speed ----------------------------------------------------------------------------


def verdict(lanes: Lanes, speeds: Speeds) -> str:
    """Return the speeds and their causes; empty without a comparison.

    Times are in AR steps, so speed-up = tokens per step / AR steps per step.
    """
    ratio, pairs = lane_speedup(lanes), _pairs(speeds)
    if ratio is None or SPEC not in lanes:
        return ""
    spec, plain = lanes[SPEC], lanes[PLAIN]
    outcome = _outcome(spec, ratio, pairs, linked(lanes))
    if pairs:
        return f"{outcome}: {min(pairs):.2f}× to {max(pairs):.2f}×, over {len(pairs)} alternating pairs."
    causes: list[str] = []
    if mode(spec.recipe) not in ALONE and spec.recipe["method"] != "beam":
        causes = _link_causes(spec, ratio) if linked(lanes) else _causes(spec, plain, ratio)
    others = (
        f"{other.title} ran at {ratio_text(value)}× the speed of AR decoding{_other_text(other, plain)}."
        for name, other in lanes.items()
        if name != SPEC and (value := lane_speedup(lanes, name)) is not None
    )
    return " ".join(filter(None, (f"{outcome}: {_speeds(spec, plain, linked(lanes))}", *causes, *others)))


def _speeds(spec: Lane, plain: Lane, total: bool) -> str:
    m, baseline = spec.metrics, plain.metrics
    if not total:
        return f"{m.tokens_per_second:.1f} against {baseline.tokens_per_second:.1f} tokens per second."
    own, other = ((figures.ttft_s or 0.0) + figures.decode_s for figures in (m, baseline))
    return f"{own:.2f} against {other:.2f} s in total, with the first token."


def _link_causes(spec: Lane, ratio: float) -> list[str]:
    waited = spec.metrics.remote.get("rtt_s", 0.0) / (spec.metrics.decode_s or 1.0)
    words = ["The cloud alone streams its tokens after one round trip."]
    if ratio < SLOWER and waited > MOSTLY_WAITING:
        words.append("The link takes most of each step: let the cloud decode alone.")
    return words


def _causes(spec: Lane, plain: Lane, ratio: float) -> list[str]:
    terms = cost_terms(spec.metrics, plain.metrics)
    if terms is None:
        return ["The engine does not report the durations of its steps."]
    figures = f"drafting {terms.draft:.2f}, verifying {terms.v:.2f}, host {terms.o:.2f}"
    return [
        f"A step gave {spec.metrics.tokens_per_step:.2f} tokens and took {terms.step:.2f} AR steps ({figures}).",
        _theorem(spec, terms),
        _advice(spec, plain, terms) if ratio < SLOWER else "",
    ]


def _theorem(lane: Lane, terms: CostTerms) -> str:
    """Theorem 3.8 (2211.17192), and the cost model with measured verification and host costs."""
    alpha = lane.acceptance
    if alpha is None or draft_shape(lane.recipe["method"]) == "forest":  # the theorem is about chains
        return ""
    theorem = walltime_improvement(alpha, terms.drafted, terms.c)
    model = cost_model(expected_tokens(alpha, terms.drafted), terms.drafted, terms.c, terms.v, terms.o)
    return (
        f"With {lane.acceptance_name} {number(alpha, 2)}, {terms.drafted:.1f} draft tokens per step and "
        f"c {terms.c:.2f}, Theorem 3.8 predicts {theorem:.2f}×. With the measured costs of verification and host it "
        f"is {model:.2f}×."
    )


def _advice(lane: Lane, plain: Lane, terms: CostTerms) -> str:
    """Return a change that the estimate of this run favours."""
    method = METHODS.get(lane.recipe["method"])
    if not terms.drafted:
        copies = method is not None and method.preflight == "replay"
        cause = "the drafter found no matching context" if copies else "policy or token limit allowed no draft"
        return f"Nothing was drafted: {cause}."
    if lane.recipe["method"] in _SMALLER_DRAFT:
        return f"{_SMALLER_DRAFT[lane.recipe['method']]}, or {REPEAT} and {DISABLE}."
    if lane.acceptance is None:
        return "The target tested no draft token: the speed does not depend on acceptance."
    if not can_improve(lane.acceptance, terms.c):
        cause = f"Acceptance ({lane.acceptance_name} {lane.acceptance:.2f}) does not exceed c {terms.c:.2f}"
        return f"{cause}: {REPEAT}, then {DISABLE} or choose a cheaper drafter."
    if better := _better_length(lane, plain):
        action = "try it" if better.gamma else f"{REPEAT}, then {DISABLE}"
        return f"γ {better.gamma} is estimated at {better.low:.0f} to {better.high:.0f} tokens per second: {action}."
    return f"No other draft length is clearly faster: {REPEAT}, since timings vary."


def _other_text(lane: Lane, plain: Lane) -> str:
    compared = compare_texts(lane, plain)
    if not compared.differing or not _FORM.issuperset(compared.differing) or lane.recipe.get("temperature"):
        return ""
    same = compared.relation is Relation.SAME
    return "; its text is the same" if same else f"; its text differs from token {compared.equal + 1} on"


def _waiting(lanes: Lanes) -> str:
    shares = [
        f"{lane.title} {percent(min(1.0, waited / lane.metrics.decode_s))}"
        for lane in lanes.values()
        if mode(lane.recipe)
        and lane.metrics.decode_s
        and (waited := sum(event.step.verdict.remote.get("rtt_s", 0.0) for event in lane.steps[1:]))
    ]
    return f"Waiting for the link took part of the time: {', '.join(shares)}." if shares else ""


def _engines(lanes: Lanes) -> str:
    names = {
        f"{name} (batch-invariant)" if lane.bit_equal else name: None
        for lane in lanes.values()
        if lane.environment and (name := explain_engine(lane.environment))
    }
    return f"Computed by the {' and the '.join(names)}." if names else ""


def _unequal_lengths(lanes: Lanes) -> str:
    begun = {name: lane for name, lane in lanes.items() if lane.begun}
    if PLAIN not in begun:
        return ""
    if any("prompt" in differing_inputs(lane, begun[PLAIN]) for lane in begun.values()):
        return "The prompts differ: speeds and texts are not compared."
    if len({lane.metrics.tokens for lane in begun.values()}) < 2:
        return ""
    names = {name: "AR" if name == PLAIN else lane.title for name, lane in begun.items()}
    counts = (f"{names[name]} {lane.metrics.tokens} tokens" for name, lane in begun.items())
    return f"{'; '.join(counts)}: speeds are compared, not times."


def pass_costs(lanes: Lanes) -> dict[str, Any] | None:
    """Compare passes over the most frequent draft with those over one row."""
    spec, plain = lanes.get(SPEC), lanes.get(PLAIN)
    if spec is None or plain is None or not (spec.ended and plain.ended) or mode(spec.recipe):
        return None
    checked = [(len(event.step.draft), event.step.verify_s) for event in spec.steps[1:] if event.step.draft.tokens]
    single = [event.step.verify_s for event in plain.steps[1:] if event.step.verify_s]
    drafts = Counter(length for length, verify_s in checked if verify_s)
    if not drafts or not single:
        return None
    rows = 1 + drafts.most_common(1)[0][0]
    several_s = statistics.median(verify_s for length, verify_s in checked if verify_s and length + 1 == rows)
    ratio = several_s / statistics.median(single)
    words = f"Why: checking {rows} tokens takes {ratio:.1f} times as long as writing 1."
    if ratio < DISTURBED:
        cause = f"checking {rows} tokens cannot be faster than writing 1"
        words = f"Other programs disturbed the times of the passes: {cause}. Press Repeat."
    bars = [["writing 1", statistics.median(single)], [f"checking {rows}", several_s]]
    return {"words": words, "bars": bars}


# --- tiles and table ---------------------------------------------------------------------------------------------


def tiles(lanes: Lanes, speeds: Speeds) -> dict[str, tuple[str, str]]:
    """Return value and note of each tile, also during a run."""
    lane = next(iter(lanes.values()))
    m = lane.metrics
    device = "" if lane.memory.device is None else f" · device {format_bytes(lane.memory.device)}"
    memory = f"weights {format_bytes(lane.weights)} · KV {format_bytes(lane.memory.kv)}{device}"
    return {
        "acceptance": (percent(m.acceptance_rate), _acceptance_note(lane)),
        "tokens_per_pass": _tokens_per_pass(lane),
        "tokens_per_second": (number(m.tokens_per_second, 1), f"{m.tokens} tokens, without prefill"),
        "ttft": (latency(m.ttft_s), "from the worker's start"),
        "memory": (format_bytes(lane.memory.process), memory),
        "speedup": _speedup(lanes, speeds),
    }


def _acceptance_note(lane: Lane) -> str:
    m = lane.metrics
    unverified = f" · {m.unverified} unverified" if m.unverified else ""
    if not m.drafted:
        return f"nothing drafted{unverified}"
    alpha = "" if rule_traits(lane.recipe).chains_only else f" · α {number(m.alpha, 2)}"
    overlap = "" if lane.counted else f" · {lane.acceptance_name} {number(lane.acceptance, 2)}"
    return f"{m.accepted} of {m.drafted - m.unverified_drafted} drafted{alpha}{overlap}{unverified}"


def _tokens_per_pass(lane: Lane) -> tuple[str, str]:
    m = lane.metrics
    if mode(lane.recipe) == "edge_only":
        return NOTHING, f"{m.decode_steps} passes of the drafter, none of the target"
    return number(m.tokens_per_target_pass, 2), f"{m.target_passes} target passes"


def _row(name: str, lane: Lane, lanes: Lanes, speeds: Speeds) -> list[str]:
    m = lane.metrics
    speedup, runs = _speedup(lanes, speeds, name)
    if name == PLAIN:
        speedup, runs = "1", "baseline"
    return [
        lane.title,
        model_name(lane.recipe),
        speedup if speedup == NOTHING else f"{speedup} ({runs})",
        _tokens_per_pass(lane)[0],
        percent(m.acceptance_rate),
        number(m.alpha, 2) if m.drafted and not rule_traits(lane.recipe).chains_only else NOTHING,
        latency(m.ttft_s),
        guarantee(lane)[0],
    ]


def _speedup(lanes: Lanes, speeds: Speeds, name: str = SPEC) -> tuple[str, str]:
    """Return the speed-up of a lane, and of how many runs it is."""
    ratio = lane_speedup(lanes, name)
    if ratio is None:
        return NOTHING, "no baseline measured"
    if pairs := _pairs(speeds, name):
        return f"{statistics.median(pairs):.2f}×", f"median of {len(pairs)} pairs, {min(pairs):.2f} to {max(pairs):.2f}"
    return f"{ratio_text(ratio)}×", "one run, total time" if linked(lanes) else "one run"
