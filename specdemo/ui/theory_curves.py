"""Measurements of a run in the terms of the closed forms, with the curves and texts of the Theory tab.

A curve is a list of points (x, y, series). A point of None appears only in the legend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdemo.core import theory
from specdemo.core.errors import UserError
from specdemo.core.step import Step
from specdemo.ui.frames import Run
from specdemo.ui.lane import PLAIN, SPEC, Lane
from specdemo.ui.markdown import escape_markdown
from specdemo.ui.run_estimate import cost_terms
from specdemo.ui.summary import lane_speedup

SLIDER_SERIES, SLIDER_DOT = "sliders", "slider dot"
RUN_SERIES, BASELINE_SERIES = "this run", "baseline"
THEOREM_SERIES, SHARE_SERIES = "Theorem 3.8", "accepted / drafted"
CURVE_GAMMAS = (1, 3, 10)
TOKEN_GAMMAS = (1, 3, 5, 7)  # those of Figure 2
CURVE_COSTS = (0.01, 0.05, 0.2)
UNBOUNDED_SERIES = "∞"
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
_ALPHAS = [i / 50 for i in range(51)]

CurvePoint = tuple[float | None, float | None, str]


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


def token_curves(settings: TheorySettings, run: TheoryPoint | None) -> list[CurvePoint]:
    """Return the expected tokens per target pass (2211.17192, Figure 2)."""
    highest = max(11.0, settings.gamma + 1, run.tokens if run else 0)
    limit = [(alpha, 1 / (1 - alpha), UNBOUNDED_SERIES) for alpha in _ALPHAS[:-1] if 1 / (1 - alpha) <= highest]
    dots = _slider_curve(settings, theory.expected_tokens, run, run.tokens if run else None)
    return [*_over_alpha(theory.expected_tokens, TOKEN_GAMMAS), *limit, *dots]


def speed_curves(settings: TheorySettings, run: TheoryPoint | None) -> list[CurvePoint]:
    """Theorem 3.8 for `CURVE_GAMMAS`, cost model for the sliders (2211.17192, Figure 4)."""

    def modelled(alpha: float, gamma: float) -> float:
        return theory.speedup(theory.expected_tokens(alpha, gamma), gamma, settings.c, settings.v, settings.o)

    baseline = [(0.0, 1.0, BASELINE_SERIES), (1.0, 1.0, BASELINE_SERIES)]
    theorem = _over_alpha(lambda alpha, gamma: theory.walltime_improvement(alpha, gamma, settings.c))
    return [*baseline, *theorem, *_slider_curve(settings, modelled, run, run.speedup if run else None)]


def operation_curves(settings: TheorySettings, run: TheoryPoint | None) -> list[CurvePoint]:
    """Return the operations per token (2211.17192, Figure 4)."""
    factor = partial(theory.operations, c=settings.c_hat)
    return [*_over_alpha(factor), *_slider_curve(settings, factor, run, run.operations if run else None)]


def best_gamma_curves(settings: TheorySettings, run: TheoryPoint | None, longest: int = 20) -> list[CurvePoint]:
    """Theorem 3.8 for `CURVE_COSTS`, cost model for the sliders (2211.17192, Figure 3)."""
    modelled = partial(theory.best_gamma, c=settings.c, longest=longest, v=settings.verify_cost, o=settings.o)
    rows = [(alpha, theory.best_gamma(alpha, c, longest), str(c)) for c in CURVE_COSTS for alpha in _ALPHAS]
    rows += [(alpha, modelled(alpha), SLIDER_SERIES) for alpha in _ALPHAS]
    rows.append((settings.alpha, min(settings.gamma, longest), SLIDER_DOT))
    return [*rows, _run_dot(run.alpha if run else None, min(run.gamma, longest) if run else None)]


def gamma_curves(settings: TheorySettings, run: TheoryPoint | None) -> list[CurvePoint]:
    gammas, alpha = range(17), settings.alpha
    rows = [(0.0, 1.0, BASELINE_SERIES), (16.0, 1.0, BASELINE_SERIES)]
    rows += [(gamma, theory.walltime_improvement(alpha, gamma, settings.c), THEOREM_SERIES) for gamma in gammas]
    rows += [(gamma, settings.modelled_speedup(gamma), SLIDER_SERIES) for gamma in gammas]
    rows.append((settings.gamma, settings.modelled_speedup(settings.gamma), SLIDER_DOT))
    return [*rows, _run_dot(run.gamma if run else None, run.speedup if run else None)]


def share_curves(settings: TheorySettings, run: TheoryPoint | None) -> list[CurvePoint]:
    rows: list[CurvePoint] = [(gamma, settings.alpha, SLIDER_SERIES) for gamma in range(1, 17)]
    rows += [(gamma, theory.accepted_share(settings.alpha, gamma), SHARE_SERIES) for gamma in range(1, 17)]
    rows.append((settings.gamma, theory.accepted_share(settings.alpha, settings.gamma), SLIDER_DOT))
    return [*rows, _run_dot(run.gamma if run else None, run.share if run else None)]


def _over_alpha(value: Callable[[float, float], float], gammas: Sequence[int] = CURVE_GAMMAS) -> Iterator[CurvePoint]:
    return ((alpha, value(alpha, gamma), str(gamma)) for gamma in gammas for alpha in _ALPHAS)


def _slider_curve(
    settings: TheorySettings, value: Callable[[float, float], float], run: TheoryPoint | None, measured: float | None
) -> list[CurvePoint]:
    rows: list[CurvePoint] = [(alpha, value(alpha, settings.gamma), SLIDER_SERIES) for alpha in _ALPHAS]
    rows.append((settings.alpha, value(settings.alpha, settings.gamma), SLIDER_DOT))
    return [*rows, _run_dot(run.alpha if run else None, measured)]


def _run_dot(x: float | None, y: float | None) -> CurvePoint:
    return (None, None, RUN_SERIES) if x is None or y is None else (x, y, RUN_SERIES)


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
