"""Best draft length over a link: the closed form with measured coefficients."""

from __future__ import annotations

from dataclasses import dataclass

from specdemo.core.errors import UserError
from specdemo.core.theory import best_gamma_over, speedup_over
from specdemo.ui.lane import Lane
from specdemo.ui.link_metrics import steps, waited

LONGEST = 24  # draft tokens of the search
CURVE, RUN, BEST = "S_net", "this run", "best k"


@dataclass(frozen=True)
class LinkModel:
    """Mean coefficients of a step over the link; times in seconds."""

    alpha: float  # acceptance probability of a tested token
    gamma: float  # draft tokens per step
    token_s: float  # per draft token
    verify_s: float  # cloud's pass, assumed independent of the draft length
    way_s: float  # from request to response, without the cloud's pass
    host_s: float
    measured: float | None  # tokens per second

    @property
    def c(self) -> float:
        """Cost of a draft token, in cloud passes."""
        return self.token_s / self.verify_s

    @property
    def r(self) -> float:
        """Link and host time per step, in cloud passes."""
        return (self.way_s + self.host_s) / self.verify_s

    def speed(self, gamma: float) -> float:
        """S_net in tokens per second: E[tokens] / (1 + gamma c + r) / verify_s."""
        return speedup_over(self.alpha, gamma, self.c, self.r) / self.verify_s

    @property
    def best(self) -> int:
        return best_gamma_over(self.alpha, self.c, self.r, LONGEST)


def link_of(lane: Lane) -> LinkModel:
    """Average the steps that the cloud verified in time. Raises `UserError` without such steps."""
    verified = [step for step in steps(lane)[1:] if step.draft.tokens and len(list(waited(step))) > 1]
    m = lane.metrics
    # other rules do not accept with min(1, p / q)
    alpha = m.mean_beta if lane.recipe.get("rule", "rejection") == "rejection" else m.alpha
    drafted = sum(len(step.draft) for step in verified)
    cloud = sum(step.verdict.notes["cloud_s"] for step in verified)
    if alpha is None or not drafted or not cloud:
        raise UserError("The cloud verified no draft of this run in time, so there is no best length to compute")
    n = len(verified)
    return LinkModel(
        alpha=alpha,
        gamma=drafted / n,
        token_s=sum(step.draft_s for step in verified) / drafted,
        verify_s=cloud / n,
        way_s=sum(step.verify_s for step in verified) / n - cloud / n,
        host_s=sum(step.host_s for step in verified) / n,
        measured=m.tokens_per_second,
    )


def curve(link: LinkModel) -> list[tuple[float, float | None, str]]:
    rows: list[tuple[float, float | None, str]] = [(k, link.speed(k), CURVE) for k in range(LONGEST + 1)]
    return [*rows, (link.best, link.speed(link.best), BEST), (link.gamma, link.measured, RUN)]


def describe_best_gamma(link: LinkModel) -> str:
    best = f"{link.best} or more" if link.best == LONGEST else str(link.best)
    measured = "" if not link.measured else f" (measured: {link.measured:.1f})"
    return (
        "S_net(k) = E[tokens] / (v + k c + RTT), E[tokens] = (1 − α^(k+1)) / (1 − α). Measured in this run: "
        f"α {link.alpha:.2f}; c, a draft token, {1000 * link.token_s:.2f} ms; v, a cloud pass, "
        f"{1000 * link.verify_s:.2f} ms for any k; link and host {1000 * (link.way_s + link.host_s):.2f} ms per step. "
        f"The run's k of {link.gamma:.1f} predicts {link.speed(link.gamma):.1f} tokens per second{measured}. "
        f"**The best k is {best}**, with {link.speed(link.best):.1f}."
    )
