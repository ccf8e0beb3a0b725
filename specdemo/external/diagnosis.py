"""Diagnoses of reported statistics; each names its fields and thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specdemo.core.formats import number, percent
from specdemo.external.engine_log import EngineStatistics

_LEAST_DRAFTED = 100  # fewer drafted tokens are no evidence
_LOW, _HIGH = 0.2, 0.6  # accepted / drafted
_ENDED, _BEFORE = 0.005, 0.05  # acceptance after and before the position where it ends


@dataclass(frozen=True)
class Diagnosis:
    """A rule about statistics; `explain` returns an empty text where it does not apply."""

    name: str
    fields: str
    thresholds: str
    explain: Callable[[EngineStatistics], str]


def _low_acceptance(reported: EngineStatistics) -> str:
    if reported.acceptance is None or (reported.drafted or 0) < _LEAST_DRAFTED or reported.acceptance >= _LOW:
        return ""
    remedy = "raise --spec-draft-p-min (0 by default)" if reported.engine == "llama.cpp" else "shorten drafts"
    return f"{percent(1 - reported.acceptance)} of the drafted tokens are rejected: {remedy} or choose another drafter."


def _perfect(reported: EngineStatistics) -> str:
    return "Every drafted token was accepted: draft more tokens per step." if reported.acceptance == 1 else ""


def _acceptance_ends(reported: EngineStatistics) -> str:
    rates = reported.by_position
    alive = [position for position, rate in enumerate(rates, 1) if rate >= _ENDED]
    last = max(alive, default=0)
    if not last or rates[last - 1] < _BEFORE or len(rates) - last < 2:
        return ""
    return (
        f"Acceptance falls to 0 after position {last}: draft at most {last} per step, and check the sliding window and "
        "the trained length of the drafter."
    )


def _fixed_cost(reported: EngineStatistics) -> str:
    speed, alone = reported.tokens_per_second, reported.ar_tokens_per_second
    tokens = reported.tokens_per_step
    high = (reported.acceptance or 0) >= _HIGH or (tokens or 0) >= 2
    if speed is None or alone is None or not high or speed >= alone:
        return ""
    cost = "" if tokens is None else f" A step costs {number(tokens * alone / speed, 1)} autoregressive steps."
    return (
        f"Drafts are accepted, but {number(speed, 0)} tokens per second are slower than {number(alone, 0)} without "
        f"drafts. Each step has a fixed cost: draft longer, or decode without drafts.{cost}"
    )


DIAGNOSES = (
    Diagnosis(
        "low acceptance",
        "drafted, accepted",
        f"accepted / drafted below {_LOW}, {_LEAST_DRAFTED} drafted",
        _low_acceptance,
    ),
    Diagnosis("full acceptance", "drafted, accepted", "accepted = drafted", _perfect),
    Diagnosis(
        "acceptance ends",
        "acceptance per position",
        f"at least {_BEFORE}, then two or more positions below {_ENDED}",
        _acceptance_ends,
    ),
    Diagnosis(
        "fixed cost per step",
        "accepted / drafted or tokens per step, tokens/s with and without drafts",
        f"accepted / drafted from {_HIGH} or 2 tokens per step, and slower than without drafts",
        _fixed_cost,
    ),
)


def describe(reported: EngineStatistics) -> list[str]:
    """Return the lines of the terminal: figures, acceptance by position, conclusions."""
    rates = enumerate(reported.by_position, 1)
    positions = [f"position {position:>2}  {rate:.3f}  {'#' * round(40 * rate)}" for position, rate in rates]
    return [figures_line(reported), *positions, *conclusions(reported)]


def figures_line(reported: EngineStatistics) -> str:
    """Return the reported figures."""
    figures = {
        "tokens per step": reported.tokens_per_step,
        "tokens per second": reported.tokens_per_second,
        "tokens per second without drafts": reported.ar_tokens_per_second,
    }
    known = [f"{number(value)} {name}" for name, value in figures.items() if value is not None]
    if reported.acceptance is not None:
        counts = f"{number(reported.accepted, 0)} of {number(reported.drafted, 0)} drafted tokens accepted"
        known.insert(0, f"{counts} ({percent(reported.acceptance)})")
    return f"{reported.engine}: {', '.join(known) or 'no figures'}."


def conclusions(reported: EngineStatistics) -> Iterator[str]:
    """Yield the break-even cost, the diagnoses, and a missing figure."""
    tokens = reported.tokens_per_step
    if tokens is None and not reported.drafted:
        yield "The log reports no drafts: turn speculative decoding on, and save it again."
        return
    if tokens is not None:
        yield f"Speculation gains if drafting and verification cost less than {tokens:.2f} autoregressive steps."
    for diagnosis in DIAGNOSES:
        if text := diagnosis.explain(reported):
            yield f"{text} ({diagnosis.name}: {diagnosis.thresholds}; from {diagnosis.fields})"
    if reported.ar_tokens_per_second is None:
        yield "Measure and enter the tokens per second without drafts: they give the cost of a step."
