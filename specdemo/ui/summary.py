"""Sentences about a finished run: headline, verdict, and how its texts compare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from specdemo.core.explain import explain_engine
from specdemo.core.formats import number, percent, rate
from specdemo.core.ledger import TimeCause
from specdemo.core.theory import CostTerms, LengthEstimate, can_improve, expected_tokens, walltime_improvement
from specdemo.core.theory import speedup as cost_model
from specdemo.drafters import draft_shape
from specdemo.ui.lane import ALONE, BASELINE, SPEC, Lane, linked, mode, short_names, speed
from specdemo.ui.run_estimate import RunEstimate, cost_terms, estimate_lengths, lane_ledger
from specdemo.ui.run_figures import (
    NOT_MEASURABLE,
    Lanes,
    Speeds,
    checking_cost,
    disturbed_lanes,
    marked_names,
    measured_speedups,
    pass_costs,
    ratio_text,
    run_table,
    withheld,
)
from specdemo.ui.suggestions import PRESS_REPEAT, at_a_time, no_gain, nothing_drafted, rarely_drafts, suggestions
from specdemo.ui.text_comparison import (
    OTHER_DRAW,
    SAME_TEXT,
    compare_all_texts,
    compare_lengths,
    compare_texts,
    compare_weight_formats,
)

FASTER, SLOWER = 1.05, 0.95  # ratios of a single run that are a result
ENOUGH_PAIRS = 5  # equal speeds give 5 ratios on one side of 1 in 6 % of the repetitions
MOSTLY_WAITING = 0.5  # share of the time
_DISTURBANCE = "Another program used the processor: the times contradict the number of passes."
_GREY = "The bars are grey: another program disturbed the displayed pair, so it does not count."
REPEAT, DISABLE = "confirm with Repeat", "disable speculation (method ar)"
_SMALLER_DRAFT = {
    "tree": "Each guess of the tree costs time: lower “Nodes per draft”",
    "lookahead": "Each guess adds a row to the pass: lower “Window, positions” or “Order n”",
}


def summarise(lanes: Lanes, speeds: Speeds) -> dict[str, Any]:
    return {
        "verdict": " ".join(filter(None, (verdict(lanes, speeds), _waiting(lanes), _engines(lanes)))),
        "disturbed": disturbed_lanes(lanes),
        "lengths": compare_lengths(lanes),
        "headline": headline(lanes, speeds),
        "passes": pass_costs(lanes),
        "table": run_table(lanes, speeds),
        "texts": compare_all_texts(lanes),
        "names": marked_names(lanes, speeds),
    }


class _Comparison:
    """First lane compared with the AR lane: its speed-ups `ratios`, and its costs if step durations are known."""

    def __init__(self, lanes: Lanes, ratios: Sequence[float]) -> None:
        self.spec, self.plain = lanes[SPEC], lanes[BASELINE]
        self.linked = linked(lanes)
        self.pairs = ratios if len(ratios) > 1 else ()
        self.median = statistics.median(ratios)
        self.decided = len(self.pairs) >= ENOUGH_PAIRS
        self.terms = cost_terms(self.spec.metrics, self.plain.metrics)
        self.for_speed = self.spec.recipe["method"] != "beam" and mode(self.spec.recipe) not in ALONE

    @property
    def tone(self) -> str:
        """Good, bad, even, or none if speed is not the aim."""
        if not self.for_speed:
            return "none"
        if self.pairs and min(self.pairs) <= 1 < max(self.pairs):
            return "even"
        if self.decided:
            return "good" if self.median > 1 else "bad"
        return "good" if self.median >= FASTER else "bad" if self.median < SLOWER else "even"

    @property
    def outcome(self) -> str:
        value = f"{ratio_text(self.median)}×"
        equal = self.spec.metrics.tokens == self.plain.metrics.tokens
        measure = f" in total time{'' if equal else ' per token'}" if self.linked else ""
        times = ""
        if self.pairs:
            every = "all " if self.decided else ""
            times = f", {min(self.pairs):.2f} to {max(self.pairs):.2f} in {every}{len(self.pairs)} pairs"
        return {
            "good": f"{value} faster with drafts{measure}{times}",
            "bad": f"{value} the speed, slower with drafts{measure}{times}",
            "even": f"No clear difference: {value}{measure}{times}",
            "none": f"{value} the speed of the large model alone",
        }[self.tone]

    @property
    def better(self) -> LengthEstimate | None:
        estimate = estimate_lengths(self.spec, self.plain)
        return estimate.better if isinstance(estimate, RunEstimate) else None


# --- headline ----------------------------------------------------------------------------------------------------


def headline(lanes: Lanes, speeds: Speeds) -> dict[str, Any] | None:
    """Return the result line with its tone, a reason and suggestions; None before the first token."""
    lane = next((lane for lane in lanes.values() if lane.begun and lane.metrics.steps), None)
    if lane is None:
        return None
    line = {"text": _single(lane, linked(lanes)), "tone": "none", "reason": "", "loss": "", "suggestions": []}
    if withheld(lanes, speeds):
        text = f"Speed {NOT_MEASURABLE}, {_texts(lanes)}"
        return line | {"text": text, "reason": _DISTURBANCE, "suggestions": [PRESS_REPEAT]}
    ratios = measured_speedups(lanes, speeds)
    if not ratios:
        return line
    result = _Comparison(lanes, ratios)
    if not result.for_speed:
        return line | {"text": f"{result.outcome}, another text."}
    line |= {"text": f"{result.outcome}, {_texts(lanes)}{_all_lanes(lanes, speeds)}", "tone": result.tone}
    if withheld(lanes, {}):
        return line | {"reason": _GREY, "suggestions": [PRESS_REPEAT]}
    changes = suggestions(result.spec, result.tone, result.better, linked=result.linked, decided=result.decided)
    ledger = lane_ledger(result.spec, result.plain)
    where = " in the first pair" if result.pairs else ""
    loss = f"Largest extra cost{where}: {ledger.loss}." if ledger and ledger.loss else ""
    return line | {"reason": _reason(result, checking_cost(lanes)), "loss": loss, "suggestions": changes}


def _all_lanes(lanes: Lanes, speeds: Speeds) -> str:
    medians = {
        text: f"{ratio_text(statistics.median(ratios))}×{compare_weight_formats(lanes[name], lanes[BASELINE])}"
        for name, text in short_names(lanes).items()
        if (ratios := measured_speedups(lanes, speeds, name))
    }
    return f" Compared: {', '.join(f'{text} {value}' for text, value in medians.items())}." if medians else ""


def _single(lane: Lane, total: bool) -> str:
    m = lane.metrics
    if not m.decode_steps:
        return "The first run of the large model gave all tokens: no speed is measured."
    passes = f"{m.target_passes} runs of the large model after the first"
    return f"{m.tokens} tokens in {passes}, {rate(speed(m, total))} tokens per second."


def _texts(lanes: Lanes) -> str:
    """Return how text and number of passes compare with those of the AR lane."""
    spec, plain = lanes[SPEC], lanes[BASELINE]
    compared = compare_texts(spec, plain)
    words = "different words: both runs roll dice" if compared.badge == OTHER_DRAW else "another text"
    if compared.badge.endswith(SAME_TEXT):
        words = compared.badge
    elif compared.tone:
        words = f"text {compared.badge}"
    m, baseline = spec.metrics, plain.metrics
    if m.tokens == baseline.tokens:
        return f"{words}. The large model ran {m.target_passes} times instead of {baseline.target_passes}."
    return f"{words}. The large model gave {number(m.tokens_per_target_pass, 1)} tokens per run instead of 1."


def _reason(result: _Comparison, checking: str) -> str:
    if result.tone != "good" and (reason := nothing_drafted(result.spec)):
        return reason
    if result.linked and rarely_drafts(result.spec):
        return "Most steps had no guess to check."
    if result.linked or result.terms is None:
        return ""
    shared = any(event.step.policy.get("texts", 1) > 1 for event in result.spec.steps)
    others = " Other runs shared its passes, which takes longer." if shared else ""
    tokens, cost = result.spec.metrics.tokens_per_step or 0.0, result.terms.step
    if result.tone != "good" and checking:
        reason = no_gain(result.spec, checking, result.terms.draft)
    else:
        reason = f"each check gave {tokens:.2f} tokens for the time of {cost:.2f} single tokens."
    reason = f"In the first pair, {reason}" if result.pairs else reason[0].upper() + reason[1:]
    can_lose = tokens > cost > 1  # a check gives at least one token
    break_even = f" Slower with more wrong guesses: below {cost:.2f} per check." if can_lose else ""
    return f"{reason}{break_even}{others}"


# --- verdict: the causes of the speed ----------------------------------------------------------------------------


def verdict(lanes: Lanes, speeds: Speeds) -> str:
    """Return the speeds and their causes; empty without a comparison.

    Times are in AR steps, so speed-up = tokens per step / AR steps per step.
    """
    if withheld(lanes, speeds):
        return _DISTURBANCE
    ratios = measured_speedups(lanes, speeds)
    if not ratios:
        return ""
    result = _Comparison(lanes, ratios)
    displayed = [_speeds(result), *_causes(result)]
    if count := len(result.pairs):
        measured = len(speeds[SPEC])
        pairs = f"{count} alternating pairs."
        if count < measured:
            pairs = f"{count} of {measured} alternating pairs; the times of the others contradict the number of passes."
        displayed = [pairs] if withheld(lanes, {}) else [pairs, "The first pair, which is displayed:", *displayed]
    return f"{result.outcome}: {' '.join(filter(None, displayed))}"


def _speeds(result: _Comparison) -> str:
    m, baseline = result.spec.metrics, result.plain.metrics
    if not result.linked:
        return f"{rate(m.tokens_per_second)} against {rate(baseline.tokens_per_second)} tokens per second."
    own, other = ((figures.ttft_s or 0.0) + figures.decode_s for figures in (m, baseline))
    if m.tokens != baseline.tokens:
        own, other = (1000 * own / m.tokens, 1000 * other / baseline.tokens)
        return f"{own:.1f} against {other:.1f} ms per token, with the first token."
    return f"{own:.2f} against {other:.2f} s in total, with the first token."


def _causes(result: _Comparison) -> list[str]:
    if not result.for_speed:
        return []
    if result.linked:
        advised = result.median < SLOWER and _link_share(result.spec) > MOSTLY_WAITING
        advice = "The link takes most of each step: let the cloud decode alone." if advised else ""
        return ["The cloud alone streams its tokens after one round trip.", advice]
    terms = result.terms
    if terms is None:
        return ["The engine does not report the durations of its steps."]
    figures = f"guessing {terms.draft:.2f}, checking {terms.v:.2f}, the rest {terms.o:.2f}"
    gain = f"{result.spec.metrics.tokens_per_step:.2f} tokens for the time of {terms.step:.2f}"
    return [
        f"Each check gave {gain} ({figures}).",
        _theorem(result.spec, terms),
        _advice(result, terms) if result.median < SLOWER else "",
    ]


def _theorem(lane: Lane, terms: CostTerms) -> str:
    """Theorem 3.8 (2211.17192), and the cost model with measured verification and host costs."""
    alpha = lane.acceptance
    if alpha is None or draft_shape(lane.recipe["method"]) == "forest":  # the theorem is about chains
        return ""
    theorem = walltime_improvement(alpha, terms.drafted, terms.c)
    model = cost_model(expected_tokens(alpha, terms.drafted), terms.drafted, terms.c, terms.v, terms.o)
    inputs = f"{lane.acceptance_name} {number(alpha, 2)}, {terms.drafted:.1f} guesses per check, c {terms.c:.2f}"
    return f"The theory expects {theorem:.2f}×, with the times measured here {model:.2f}× (Theorem 3.8, {inputs})."


def _advice(result: _Comparison, terms: CostTerms) -> str:
    """Return a change that the estimate of this run favours."""
    lane, name = result.spec, result.spec.recipe["method"]
    if lane.acceptance is None:  # nothing was checked: the headline gives the reason
        return ""
    if name in _SMALLER_DRAFT:
        return f"{_SMALLER_DRAFT[name]}, or {REPEAT} and {DISABLE}."
    if not can_improve(lane.acceptance, terms.c):
        figures = f"{lane.acceptance_name} {lane.acceptance:.2f} does not exceed c {terms.c:.2f}"
        return f"A guess costs more than it gives ({figures}): {REPEAT}, then {DISABLE} or choose a cheaper helper."
    if better := result.better:
        action = "try it" if better.gamma else f"{REPEAT}, then {DISABLE}"
        speeds = f"{better.low:.0f} to {better.high:.0f} tokens per second"
        return f"With {at_a_time(better.gamma)}, the estimate is {speeds}: {action}."
    return f"No other number of guesses is clearly faster: {REPEAT}, since timings vary."


def _waiting(lanes: Lanes) -> str:
    shares = {lane.title: _link_share(lane) for lane in lanes.values() if mode(lane.recipe)}
    taken = ", ".join(f"{title} {percent(share)}" for title, share in shares.items() if share)
    return f"The link took part of the time: {taken}." if taken else ""


def _link_share(lane: Lane) -> float:
    ledger = lane_ledger(lane)
    return ledger.share(TimeCause.LINK) if ledger else 0.0


def _engines(lanes: Lanes) -> str:
    names = {
        f"{name} (batch-invariant)" if lane.bit_equal else name: None
        for lane in lanes.values()
        if lane.environment and (name := explain_engine(lane.environment))
    }
    return f"Computed by the {' and the '.join(names)}." if names else ""
