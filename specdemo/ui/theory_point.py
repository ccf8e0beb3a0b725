"""A run as the closed forms see it: the one point that it is on each of their curves.

The plain lane is the unit of all costs, so without one only what needs no clock is known. Knows traces, not gradio.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.core.theory import expected_tokens, speedup, walltime_improvement
from specdemo.ui.frames import Run
from specdemo.ui.labels import PLAIN, SPEC, Lane
from specdemo.ui.labels import speedup as measured_speedup


@dataclass(frozen=True)
class TheoryPoint:
    """What was measured; costs are in plain steps, and None where no plain lane was measured."""

    method: str
    temperature: float
    alpha: float  # the chance that a tested token is kept
    counted: bool  # whether alpha is accepted / tested, or else the mean of sum min(p, q), which is steadier
    share: float  # accepted / drafted
    gamma: float  # drafted per round, on average
    tokens: float  # per target pass
    chains: bool  # whether every draft was one, as the closed forms take it
    c: float | None
    v: float | None
    o: float | None
    speedup: float | None
    c_hat: float | None  # operations of a drafted token over the target's; None where the weights do not tell
    operations: float | None  # per token, over plain decoding's

    @property
    def theorem(self) -> float | None:
        """What Theorem 3.8 makes of its alpha, gamma and c."""
        return None if self.c is None else walltime_improvement(self.alpha, self.gamma, self.c)

    @property
    def model(self) -> float | None:
        """What the cost model makes of its alpha, gamma, c, v and o."""
        if self.c is None or self.v is None or self.o is None:
            return None
        return speedup(expected_tokens(self.alpha, self.gamma), self.gamma, self.c, self.v, self.o)


def point_of(run: Run | None) -> TheoryPoint:
    """The point of a run that has ended. `UserError` says why there is none."""
    if run is None:
        raise UserError("Nothing has been run yet: press Run, and its point appears on every curve")
    if not run.over:
        raise UserError("A run is under way: look here again when it has ended")
    lane = run.lanes.get(SPEC)
    if lane is None:
        raise UserError("The latest run was plain decoding: choose another method to have a point on these curves")
    m = lane.metrics.as_dict()
    if not m["tested"] or not m["tokens_per_target_pass"]:
        raise UserError("The latest run had nothing tested: these curves are about drafts")
    rounds = m["steps"] - 1
    gamma, tokens = m["drafted"] / rounds, m["tokens_per_target_pass"]
    c = v = o = None
    plain = run.lanes.get(PLAIN)
    if plain and plain.ended and plain.metrics.steps > 1 and plain.metrics.decode_s:
        step = plain.metrics.decode_s / (plain.metrics.steps - 1)
        c = m["draft_s"] / m["drafted"] / step
        v, o = (m[part] / rounds / step for part in ("verify_s", "host_s"))
    c_hat = _operations_of_a_draft(lane)
    counted = lane.recipe.get("rule", "rejection") != "rejection"  # others do not accept with min(1, p / q)
    return TheoryPoint(
        method=lane.recipe["method"],
        temperature=lane.recipe["temperature"],
        alpha=m["alpha" if counted else "mean_beta"],
        counted=counted,
        share=m["acceptance_rate"],
        gamma=gamma,
        tokens=tokens,
        chains=all(Draft((), tuple(line["parents"])).is_chain for line in lane.lines if "i" in line),
        c=c,
        v=v,
        o=o,
        speedup=measured_speedup(run.lanes),
        c_hat=c_hat,
        operations=None if c_hat is None else (1 + gamma * (1 + c_hat)) / tokens,
    )


def _operations_of_a_draft(lane: Lane) -> float | None:
    """By the weights that are read for one, where both models are stored alike; point masses take none."""
    steps = [line for line in lane.lines if "i" in line]
    modelled = sum(len(line["q"] or ()) for line in steps)
    if not modelled:
        return 0.0
    sizes, recipe = lane.lines[0]["environment"], lane.recipe
    small, large = sizes.get("drafter_bytes"), sizes.get("target_bytes")
    if not small or not large or recipe.get("quantization") != recipe.get("drafter_quantization"):
        return None
    return small / large * modelled / sum(len(line["draft"]) for line in steps)


def point_words(point: TheoryPoint) -> str:
    """The point in a few sentences of Markdown, measured beside expected."""
    how = "accepted / tested under its rule" if point.counted else "the mean of Σ min(p, q) over all tests"
    told = [
        f"**This run** ({point.method}): α = {point.alpha:.3f}, {how}; accepted / drafted = {point.share:.3f}; "
        f"γ = {point.gamma:.2f} drafted per round.",
        f"A pass gave **{point.tokens:.2f}** tokens; theory expects {expected_tokens(point.alpha, point.gamma):.2f}.",
    ]
    if point.c is None:
        told.append(
            "No plain run was measured beside it, so its c, v, o and its speed-up are not known: tick *Compare* and "
            "run again."
        )
    else:
        told.append(
            f"In plain steps, a drafted token took c = {point.c:.3f}, a verifying pass v = {point.v:.2f}, the rest of "
            f"a round o = {point.o:.2f}."
        )
    if point.speedup is not None:
        told.append(
            f"It was **{point.speedup:.2f}×** as fast as plain decoding; Theorem 3.8 expects {point.theorem:.2f}×, "
            f"with v and o {point.model:.2f}×."
        )
    if not point.chains:
        told.append("Its drafts were trees, whose nodes γ counts: the curves are for chains, so it may lie off them.")
    return " ".join(told)
