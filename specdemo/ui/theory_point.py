"""Measurements of a run in the terms of the closed forms: its point on the theory curves."""

from __future__ import annotations

from dataclasses import dataclass

from specdemo.core.errors import UserError
from specdemo.core.step import Step
from specdemo.core.theory import expected_tokens, speedup, walltime_improvement
from specdemo.ui.frames import Run
from specdemo.ui.labels import lane_speedup as measured_speedup
from specdemo.ui.lane import PLAIN, SPEC, Lane


@dataclass(frozen=True)
class TheoryPoint:
    """Measured coefficients. Costs are in AR steps, if an AR baseline was measured."""

    method: str
    temperature: float
    alpha: float  # acceptance probability of a tested token
    counted: bool  # alpha is accepted / tested (otherwise the mean of sum min(p, q), with lower variance)
    share: float  # accepted / drafted
    gamma: float  # mean draft tokens per step
    tokens: float  # per target pass
    chains: bool  # all drafts were chains, as the closed forms assume
    c: float | None
    v: float | None
    o: float | None
    speedup: float | None
    c_hat: float | None  # operations of a draft token / of a target token; if known
    operations: float | None  # per token, relative to AR decoding

    @property
    def theorem(self) -> float | None:
        return None if self.c is None else walltime_improvement(self.alpha, self.gamma, self.c)

    @property
    def model(self) -> float | None:
        if self.c is None or self.v is None or self.o is None:
            return None
        return speedup(expected_tokens(self.alpha, self.gamma), self.gamma, self.c, self.v, self.o)


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
    alpha = m.mean_beta if lane.recipe.get("rule", "rejection") == "rejection" else m.alpha
    tokens = m.tokens_per_target_pass
    if alpha is None or m.acceptance_rate is None or not tokens:
        raise UserError("The last run tested no draft tokens: choose a method or prompt that drafts")
    gamma = m.drafted / m.decode_steps
    c = v = o = None
    baseline = run.lanes.get(PLAIN)
    if baseline and baseline.ended and baseline.metrics.decode_steps and baseline.metrics.decode_s:
        ar_step = baseline.metrics.decode_s / baseline.metrics.decode_steps
        c = m.draft_s / m.drafted / ar_step
        v, o = (seconds / m.decode_steps / ar_step for seconds in (m.verify_s, m.host_s))
    steps = [event.step for event in lane.steps]
    c_hat = _draft_operations(lane, steps)
    return TheoryPoint(
        method=lane.recipe["method"],
        temperature=lane.recipe["temperature"],
        alpha=alpha,
        counted=lane.recipe.get("rule", "rejection") != "rejection",  # which accepts with min(1, p / q)
        share=m.acceptance_rate,
        gamma=gamma,
        tokens=tokens,
        chains=all(step.draft.is_chain for step in steps),
        c=c,
        v=v,
        o=o,
        speedup=measured_speedup(run.lanes),
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
    source = "accepted / tested under its rule" if point.counted else "the mean of Σ min(p, q) over all tests"
    sentences = [
        f"**This run** ({point.method}): α = {point.alpha:.3f}, {source}; accepted / drafted = {point.share:.3f}; "
        f"γ = {point.gamma:.2f} draft tokens per step.",
        f"A pass gave **{point.tokens:.2f}** tokens; theory predicts {expected_tokens(point.alpha, point.gamma):.2f}.",
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
