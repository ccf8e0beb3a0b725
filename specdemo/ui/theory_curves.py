"""Closed forms at the coefficients of sliders and runs, and their plots in the Theory tab."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specdemo.core import theory
from specdemo.core.errors import UserError
from specdemo.ui.charts import Series, chart
from specdemo.ui.frames import Run
from specdemo.ui.lane import PLAIN, SPEC, Lane
from specdemo.ui.run_estimate import cost_terms
from specdemo.ui.run_figures import lane_speedup

UNKNOWN = math.nan


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of the closed forms, by default those of the sliders. Costs are in AR steps."""

    alpha: float = 0.8  # acceptance rate of tested tokens
    c: float = 0.05
    gamma: float = 5
    v: float = 1.0  # cost of a pass over gamma + 1 rows
    o: float = 0.0
    c_hat: float = 0.05

    def at_gamma(self, gamma: float) -> Coefficients:
        """Return the coefficients at another draft length. Above 1, v is linear in the number of rows."""
        v = 1 + (self.v - 1) * gamma / self.gamma if self.v > 1 else self.v
        return replace(self, gamma=gamma, v=v if gamma else 1.0)

    @property
    def speedup(self) -> float:
        """Speed-up with v and o."""
        tokens = theory.expected_tokens(self.alpha, self.gamma)
        return theory.speedup(tokens, self.gamma, self.c, self.v, self.o) if self.gamma else 1.0

    def best_gamma(self, longest: int) -> int:
        return theory.best_gamma(self.alpha, self.c, longest, lambda rows: self.at_gamma(rows - 1).v, self.o)


@dataclass(frozen=True)
class TheoryPoint:
    """Measured coefficients and figures of a run. Without an AR baseline, costs and speed-up are unknown."""

    lane: Lane
    coefficients: Coefficients
    share: float  # accepted / drafted
    tokens: float  # tokens per target pass
    speedup: float
    operations: float  # operations per token, relative to AR decoding

    @property
    def chains(self) -> bool:
        """True if all drafts were chains, as the closed forms assume."""
        return all(event.step.draft.is_chain for event in self.lane.steps)


def point_of(run: Run | None) -> TheoryPoint:
    """Return the point of a finished run. Raises `UserError` without draft tokens."""
    if run is None:
        raise UserError("No run available: press Run, and its point appears on every curve")
    if not run.over:
        raise UserError("A run is in progress: return when it has ended")
    lane = run.lanes.get(SPEC)
    if lane is None:
        raise UserError("The last run was AR decoding: choose another method to get a point on these curves")
    m = lane.metrics
    if lane.acceptance is None or m.acceptance_rate is None or not m.tokens_per_step:
        raise UserError("The last run tested no draft tokens: choose a method or prompt that drafts")
    gamma, c_hat = m.drafted / m.decode_steps, _draft_operations(lane)
    measured = Coefficients(lane.acceptance, UNKNOWN, gamma, UNKNOWN, UNKNOWN, c_hat)
    baseline = run.lanes.get(PLAIN)
    if baseline and baseline.ended and (terms := cost_terms(m, baseline.metrics)):
        measured = replace(measured, c=terms.c, v=terms.v, o=terms.o)
    speedup = lane_speedup(run.lanes)
    operations = (1 + gamma * (1 + c_hat)) / m.tokens_per_step
    known = UNKNOWN if speedup is None else speedup
    return TheoryPoint(lane, measured, m.acceptance_rate, m.tokens_per_step, known, operations)


def _draft_operations(lane: Lane) -> float:
    """Ratio of the weights read per token, if both models have the same format; point masses are free."""
    drafts = [event.step.draft for event in lane.steps]
    sampled = sum(len(draft.token_probs or ()) for draft in drafts)
    if not sampled:
        return 0.0
    small, large = lane.environment.get("drafter_bytes"), lane.environment.get("target_bytes")
    if not small or not large or lane.recipe.get("quantization") != lane.recipe.get("drafter_quantization"):
        return UNKNOWN
    return small / large * sampled / sum(map(len, drafts))


Form = Callable[[Coefficients], float]

_AXES: Mapping[str, tuple[str, Sequence[float]]] = {
    "alpha": ("α", [i / 50 for i in range(51)]),
    "gamma": ("γ", range(17)),
}
_SHADES = [f"var(--curve-{i})" for i in (1, 2, 3, 5, 4)]
_LONGEST = 20  # greatest best draft length of a plot
_MOST_TOKENS = 11  # tokens per pass of an unbounded draft in a plot
_THEOREM = {"v": 1.0, "o": 0.0}


def _tokens(at: Coefficients) -> float:
    tokens = theory.expected_tokens(at.alpha, at.gamma)
    return tokens if at.gamma < math.inf or tokens <= _MOST_TOKENS else UNKNOWN


@dataclass(frozen=True)
class TheoryPlot:
    """Form over α or γ at changed coefficients and at those of the sliders; sliders and run are dots."""

    title: str
    x: str  # key of `_AXES`
    y: str
    form: Form
    measured: Callable[[TheoryPoint], float]
    curves: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # changed coefficients by label
    level: tuple[str, Form] | None = None  # to compare with, and its label
    dot: Form | None = None  # of the sliders; by default on their curve

    def chart(self, elem_id: str, at: Coefficients, run: TheoryPoint | None) -> str:
        axis, xs = _AXES[self.x]
        series = [
            Series("line", shade, self._points(self.form, xs, at, **changes), label)
            for (label, changes), shade in zip(self.curves.items(), _SHADES, strict=False)
        ]
        if self.level:
            label, level = self.level
            series.append(Series("line", "var(--curve-baseline)", self._points(level, xs, at), label))
        series.append(Series("line", "var(--curve-set)", self._points(self.form, xs, at)))
        chosen = self._points(self.dot or self.form, [getattr(at, self.x)], at)
        series.append(Series("dot", "var(--dot-set)", chosen, "sliders"))
        if run and not math.isnan(self.measured(run)):
            point = getattr(run.coefficients, self.x), self.measured(run)
            series.append(Series("dot", "var(--dot-run)", [point], "this run"))
        return chart(self.title, axis, self.y, series, elem_id=elem_id)

    def _points(self, form: Form, xs: Sequence[float], at: Coefficients, **changes: float) -> list[tuple[float, float]]:
        points = []
        for x in xs:
            changed = {"gamma": at.gamma, **changes, self.x: x}
            gamma = changed.pop("gamma")
            points.append((x, form(replace(at, **changed).at_gamma(gamma))))
        return [(x, y) for x, y in points if not math.isnan(y)]


def _family(symbol: str, name: str, *values: float, **changes: float) -> dict[str, dict[str, float]]:
    return {f"{symbol} {value:g}".replace("inf", "∞"): {name: value, **changes} for value in values}


_BASELINE = ("", lambda at: 1.0)
# Figures of 2211.17192: 2 (tokens), 3 (best gamma), 4 (speed-up and operations). Keys are element ids.
THEORY_PLOTS: Mapping[str, TheoryPlot] = {
    "plot-tokens": TheoryPlot(
        "Tokens per target pass", "alpha", "tokens", _tokens, lambda run: run.tokens,
        curves=_family("γ", "gamma", 1, 3, 5, 7, math.inf),
    ),
    "plot-speed": TheoryPlot(
        "Speed-up", "alpha", "speed-up", lambda at: at.speedup, lambda run: run.speedup,
        curves=_family("γ", "gamma", 1, 3, 10, **_THEOREM), level=_BASELINE,
    ),
    "plot-gamma": TheoryPlot(
        "Speed-up by draft length", "gamma", "speed-up", lambda at: at.speedup, lambda run: run.speedup,
        curves={"Theorem 3.8": _THEOREM}, level=_BASELINE,
    ),
    "plot-best": TheoryPlot(
        "Best draft length", "alpha", "γ", lambda at: at.best_gamma(_LONGEST),
        lambda run: min(run.coefficients.gamma, _LONGEST),
        curves=_family("c", "c", 0.01, 0.05, 0.2, **_THEOREM), dot=lambda at: at.gamma,
    ),
    "plot-ops": TheoryPlot(
        "Operations per token", "alpha", "× baseline", lambda at: theory.operations(at.alpha, at.gamma, at.c_hat),
        lambda run: run.operations, curves=_family("γ", "gamma", 1, 3, 10),
    ),
    "plot-share": TheoryPlot(
        "α and accepted / drafted", "gamma", "share",
        lambda at: theory.accepted_share(at.alpha, at.gamma) if at.gamma else UNKNOWN,
        lambda run: run.share, level=("α", lambda at: at.alpha),
    ),
}  # fmt: skip
