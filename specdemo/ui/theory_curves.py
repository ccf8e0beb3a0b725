"""Measurements of a run in the terms of the closed forms, with the curves and texts of the Theory tab."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from specdemo.core import theory
from specdemo.core.errors import UserError
from specdemo.core.step import Step
from specdemo.ui.charts import Series, chart
from specdemo.ui.frames import Run
from specdemo.ui.lane import PLAIN, SPEC, Lane
from specdemo.ui.markdown import escape_markdown
from specdemo.ui.run_estimate import cost_terms
from specdemo.ui.summary import lane_speedup

SLIDERS = {  # label, minimum, maximum, step
    "alpha": ("α: acceptance rate", 0, 1, 0.01),
    "c": ("c: draft token (steps)", 0, 2, 0.01),
    "gamma": ("γ: draft length (tokens)", 1, 16, 1),
    "v": ("v: verification (steps)", 0.5, 5, 0.01),
    "o": ("o: overhead (steps)", 0, 2, 0.01),
    "c_hat": ("ĉ: draft operations", 0, 2, 0.01),
}
_NO_RULE_OF_THUMB = "The rule of thumb √(1/c − 1) is undefined at c = 0."
_MAX_GAMMA = 64


@dataclass(frozen=True)
class TheoryPoint:
    """Measured coefficients of a run. Costs are in AR steps, if an AR baseline was measured."""

    method: str
    temperature: float
    alpha: float  # acceptance rate of tested tokens
    counted: bool  # alpha is accepted / tested, otherwise the mean of sum min(p, q)
    share: float  # accepted / drafted
    gamma: float  # mean draft tokens per step
    tokens: float  # tokens per target pass
    chains: bool  # all drafts were chains, as the closed forms assume
    c: float | None
    v: float | None
    o: float | None
    speedup: float | None
    c_hat: float | None  # operations of a draft token / those of a target token; None if unknown
    operations: float | None  # operations per token, relative to AR decoding

    @property
    def theorem(self) -> float | None:
        return None if self.c is None else theory.walltime_improvement(self.alpha, self.gamma, self.c)

    @property
    def model(self) -> float | None:
        if self.c is None or self.v is None or self.o is None:
            return None
        return theory.speedup(theory.expected_tokens(self.alpha, self.gamma), self.gamma, self.c, self.v, self.o)


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
    tokens = m.tokens_per_step
    if lane.acceptance is None or m.acceptance_rate is None or not tokens:
        raise UserError("The last run tested no draft tokens: choose a method or prompt that drafts")
    gamma = m.drafted / m.decode_steps
    baseline = run.lanes.get(PLAIN)
    terms = cost_terms(m, baseline.metrics) if baseline and baseline.ended else None
    steps = [event.step for event in lane.steps]
    c_hat = _draft_operations(lane, steps)
    return TheoryPoint(
        method=lane.recipe["method"],
        temperature=lane.recipe["temperature"],
        alpha=lane.acceptance,
        counted=lane.counted,
        share=m.acceptance_rate,
        gamma=gamma,
        tokens=tokens,
        chains=all(step.draft.is_chain for step in steps),
        c=terms.c if terms else None,
        v=terms.v if terms else None,
        o=terms.o if terms else None,
        speedup=lane_speedup(run.lanes),
        c_hat=c_hat,
        operations=None if c_hat is None else (1 + gamma * (1 + c_hat)) / tokens,
    )


def _draft_operations(lane: Lane, steps: list[Step]) -> float | None:
    """Ratio of the weights read per token, if both models have the same format; point masses are free."""
    sampled = sum(len(step.draft.token_probs or ()) for step in steps)
    if not sampled:
        return 0.0
    small, large = lane.environment.get("drafter_bytes"), lane.environment.get("target_bytes")
    if not small or not large or lane.recipe.get("quantization") != lane.recipe.get("drafter_quantization"):
        return None
    return small / large * sampled / sum(len(step.draft) for step in steps)


def point_words(point: TheoryPoint) -> str:
    expected = theory.expected_tokens(point.alpha, point.gamma)
    source = "accepted / tested under its rule" if point.counted else "the mean overlap β = Σ min(p, q) of all tests"
    sentences = [
        f"**This run** ({escape_markdown(point.method)}): α = {point.alpha:.3f}, estimated by {source}; "
        f"accepted / drafted = {point.share:.3f}; "
        f"γ = {point.gamma:.2f} draft tokens per step.",
        f"A pass gave **{point.tokens:.2f}** tokens; theory predicts {expected:.2f}.",
    ]
    if point.c is None:
        sentences.append("Without an AR baseline c, v, o and the speed-up are unknown: tick *Compare* and run again.")
    else:
        sentences.append(
            f"In AR steps, a draft token took c = {point.c:.3f}, a verification pass v = {point.v:.2f}, and the host "
            f"o = {point.o:.2f} per step."
        )
    if point.speedup is not None:
        sentences.append(
            f"The run was **{point.speedup:.2f}×** as fast as AR decoding. Theorem 3.8 predicts {point.theorem:.2f}×, "
            f"with v and o {point.model:.2f}×."
        )
    if not point.chains:
        sentences.append("The drafts were trees, and γ counts their nodes: the curves for chains do not apply exactly.")
    return " ".join(sentences)


@dataclass(frozen=True)
class TheorySettings:
    """Values of the sliders. Costs are in baseline steps."""

    alpha: float = 0.8
    c: float = 0.05
    gamma: int = 5
    v: float = 1.0  # cost of a pass over gamma + 1 rows
    o: float = 0.0
    c_hat: float = 0.05

    def verify_cost(self, rows: float) -> float:
        """Interpolate v to any number of rows: linear above 1, constant below 1."""
        if rows == 1:
            return 1.0
        return 1 + (self.v - 1) * (rows - 1) / self.gamma if self.v > 1 else self.v

    def modelled_speedup(self, gamma: int) -> float:
        tokens = theory.expected_tokens(self.alpha, gamma)
        return theory.speedup(tokens, gamma, self.c, self.verify_cost(gamma + 1), self.o) if gamma else 1.0

    @property
    def best_gamma(self) -> int:
        return theory.best_gamma(self.alpha, self.c, _MAX_GAMMA, self.verify_cost, self.o)


def parse_settings(values: Sequence[Any]) -> TheorySettings | None:
    """Validate raw slider values; return None for incomplete numbers."""
    for value, (_, minimum, maximum, _) in zip(values, SLIDERS.values(), strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
            return None
    settings = dict(zip(SLIDERS, values, strict=True))
    return TheorySettings(**settings | {"gamma": round(settings["gamma"])})


def settings_from_run(run: TheoryPoint) -> TheorySettings:
    """Clamp measurements to the sliders; use defaults for missing measurements."""
    clamped = {}
    for name, (_, minimum, maximum, step) in SLIDERS.items():
        measured = getattr(run, name)
        if measured is not None:
            value = min(maximum, max(minimum, measured))
            clamped[name] = round(value) if step == 1 else round(value, 2)
    return TheorySettings(**clamped)


Curve = Callable[[TheorySettings, float], float | None]

_AXES: Mapping[str, tuple[str, Sequence[float]]] = {
    "alpha": ("α", [i / 50 for i in range(51)]),
    "gamma": ("γ", range(17)),
}
_SHADES = [f"var(--curve-{i})" for i in (1, 2, 3, 5, 4)]
_LONGEST = 20  # greatest best draft length of a plot


@dataclass(frozen=True)
class TheoryPlot:
    """Chart over α or γ, with the sliders' curve, and the values of sliders and run as dots."""

    elem_id: str
    title: str
    x: str  # key of `_AXES`, a slider and a measurement of the run
    y: str
    curves: Mapping[str, Curve]  # by label
    sliders: Curve
    measured: Callable[[TheoryPoint], float | None]
    dot: Curve | None = None  # value of the sliders; by default on their curve
    baseline: bool = False  # at 1

    def chart(self, settings: TheorySettings, run: TheoryPoint | None) -> str:
        axis, xs = _AXES[self.x]
        own = getattr(settings, self.x)
        series = [
            Series("line", shade, _points(curve, settings, xs), label)
            for (label, curve), shade in zip(self.curves.items(), _SHADES, strict=False)
        ]
        if self.baseline:
            series.append(Series("line", "var(--curve-baseline)", _points(lambda *_: 1.0, settings, xs)))
        series.append(Series("line", "var(--curve-set)", _points(self.sliders, settings, xs)))
        series.append(Series("dot", "var(--dot-set)", _points(self.dot or self.sliders, settings, [own]), "sliders"))
        measured = self.measured(run) if run else None
        if measured is not None:
            series.append(Series("dot", "var(--dot-run)", [(getattr(run, self.x), measured)], "this run"))
        return chart(self.title, axis, self.y, series)


def _points(curve: Curve, settings: TheorySettings, xs: Sequence[float]) -> list[tuple[float, float]]:
    points = [(x, curve(settings, x)) for x in xs]
    return [(x, y) for x, y in points if y is not None]


def _family(
    symbol: str, values: Sequence[float], formula: Callable[[float, TheorySettings, float], float]
) -> dict[str, Curve]:
    """Return a curve for each value of the first parameter of a formula."""
    return {f"{symbol} {value:g}": partial(formula, value) for value in values}


def _unbounded(settings: TheorySettings, alpha: float) -> float | None:
    """Return the tokens of an unbounded draft."""
    highest = max(11, settings.gamma + 1)
    return 1 / (1 - alpha) if 1 - alpha >= 1 / highest else None


# Figures of 2211.17192: 2 (tokens), 3 (best gamma), 4 (speed-up and operations).
THEORY_PLOTS = (
    TheoryPlot(
        "plot-tokens",
        "Tokens per target pass",
        x="alpha",
        y="tokens",
        curves=_family("γ", (1, 3, 5, 7), lambda gamma, s, alpha: theory.expected_tokens(alpha, gamma))
        | {"γ ∞": _unbounded},
        sliders=lambda s, alpha: theory.expected_tokens(alpha, s.gamma),
        measured=attrgetter("tokens"),
    ),
    TheoryPlot(
        "plot-speed",
        "Speed-up",
        x="alpha",
        y="speed-up",
        curves=_family("γ", (1, 3, 10), lambda gamma, s, alpha: theory.walltime_improvement(alpha, gamma, s.c)),
        sliders=lambda s, alpha: replace(s, alpha=alpha).modelled_speedup(s.gamma),
        measured=attrgetter("speedup"),
        baseline=True,
    ),
    TheoryPlot(
        "plot-gamma",
        "Speed-up by draft length",
        x="gamma",
        y="speed-up",
        curves={"Theorem 3.8": lambda s, gamma: theory.walltime_improvement(s.alpha, gamma, s.c)},
        sliders=lambda s, gamma: s.modelled_speedup(round(gamma)),
        measured=attrgetter("speedup"),
        baseline=True,
    ),
    TheoryPlot(
        "plot-best",
        "Best draft length",
        x="alpha",
        y="γ",
        curves=_family("c", (0.01, 0.05, 0.2), lambda c, s, alpha: theory.best_gamma(alpha, c, _LONGEST)),
        sliders=lambda s, alpha: theory.best_gamma(alpha, s.c, _LONGEST, s.verify_cost, s.o),
        measured=lambda run: min(run.gamma, _LONGEST),
        dot=lambda s, alpha: s.gamma,
    ),
    TheoryPlot(
        "plot-ops",
        "Operations per token",
        x="alpha",
        y="× baseline",
        curves=_family("γ", (1, 3, 10), lambda gamma, s, alpha: theory.operations(alpha, gamma, s.c_hat)),
        sliders=lambda s, alpha: theory.operations(alpha, s.gamma, s.c_hat),
        measured=attrgetter("operations"),
    ),
    TheoryPlot(
        "plot-share",
        "α and accepted / drafted",
        x="gamma",
        y="share",
        curves={"accepted / drafted": lambda s, gamma: theory.accepted_share(s.alpha, gamma) if gamma else None},
        sliders=lambda s, gamma: s.alpha,
        measured=attrgetter("share"),
        dot=lambda s, gamma: theory.accepted_share(s.alpha, gamma),
    ),
)


def describe_settings(settings: TheorySettings) -> str:
    alpha, c = settings.alpha, settings.c
    gamma = settings.gamma
    operations = theory.operations(alpha, gamma, settings.c_hat)
    best, theorem_best = settings.best_gamma, theory.best_gamma(alpha, c, _MAX_GAMMA)
    lines = [
        f"Expected tokens per step: **{theory.expected_tokens(alpha, gamma):.2f} tokens**, (1 − α^(γ+1)) / (1 − α). "
        f"Accepted / drafted: {theory.accepted_share(alpha, gamma):.2f}.",
        f"Speed-up: **{theory.walltime_improvement(alpha, gamma, c):.2f}×** by Theorem 3.8, "
        "(1 − α^(γ+1)) / ((1 − α)(γc + 1)). "
        f"With v and o: **{settings.modelled_speedup(gamma):.2f}×**, tokens / (v + γc + o).",
        f"Operations per token: **{operations:.2f}×** the baseline (Theorem 3.11). Memory accesses per token, for the "
        f"target's weights and KV cache: **{theory.memory_accesses(alpha, gamma):.2f}×** (section 3.4).",
        f"Best γ: **{_gamma_text(best)}** with v and o ({settings.modelled_speedup(best):.2f}×), "
        f"{_gamma_text(theorem_best)} by Theorem 3.8 ({theory.walltime_improvement(alpha, theorem_best, c):.2f}×). "
        + (f"The rule of thumb √(1/c − 1) = {theory.thumb_gamma(c):.1f} ignores α." if c else _NO_RULE_OF_THUMB),
    ]
    if theory.can_improve(alpha, c):
        lines.append(
            f"α > c: the best γ yields at least (1 + α) / (1 + c) = {theory.least_improvement(alpha, c):.2f}×. "
            "This bound requires v = 1 and o = 0 (Corollary 3.9)."
        )
    else:
        lines.append("α ≤ c: no γ improves the speed (Corollary 3.9). Use autoregressive decoding.")
    return "\n".join(f"- {line}" for line in lines)


def _gamma_text(gamma: int) -> str:
    return "0, the baseline" if not gamma else f"{gamma} or more" if gamma == _MAX_GAMMA else str(gamma)
