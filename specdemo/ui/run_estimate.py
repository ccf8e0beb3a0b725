"""Estimate of other draft lengths from the acceptance and the costs of a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specdemo.core.ledger import Ledger, one_row_seconds
from specdemo.core.metrics import Metrics
from specdemo.core.policies import CostModel, costs_at_load
from specdemo.core.simulate import other_gammas
from specdemo.core.theory import CostTerms, LengthEstimate
from specdemo.drafters import METHODS
from specdemo.ui.lane import LANES, Lane, mode, same_target

LONGEST_ESTIMATE = 8  # longest draft of the estimate, in tokens


@dataclass(frozen=True)
class RunEstimate:
    """Estimates of draft lengths beside the measured speed in tokens per second."""

    rows: Sequence[LengthEstimate]
    gamma: int | None  # draft length of the run, if fixed
    measured: float | None

    @property
    def fits(self) -> bool:
        """True if the run is within its own range."""
        own = [row for row in self.rows if row.gamma == self.gamma]
        return self.measured is None or all(row.low <= self.measured <= row.high for row in own)

    def as_dict(self) -> dict[str, Any]:
        rows = [(row.gamma, row.tokens_per_pass, row.speed, row.low, row.high) for row in self.rows]
        return {
            "rows": [[gamma, *(round(x, 3) for x in figures)] for gamma, *figures in rows],
            "gamma": self.gamma,
            "measured": self.measured,
            "fits": self.fits,
            "better": self.better and self.better.gamma,
        }

    @property
    def better(self) -> LengthEstimate | None:
        """Fastest other draft length, if its whole range is above the measured speed."""
        best = max(self.rows, key=lambda row: row.speed)
        if not self.fits or self.measured is None or best.gamma == self.gamma:
            return None
        return best if best.low > self.measured else None


@lru_cache(maxsize=len(LANES))  # headline, verdict and chart use it
def estimate_lengths(lane: Lane, baseline: Lane | None = None) -> RunEstimate | str:
    """Return the estimate for an ended lane, or the obstacle in words."""
    method = METHODS.get(lane.recipe["method"])
    if not lane.timed:
        return "The engine does not report the durations of its steps."
    if method and not method.drafts:
        return "This run did not draft."
    plain = baseline if baseline is not None and _comparable(lane, baseline) else None
    terms = cost_terms(lane.metrics, plain.metrics) if plain else None
    cost = costs_at_load(lane.environment)  # otherwise a line through the costs of this comparison
    if not cost and terms:
        cost = CostModel({1: 1.0, 1 + max(1, round(terms.drafted)): terms.v})
    if not cost:
        return "The trace does not contain the cost of passes over several rows."
    steps = [event.step for event in lane.steps]
    longest = LONGEST_ESTIMATE
    if method and method.copies and not method.sampled:  # drafts end with the known context
        longest = max((len(step.draft) for step in steps), default=0)
    gamma = lane.recipe["gamma"] if lane.recipe.get("policy", "fixed") == "fixed" else None
    lengths = sorted({*range(longest + 1), *([gamma] if gamma else [])})
    plain_steps = [event.step for event in plain.steps] if plain else []
    try:
        rows = other_gammas([steps], lengths, cost.verify, plain_steps, counted=lane.counted)
    except ValueError:
        return "The drafts are trees: other draft lengths cannot be estimated from them."
    if not rows:
        return "No draft token was tested in this run."
    return RunEstimate(rows, gamma, lane.metrics.tokens_per_second)


def lane_ledger(lane: Lane, baseline: Lane | None = None) -> Ledger | None:
    """Return the ledger of a lane; passes of a comparable `baseline` split its passes."""
    if not lane.timed:
        return None
    steps = [event.step for event in lane.steps]
    plain = baseline.steps if baseline is not None and _comparable(lane, baseline) else ()
    return Ledger.of(steps, one_row_seconds(steps, lane.environment, [event.step for event in plain]))


def cost_terms(spec: Metrics, baseline: Metrics) -> CostTerms | None:
    """Return the costs of a step in AR steps; None without a measured step of either, or if they are unknown."""
    if not (spec.decode_steps and baseline.decode_steps and baseline.decode_s):
        return None
    if spec.draft_s is None or spec.verify_s is None or spec.host_s is None:
        return None
    counts = {"drafted": spec.drafted, "steps": spec.decode_steps}
    pass_s = baseline.decode_s / baseline.decode_steps
    return CostTerms.of(spec.draft_s, spec.verify_s, spec.host_s, **counts, pass_s=pass_s)


def _comparable(lane: Lane, baseline: Lane) -> bool:
    return same_target(lane, baseline) and baseline.metrics.decode_steps > 0 and not mode(lane.recipe)
