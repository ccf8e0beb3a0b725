"""Draft-length policies: may this draft grow?

Knows steps and raw draft logits; knows nothing of models, text or devices. Every policy is asked before a token is
drawn, so none of them can bias the text. A drafter without a law of its own gives no logits: policies that read them
then allow as much as they ever do.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specdemo.core.step import Step


@dataclass(frozen=True)
class CostModel:
    """What is known of costs before a run, in passes of the target over one row."""

    passes: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})  # v(n): a pass over n rows, for some n
    token: float = 0.0  # c: a drafted token, as a first guess

    def verify(self, rows: int) -> float:
        """v(rows), on a line between what is known, and beyond it as the last line goes on.

        More rows never cost less, and whatever disturbs a measurement makes it longer: so the lower one is believed.
        """
        known = sorted(self.passes.items())
        right = [(n, max(1.0, min(cost for _, cost in known[i:]))) for i, (n, _) in enumerate(known)]
        if len(right) == 1:
            return right[0][1]
        pairs = list(zip(right, right[1:], strict=False))
        (a, low), (b, high) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return low + (high - low) * (rows - a) / (b - a)


@dataclass
class Auto:
    """The gamma with the most expected tokens per second, from acceptance by position and times measured as it runs.

    Expected tokens of a draft of k are 1 + a_1 + a_1 a_2 + ..., a_i the acceptance at position i; the time is k drafted
    tokens and a pass over k + 1 rows. How that pass compares with a plain one is a property of model and machine and
    comes with the prices; what a drafted token costs is the median of the latest rounds, as one slow round says
    nothing. Acceptance is that of all positions until a position has been seen often enough, and a guess until any has;
    it fades, so it follows the text. Where no draft pays clearly it drafts nothing, and looks again now and then.
    """

    needs_logits = False

    most: int
    prices: CostModel = field(default_factory=CostModel)
    guess: float = 0.7  # acceptance before anything is known
    trust: float = 12.0  # tests that weigh as much as what was believed before them
    fade: float = 0.95  # what an earlier test of that position still weighs after the next one
    gain: float = 1.06  # what drafting must promise over plain decoding: a try costs more than it tells
    rest: tuple[int, int] = (64, 256)  # plain rounds before it looks again: at first, and at most

    def __post_init__(self) -> None:
        self._verify = [self.prices.verify(rows) for rows in range(1, self.most + 2)]
        self._tested, self._accepted = [0.0] * self.most, [0.0] * self.most
        self._draft_s: deque[float] = deque(maxlen=15)  # seconds of a drafted token,
        self._plain_s: deque[float] = deque(maxlen=15)  # and of a plain pass, by round
        self._begun = False
        self._idle, self._wait = 0, self.rest[0]
        self.gamma = self._best()

    @property
    def notes(self) -> dict[str, float]:
        """Acceptance at the first position and the cost of a drafted token, as they are believed."""
        return {"auto_a1": self._acceptances()[0], "auto_c": self._c}

    def may_extend(self, n: int, logits: Any) -> bool:
        """Up to the best gamma."""
        return n < self.gamma

    def observe(self, step: Step) -> None:
        """Learn from the round, then choose for the next one."""
        if step.i == 0:
            return  # the prefill: its time says nothing of a round's
        drafted, kept = len(step.draft), len(step.verdict.accepted)
        self._plain_s.append(step.verify_s / self._verify[min(drafted, self.most)])
        if drafted:
            if self._begun:  # a drafter reads the prompt in its first round
                self._draft_s.append(step.draft_s / drafted)
            self._begun = True
        for i in range(min(self.most, kept + (step.kind == "correction"))):
            self._tested[i] = self.fade * self._tested[i] + 1
            self._accepted[i] = self.fade * self._accepted[i] + _chance(step, i)
        self._idle = 0 if drafted else self._idle + 1
        self.gamma = self._best()
        if self.gamma:
            self._wait = self.rest[0]
        elif self._idle >= self._wait:
            self.gamma, self._wait = 1, min(2 * self._wait, self.rest[1])

    @property
    def _c(self) -> float:
        """A drafted token's time over a plain pass's."""
        if not self._draft_s:
            return self.prices.token
        return statistics.median(self._draft_s) / max(statistics.median(self._plain_s), 1e-9)

    def _acceptances(self) -> list[float]:
        """By position."""
        trust = self.trust
        overall = (sum(self._accepted) + trust * self.guess) / (sum(self._tested) + trust)
        return [
            (accepted + trust * overall) / (tested + trust)
            for tested, accepted in zip(self._tested, self._accepted, strict=True)
        ]

    def _best(self) -> int:
        """The draft length with the most expected tokens per second."""
        c = self._c
        best, most = 0, self.gain / self._verify[0]
        expected, path = 1.0, 1.0
        for k, acceptance in enumerate(self._acceptances(), 1):
            path *= acceptance
            expected += path
            rate = expected / (self._verify[k] + c * k)
            if rate > most:
                best, most = k, rate
        return best


def _chance(step: Step, position: int) -> float:
    """Whether something was accepted there; where a coin was thrown for it, how likely that was, which says more."""
    verdict = step.verdict
    if step.draft.is_chain and verdict.draw and verdict.draw[position] is not None:
        return verdict.beta[position] or 0.0
    return float(position < len(verdict.accepted))


class PolicyDefaults:
    """What most policies have in common: nothing to look at, to learn or to tell."""

    needs_logits = False

    @property
    def notes(self) -> dict[str, float]:
        """What the trace should know of this round's decision."""
        return {}

    def observe(self, step: Step) -> None:
        """Nothing to learn."""


@dataclass
class Fixed(PolicyDefaults):
    """Always gamma tokens (Leviathan et al. 2211.17192, Algorithm 1)."""

    gamma: int

    def may_extend(self, n: int, logits: Any) -> bool:
        """Up to gamma."""
        return n < self.gamma


@dataclass
class Dynamic(PolicyDefaults):
    """One longer after a round of which much was accepted, one shorter after one of which little was.

    The thresholds are the practice guide's: 0.8 and 0.4 of what was drafted.
    """

    gamma: int
    least: int
    most: int

    def may_extend(self, n: int, logits: Any) -> bool:
        """Up to the gamma of this round."""
        return n < self.gamma

    def observe(self, step: Step) -> None:
        """Step by one towards what the round called for."""
        if step.draft.tokens:
            share = len(step.verdict.accepted) / len(step.draft)
            change = (share >= 0.8) - (share <= 0.4)
            self.gamma = min(self.most, max(self.least, self.gamma + change))


@dataclass
class Heuristic(PolicyDefaults):
    """Two longer after a full accept, one shorter after anything else: the heuristic schedule of transformers."""

    gamma: int
    most: int

    def may_extend(self, n: int, logits: Any) -> bool:
        """Up to the gamma of this round."""
        return n < self.gamma

    def observe(self, step: Step) -> None:
        """Grow or shrink; a round that the text's end cut short says nothing."""
        if step.draft.tokens:
            full = len(step.verdict.accepted) == len(step.draft)
            self.gamma = min(self.most, self.gamma + 2) if full else max(1, self.gamma - 1)


@dataclass
class Egag(PolicyDefaults):
    """Entropy-guided adaptive gamma: short drafts where the drafter is unsure.

    H_norm = H(q) / ln V of the raw draft logits, smoothed over tokens with weight `beta` on what was; a draft may grow
    to round(least + (most - least)(1 - H_norm)) tokens, asked anew before each of them.
    """

    needs_logits = True

    least: int
    most: int
    beta: float = 0.5
    now: float = 0.0
    smooth: float | None = None

    @property
    def gamma(self) -> int:
        """The longest draft there can be."""
        return self.most

    @property
    def called_for(self) -> int:
        """The draft length that the entropy calls for."""
        return round(self.least + (self.most - self.least) * (1 - (self.smooth or 0.0)))

    @property
    def notes(self) -> dict[str, float]:
        """The normalised entropy last seen, smoothed, and the gamma it called for."""
        return {} if self.smooth is None else {"h_norm": self.now, "h_norm_ema": self.smooth, "gamma": self.called_for}

    def may_extend(self, n: int, logits: Any) -> bool:
        """Up to gamma, read from the law of the token that would be drawn next."""
        if logits is not None:
            self.now = entropy(logits) / math.log(logits.shape[-1])
            self.smooth = self.now if self.smooth is None else self.beta * self.smooth + (1 - self.beta) * self.now
        return n < self.called_for


@dataclass
class ThresholdPolicy(PolicyDefaults):
    """End a draft where a bound on the chance of acceptance falls below a threshold."""

    needs_logits = True

    gamma: int  # the longest draft
    is_confident: Callable[[Any], bool]

    def may_extend(self, n: int, logits: Any) -> bool:
        """Up to gamma, while the drafter is sure of the next token."""
        return n < self.gamma and (logits is None or self.is_confident(logits))


def svip(gamma: int, threshold: float = 0.3) -> ThresholdPolicy:
    """SVIP (2411.18462): stop where sqrt(0.15 H) is above a threshold."""
    return ThresholdPolicy(gamma, lambda logits: math.sqrt(0.15 * entropy(logits)) <= threshold)


def confidence(gamma: int, threshold: float = 0.4) -> ThresholdPolicy:
    """Stop where no token has a probability of `threshold`: as transformers' assistants do, asked before drawing."""
    return ThresholdPolicy(gamma, lambda logits: largest(logits) >= threshold)


@dataclass
class AdaEdl(PolicyDefaults):
    """AdaEDL (2410.18351): stop where 1 - sqrt(0.2 H), a lower bound on acceptance, is below lambda.

    Lambda follows what was accepted: it falls while drafts do better than `aim` and rises while they do worse.
    """

    needs_logits = True

    gamma: int
    aim: float = 0.9
    rate: float = 0.5  # weight of what was accepted before
    step: float = 0.01
    threshold: float = 0.4
    accepted: float | None = None

    @property
    def notes(self) -> dict[str, float]:
        """The threshold of this round."""
        return {"lambda": self.threshold}

    def may_extend(self, n: int, logits: Any) -> bool:
        """Up to gamma, while the bound holds."""
        return n < self.gamma and (logits is None or 1 - math.sqrt(0.2 * entropy(logits)) >= self.threshold)

    def observe(self, step: Step) -> None:
        """Move the threshold against the smoothed acceptance rate."""
        if step.draft.tokens:
            now = len(step.verdict.accepted) / len(step.draft)
            self.accepted = now if self.accepted is None else self.rate * self.accepted + (1 - self.rate) * now
            change = self.step if self.accepted < self.aim else -self.step
            self.threshold = min(1.0, max(0.0, self.threshold + change))


@dataclass
class PathProbability(PolicyDefaults):
    """Stop where the most probable continuation has become improbable: the product of its probabilities so far."""

    needs_logits = True

    gamma: int
    threshold: float = 0.2
    product: float = 1.0

    def may_extend(self, n: int, logits: Any) -> bool:
        """Up to gamma, while the product holds."""
        if n >= self.gamma:
            return False
        if logits is None:
            return True
        self.product = largest(logits) * (self.product if n else 1.0)
        return self.product >= self.threshold


def entropy(logits: Any) -> float:
    """H in nats of the softmax of raw logits `[vocab]`."""
    log = logits.log_softmax(-1)
    return float(-(log.exp() * log.clamp(min=-1e4)).sum())


def largest(logits: Any) -> float:
    """The largest probability of the softmax of raw logits `[vocab]`."""
    return float(logits.softmax(-1).max())


@dataclass(frozen=True)
class Policy:
    """A named policy: one line for people, how it is made, and its own bounds where none are given.

    `make(gamma, least, most, prices)`: gamma is where a policy begins that has a gamma of its own.
    """

    title: str
    make: Callable[[int, int, int, CostModel], Any]
    least: int = 1
    most: int = 8


POLICIES = {
    "fixed": Policy("always gamma tokens", lambda gamma, least, most, prices: Fixed(gamma)),
    "dynamic": Policy(
        "+1 after 80 % accepted, -1 after 40 %",
        lambda gamma, least, most, prices: Dynamic(min(most, max(least, gamma)), least, most),
        least=3,
        most=12,
    ),
    "heuristic": Policy(
        "+2 after full acceptance, otherwise -1",
        lambda gamma, least, most, prices: Heuristic(min(most, gamma), most),
        most=20,
    ),
    "egag": Policy(
        "by the entropy of the draft distribution (EGAG)", lambda gamma, least, most, prices: Egag(least, most)
    ),
    "adaedl": Policy(
        "until an entropy bound on acceptance fails (AdaEDL)", lambda gamma, least, most, prices: AdaEdl(most)
    ),
    "svip": Policy("until the drafter's entropy is high (SVIP)", lambda gamma, least, most, prices: svip(most)),
    "confidence": Policy(
        "until no token has a probability of 0.4", lambda gamma, least, most, prices: confidence(most)
    ),
    "path": Policy(
        "until the path's probability is below 0.2", lambda gamma, least, most, prices: PathProbability(most)
    ),
    "auto": Policy(
        "highest tokens per second by measured costs and acceptance",
        lambda gamma, least, most, prices: Auto(most, prices),
    ),
}
