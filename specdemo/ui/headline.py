"""Result of a run in one line, with one reason and one suggestion, which the page shows as a button."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdemo.core.formats import number
from specdemo.ui.labels import (
    ENOUGH_PAIRS,
    cost_terms,
    differing_inputs,
    estimated_gamma,
    lane_speedup,
    ratio_text,
    repeated_ratios,
    sameness,
)
from specdemo.ui.lane import ALONE, PLAIN, SPEC, Lane, linked, mode

FASTER, SLOWER = 1.05, 0.95
PRESS_REPEAT = {"label": "Repeat ×5", "press": "repeat"}
CHOOSE_BASELINE = {"label": "Turn speculation off", "set": {"method": "ar"}}


@dataclass(frozen=True)
class Headline:
    """Result line. `tone` is good, even, bad or none; a suggestion presses a button or sets options."""

    text: str
    tone: str = "none"
    reason: str = ""
    suggestion: Mapping[str, Any] | None = None


def headline(lanes: Mapping[str, Lane], speeds: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """Return the fields of the result line; None before the first token."""
    lane = next((lane for lane in lanes.values() if lane.begun and lane.metrics.steps), None)
    if lane is None:
        return None
    ratio = lane_speedup(lanes)
    if ratio is None or SPEC not in lanes:
        return asdict(_single(lane))
    if lanes[SPEC].recipe["method"] == "beam" or mode(lanes[SPEC].recipe) in ALONE:
        return asdict(Headline(f"{ratio_text(ratio)}× the speed of the baseline, another text."))
    return asdict(_compared(lanes, ratio, repeated_ratios(speeds)))


def _single(lane: Lane) -> Headline:
    m = lane.metrics
    if not m.decode_steps:
        return Headline("The first target pass gave all tokens: no speed is measured.")
    passes = f"{m.target_passes} target passes after the first"
    return Headline(f"{m.tokens} tokens in {passes}, {number(m.tokens_per_second, 0)} tokens per second.")


def _compared(lanes: Mapping[str, Lane], single: float, ratios: Sequence[float]) -> Headline:
    ratio = statistics.median(ratios) if ratios else single
    outcome, tone = _outcome(ratio, ratios, "in total time" if linked(lanes) else "")
    return Headline(
        f"{outcome}, {_text(lanes)}. {_passes(lanes)}",
        tone,
        _reason(lanes, repeated=bool(ratios)),
        _suggestion(lanes, tone, repeated=len(ratios) >= ENOUGH_PAIRS),
    )


def _outcome(ratio: float, ratios: Sequence[float], measure: str) -> tuple[str, str]:
    value = f"{ratio_text(ratio)}×"
    if len(ratios) >= ENOUGH_PAIRS:
        faster, slower = min(ratios) > 1, max(ratios) <= 1
        times = f"in all {len(ratios)} pairs"
    else:
        faster, slower = ratio >= FASTER, ratio < SLOWER
        times = "in this run"
    words = " ".join(filter(None, (measure, times)))
    if faster:
        return f"{value} faster with drafts {words}", "good"
    if slower:
        return f"{value}, slower with drafts {words}", "bad"
    return f"No clear difference: {value}{f' {measure}' if measure else ''}", "even"


def _text(lanes: Mapping[str, Lane]) -> str:
    if lanes[SPEC].tokens == lanes[PLAIN].tokens:
        return "same text"
    if same := sameness(lanes):
        return f"text {same['badge']}"
    another_draw = lanes[SPEC].exact and not differing_inputs(lanes[SPEC], lanes[PLAIN])
    return "another random draw of the text" if another_draw else "another text"


def _passes(lanes: Mapping[str, Lane]) -> str:
    spec, baseline = lanes[SPEC].metrics, lanes[PLAIN].metrics
    if spec.tokens == baseline.tokens:
        return f"{spec.target_passes} target passes instead of {baseline.target_passes}."
    return f"{number(spec.tokens_per_target_pass, 1)} tokens per target pass instead of 1."


def _reason(lanes: Mapping[str, Lane], repeated: bool) -> str:
    terms = cost_terms(lanes[SPEC].metrics, lanes[PLAIN].metrics)
    if terms is None or linked(lanes):
        return ""
    cost, tokens = terms.draft + terms.v + terms.o, lanes[SPEC].metrics.tokens_per_step
    subject = "In the displayed pair, a step" if repeated else "A step"
    shared = any(event.step.policy.get("texts", 1) > 1 for event in lanes[SPEC].steps)
    others = " Other runs shared its passes, which takes longer." if shared else ""
    return f"{subject} gave {tokens:.1f} tokens and took {cost:.1f} times as long as a step of the baseline.{others}"


def _suggestion(lanes: Mapping[str, Lane], tone: str, repeated: bool) -> Mapping[str, Any] | None:
    estimated = estimated_gamma(lanes[SPEC], lanes[PLAIN]) if tone != "good" else None
    if estimated and estimated[0]:
        return {"label": f"Try γ {estimated[0]}", "set": {"gamma": estimated[0]}}
    if not repeated:
        return PRESS_REPEAT
    return CHOOSE_BASELINE if tone == "bad" else None
