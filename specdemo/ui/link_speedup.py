"""The best draft length over a link: the closed form with what a run measured, beside what it did. No gradio."""

from __future__ import annotations

from dataclasses import dataclass

from specdemo.core.errors import UserError
from specdemo.core.theory import best_gamma_over, speedup_over
from specdemo.ui.labels import Lane
from specdemo.ui.link_metrics import steps, waited

LONGEST = 24  # tokens of a draft that is looked at for the best
CURVE, RUN, BEST = "S_net", "this run", "best k"


@dataclass(frozen=True)
class LinkModel:
    """What a round over the link is made of, on average, as the closed form takes it. Times in seconds."""

    alpha: float  # the chance that a tested token is kept
    gamma: float  # drafted per round
    token_s: float  # drafting one
    verify_s: float  # the cloud's pass, taken to cost the same at any length
    way_s: float  # from the question to the answer, but for the cloud's pass
    host_s: float
    measured: float | None  # tokens per second

    @property
    def c(self) -> float:
        """A drafted token in passes of the cloud."""
        return self.token_s / self.verify_s

    @property
    def r(self) -> float:
        """What a round has besides, in passes of the cloud."""
        return (self.way_s + self.host_s) / self.verify_s

    def speed(self, gamma: float) -> float:
        """S_net in tokens per second: E[tokens] / (1 + gamma c + r) over the time of a pass."""
        return speedup_over(self.alpha, gamma, self.c, self.r) / self.verify_s

    @property
    def best(self) -> int:
        """The draft length with the largest of these."""
        return best_gamma_over(self.alpha, self.c, self.r, LONGEST)


def link_of(lane: Lane) -> LinkModel:
    """From the rounds that the cloud answered in time. `UserError` says why there are none."""
    rounds = [line for line in steps(lane)[1:] if line["draft"] and len(list(waited(line))) > 1]
    m = lane.metrics.as_dict()
    counted = lane.recipe.get("rule", "rejection") != "rejection"  # others do not accept with min(1, p / q)
    alpha = m["alpha" if counted else "mean_beta"]
    drafted = sum(len(line["draft"]) for line in rounds)
    cloud = sum(line["remote"]["cloud_s"] for line in rounds)
    if alpha is None or not drafted or not cloud:
        raise UserError("No round of this run was drafted here and verified there: there is no best length to tell of")
    n = len(rounds)
    return LinkModel(
        alpha=alpha,
        gamma=drafted / n,
        token_s=sum(line["draft_s"] for line in rounds) / drafted,
        verify_s=cloud / n,
        way_s=sum(line["verify_s"] for line in rounds) / n - cloud / n,
        host_s=sum(line["host_s"] for line in rounds) / n,
        measured=m["tokens_per_second"],
    )


def curve(link: LinkModel) -> list[tuple[float, float | None, str]]:
    """S_net over k, the best one and the measured point."""
    rows: list[tuple[float, float | None, str]] = [(k, link.speed(k), CURVE) for k in range(LONGEST + 1)]
    return [*rows, (link.best, link.speed(link.best), BEST), (link.gamma, link.measured, RUN)]


def told(link: LinkModel) -> str:
    """The closed form beside what was measured, in Markdown."""
    best = f"{link.best} or more" if link.best == LONGEST else str(link.best)
    foretold = link.speed(link.gamma)
    beside = "" if not link.measured else f" (measured: {link.measured:.1f})"
    return (
        "S_net(k) = E[tokens] / (v + k c + RTT), E[tokens] = (1 − α^(k+1)) / (1 − α), with what this run measured: "
        f"α {link.alpha:.2f}; c, a drafted token, {1000 * link.token_s:.2f} ms; v, a pass of the cloud, "
        f"{1000 * link.verify_s:.2f} ms whatever k is; the way and the rest of a round "
        f"{1000 * (link.way_s + link.host_s):.2f} ms. Its own k of {link.gamma:.1f} gives {foretold:.1f} tokens per "
        f"second{beside}. **The best k is {best}**, with {link.speed(link.best):.1f}."
    )
