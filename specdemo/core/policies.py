"""Policies for the draft length (gamma) of each step.

Queries precede sampling, so they never bias the output. Without logits most policies allow their maximum; `Egag` and
`PathProbability` use earlier logits. `BatchLimit` shortens the drafts of a policy while texts share passes.
"""

from __future__ import annotations

import math
import operator
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

from specdemo.core.decode import DraftLengthPolicy
from specdemo.core.step import Step
from specdemo.core.theory import LEAST_COST, StepCost, acceptance_by_position, estimate, fastest
from specdemo.shared_passes import SharedPassRecord

_ROW_COSTS = (0.5, 0.2, 0.12)  # of policy `path`; AVX-512 measures 0.01-0.09 and 0.16, AVX2 0.01-0.09 and 0.24-0.42
_LEAST_TOKEN_COST = 0.05


@dataclass(frozen=True)
class DraftLengths:
    """Limits of the draft length, as options select them."""

    gamma: int
    least: int
    most: int
    beta: float = 0.5


@dataclass(frozen=True)
class CostModel:
    """Costs in units of a one-row target pass (v and c of `theory.speedup`)."""

    passes: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    token: float = 0.0  # c, initial estimate

    @property
    def row(self) -> float:
        rows = max(self.passes)
        return (self.verify(rows) - 1) / max(1, rows - 1)

    def verify(self, rows: float) -> float:
        """Interpolate v(rows) linearly.

        Measurements are made non-decreasing downwards, since disturbances only lengthen them.
        """
        known = sorted(self.passes.items())
        points = [(n, max(1.0, min(cost for _, cost in known[i:]))) for i, (n, _) in enumerate(known)]
        if len(points) == 1:
            return points[0][1]
        pairs = list(zip(points, points[1:], strict=False))
        (a, low), (b, high) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return low + (high - low) * (rows - a) / (b - a)


def costs_at_load(environment: Mapping[str, Any]) -> CostModel | None:
    """Return the costs of passes that the header of a trace contains."""
    measured = environment.get("parity", {}).get("cost")
    return CostModel({int(rows): cost for rows, cost in measured.items()}) if measured else None


class PolicyDefaults:
    """Base class of policies; the defaults draft `gamma` tokens and record no notes."""

    needs_logits = False
    path_limits: Sequence[float] | None = None

    @property
    def notes(self) -> dict[str, float]:
        return {}

    def may_extend(self: DraftLengthPolicy, n: int, logits: Any) -> bool:
        return n < self.gamma

    def observe(self, step: Step) -> None:
        pass


@dataclass
class PositionAcceptance:
    """Decaying acceptance by position, shrunk towards its mean, then `prior`."""

    length: int
    prior: float = 0.7
    weight: float = 12.0  # weight of the prior, as a number of tests
    decay: float = 0.95  # factor per test of the same position

    def __post_init__(self) -> None:
        self._tested, self._accepted = [0.0] * self.length, [0.0] * self.length

    def observe(self, step: Step) -> None:
        for i in range(min(self.length, len(step.verdict.accepted) + (step.kind == "correction"))):
            self._tested[i] = self.decay * self._tested[i] + 1
            self._accepted[i] = self.decay * self._accepted[i] + _acceptance(step, i)

    @property
    def rates(self) -> list[float]:
        overall = (sum(self._accepted) + self.weight * self.prior) / (sum(self._tested) + self.weight)
        return [
            (accepted + self.weight * overall) / (tested + self.weight)
            for tested, accepted in zip(self._tested, self._accepted, strict=True)
        ]


@dataclass
class Auto(PolicyDefaults):
    """Maximise expected tokens per second.

    k draft tokens yield 1 + a_1 + a_1 a_2 + ... tokens (a_i: acceptance at position i) for k draft costs and a pass
    over k + 1 rows. If no draft pays, gamma is 0, with retries.
    """

    max_gamma: int
    costs: CostModel = field(default_factory=CostModel)
    start: int | None = None
    min_gamma: int = 0
    min_gain: float = 1.06  # required speed-up over AR decoding
    retry_after: tuple[int, int] = (64, 256)  # AR steps before a retry: initial, maximum

    def __post_init__(self) -> None:
        self._cost = cache(self.costs.verify)
        self._acceptance = PositionAcceptance(self.max_gamma)
        self._draft_s: deque[float] = deque(maxlen=15)  # durations per draft step
        self._verify_s: dict[int, deque[float]] = {}  # durations by rows
        self._branching = 1.0  # nodes per level of the last draft
        self._drafts = 0  # number of drafts since an AR step
        self._idle, self._retry_after = 0, self.retry_after[0]
        self.gamma = self._best() if self.start is None else self.start

    @property
    def notes(self) -> dict[str, float]:
        return {"auto_a1": self._acceptance.rates[0], "auto_c": self._token_s() / max(self._verification_s()[0], 1e-9)}

    def observe(self, step: Step) -> None:
        if step.i == 0:
            return
        drafted, depth = len(step.draft), step.draft.depth
        self._verify_s.setdefault(drafted + 1, deque(maxlen=15)).append(step.seconds.verify)
        if drafted:
            self._branching = drafted / depth
        self._drafts = self._drafts + 1 if drafted else 0
        if self._drafts == 2:
            self._draft_s.clear()
        if self._drafts > 1:  # the first also reads the text of AR steps
            self._draft_s.append(step.seconds.draft / depth)
        self._acceptance.observe(step)
        self._idle = 0 if drafted else self._idle + 1
        self.gamma = self._best()
        if self.gamma:
            self._retry_after = self.retry_after[0]
        elif self._drafts == 1:
            self.gamma = 1
        elif self._idle >= self._retry_after:
            self.gamma, self._retry_after = 1, min(2 * self._retry_after, self.retry_after[1])

    def _verification_s(self) -> list[float]:
        costs = [self._cost(1 + self._branching * level) for level in range(self.max_gamma + 1)]
        if not self._verify_s:
            return costs
        measured = [(self._cost(rows), times) for rows, times in self._verify_s.items()]
        medians = [(cost, statistics.median(times)) for cost, times in measured]
        scale = statistics.median(seconds / cost for cost, times in measured for seconds in times)
        slope, fixed = scale, 0.0
        if len({cost for cost, _ in medians}) > 1:
            line = statistics.linear_regression(*zip(*medians, strict=True))
            slope = min(max(line.slope, 0.0), scale)  # sampling costs the same for all
            fixed = statistics.fmean(seconds - slope * cost for cost, seconds in medians)
        return [fixed + slope * cost for cost in costs]

    def _token_s(self) -> float:
        return statistics.median(self._draft_s) if self._draft_s else self.costs.token * self._verification_s()[0]

    def _best(self) -> int:
        verification_s = self._verification_s()
        cost = StepCost(lambda rows: verification_s[int(rows) - 1], self._token_s())
        gammas = range(max(1, self.min_gamma), self.max_gamma + 1)
        best = fastest(estimate(acceptance_by_position(self._acceptance.rates), cost, gammas))
        return best.gamma if best.speed > self.min_gain / max(verification_s[0], LEAST_COST) else self.min_gamma


def _acceptance(step: Step, position: int) -> float:
    """Return beta if acceptance was random (lower variance), otherwise 0 or 1."""
    verdict = step.verdict
    if step.draft.is_chain and verdict.draw and verdict.draw[position] is not None:
        return verdict.beta[position] or 0.0
    return float(position < len(verdict.accepted))


def _accepted_share(step: Step) -> float:
    """Share of the longest path."""
    return len(step.verdict.accepted) / step.draft.depth


@dataclass
class Fixed(PolicyDefaults):
    """Constant gamma (Leviathan et al. 2211.17192, Algorithm 1)."""

    gamma: int


@dataclass
class Dynamic(PolicyDefaults):
    """Increase gamma by 1 if accepted / drafted >= 0.8, decrease it by 1 at 0.4 or below (from practice guides)."""

    gamma: int
    min_gamma: int
    max_gamma: int

    def observe(self, step: Step) -> None:
        if step.draft.tokens:
            share = _accepted_share(step)
            change = (share >= 0.8) - (share <= 0.4)
            self.gamma = min(self.max_gamma, max(self.min_gamma, self.gamma + change))


@dataclass
class Heuristic(PolicyDefaults):
    """Increase gamma by 2 after full acceptance, otherwise decrease it by 1 (transformers' heuristic schedule)."""

    gamma: int
    max_gamma: int
    min_gamma: int = 1

    def observe(self, step: Step) -> None:
        if step.draft.tokens:
            full = _accepted_share(step) == 1
            self.gamma = min(self.max_gamma, self.gamma + 2) if full else max(self.min_gamma, self.gamma - 1)


@dataclass
class Egag(PolicyDefaults):
    """EGAG: entropy-guided adaptive gamma.

    H_norm = H(q) / ln V of the raw logits, smoothed with weight `beta` of the past, sets the limit round(min_gamma +
    (max_gamma - min_gamma)(1 - H_norm)) before each token.
    """

    needs_logits = True

    min_gamma: int
    max_gamma: int
    beta: float = 0.5
    h_norm: float = 0.0
    h_norm_ema: float | None = None

    @property
    def gamma(self) -> int:
        return self.max_gamma

    @property
    def entropy_gamma(self) -> int:
        return round(self.min_gamma + (self.max_gamma - self.min_gamma) * (1 - (self.h_norm_ema or 0.0)))

    @property
    def notes(self) -> dict[str, float]:
        if self.h_norm_ema is None:
            return {}
        return {"h_norm": self.h_norm, "h_norm_ema": self.h_norm_ema, "gamma": self.entropy_gamma}

    def may_extend(self, n: int, logits: Any) -> bool:
        if logits is not None:
            self.h_norm = _entropy(logits) / math.log(logits.shape[-1])
            if self.h_norm_ema is None:
                self.h_norm_ema = self.h_norm
            else:
                self.h_norm_ema = self.beta * self.h_norm_ema + (1 - self.beta) * self.h_norm
        return n < self.entropy_gamma


@dataclass
class StoppingPolicy(PolicyDefaults, ABC):
    """Draft `min_gamma` tokens, then up to `gamma` while `is_confident(logits)`."""

    needs_logits = True

    gamma: int
    min_gamma: int = 0

    def may_extend(self, n: int, logits: Any) -> bool:
        if n >= self.gamma:
            return False
        confident = logits is None or self.is_confident(logits)
        return confident or n < self.min_gamma

    @abstractmethod
    def is_confident(self, logits: Any) -> bool: ...


@dataclass
class Svip(StoppingPolicy):
    """SVIP (2411.18462): stop if sqrt(0.15 H) exceeds the threshold."""

    threshold: float = 0.3

    def is_confident(self, logits: Any) -> bool:
        return math.sqrt(0.15 * _entropy(logits)) <= self.threshold


@dataclass
class Confidence(StoppingPolicy):
    """Stop if the largest probability is below the threshold (transformers' rule, before sampling)."""

    threshold: float = 0.4

    def is_confident(self, logits: Any) -> bool:
        return _largest_prob(logits) >= self.threshold


@dataclass
class AdaEdl(StoppingPolicy):
    """AdaEDL (2410.18351): stop if 1 - sqrt(0.2 H), a lower bound on acceptance, is below lambda.

    Lambda decreases while the smoothed acceptance rate is at least `target_acceptance`, and increases otherwise.
    """

    target_acceptance: float = 0.9
    rate: float = 0.5  # weight of past acceptance
    step: float = 0.01
    threshold: float = 0.4
    accepted: float | None = None

    @property
    def notes(self) -> dict[str, float]:
        return {"lambda": self.threshold}

    def is_confident(self, logits: Any) -> bool:
        return 1 - math.sqrt(0.2 * _entropy(logits)) >= self.threshold

    def observe(self, step: Step) -> None:
        if step.draft.tokens:
            share = _accepted_share(step)
            self.accepted = share if self.accepted is None else self.rate * self.accepted + (1 - self.rate) * share
            change = self.step if self.accepted < self.target_acceptance else -self.step
            self.threshold = min(1.0, max(0.0, self.threshold + change))


@dataclass
class PathProbability(StoppingPolicy):
    """Stop before a token whose path is less probable than the cost of the token.

    A path is as probable as the product of the largest probabilities along it. A token without logits is expected to be
    as probable as the path before it, or accepted like earlier copies if the path was copied. Losses of `most_lost` by
    a model or head pause its drafts. Costs are fixed before the run, so lengths depend on the text only.
    """

    costs: Sequence[float] = (0.15,)  # of each draft token in AR steps; the last is repeated
    step_cost: float = 0.1  # other cost of a draft
    most_lost: tuple[float, float] = (8.0, 3.0)  # loss before the first pause, and before later pauses
    retry_after: tuple[int, int] = (32, 128)  # steps without drafts: initial, maximum
    product: float = 1.0

    def __post_init__(self) -> None:
        self.costs = [*self.costs, *[self.costs[-1]] * (self.gamma - len(self.costs))]
        self._copies = PositionAcceptance(self.gamma, prior=0.8, weight=2.0)
        self._token = 0  # its costs are compared
        self._scored = False  # True if logits of the draft were seen
        self._lost, self._limit = 0.0, self.most_lost[0]
        self._pause, self._next_pause = 0, self.retry_after[0]

    @property
    def path_limits(self) -> Sequence[float] | None:  # type: ignore[override]
        if self.min_gamma:
            return None
        return [math.inf] * self.gamma if self._pause else self.costs

    def may_extend(self, n: int, logits: Any) -> bool:
        self._token = n
        if n == 0:
            self.product = 1.0
            self._scored = False
        return super().may_extend(n, logits) and (logits is not None or n < self.min_gamma or self._is_expected(n))

    def is_confident(self, logits: Any) -> bool:
        self.product *= _largest_prob(logits)
        self._scored = True
        return not self._pause and self.product >= self.costs[self._token]

    def _is_expected(self, n: int) -> bool:
        """Return True if token n is probable enough before its logits exist; the first is always tried."""
        if n == 0:
            return True
        path = self.product * self.product if self._scored else math.prod(self._copies.rates[: n + 1])
        return path >= self.costs[n]

    def observe(self, step: Step) -> None:
        copied = any(origin.source not in ("model", "head") for origin in step.draft.origin)
        if copied:
            self._copies.observe(step)
        if self._pause:
            self._pause -= 1
        elif not copied and not self.min_gamma:
            self._observe_loss(step)

    def _observe_loss(self, step: Step) -> None:
        costs = self.step_cost + sum(self.costs[min(i, self.gamma - 1)] for i in range(len(step.draft)))
        self._lost = max(0.0, self._lost + costs - len(step.verdict.accepted))
        if self._lost >= self._limit:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, self.retry_after[1])
            self._lost, self._limit = 0.0, self.most_lost[1]


def path_probability(lengths: DraftLengths, costs: CostModel) -> PathProbability:
    """Return a policy for costs of rows that are means between powers of two, and rounded.

    Noise must not change sampled texts.
    """
    starts = [1 << n.bit_length() - 1 for n in range(1, lengths.most + 1)]
    rows = [(costs.verify(2 * start) - costs.verify(start)) / start for start in starts]
    rounded = [next((cost for cost in _ROW_COSTS if row >= cost), 0.0) for row in rows]
    tokens = [max(_LEAST_TOKEN_COST, row + costs.token) for row in rounded]
    return PathProbability(lengths.most, lengths.least, tokens)


def _entropy(logits: Any) -> float:
    log = logits.log_softmax(-1)
    return float(-(log.exp() * log.clamp(min=-1e4)).sum())


def _largest_prob(logits: Any) -> float:
    return float(logits.softmax(-1).max())


_BATCH_PRIOR_WEIGHT = 4.0
_BATCH_RETRY_AFTER = 16  # steps without drafts


@dataclass
class BatchLimit:
    """Limit the drafts of `policy` while t texts share a pass.

    A draft token costs (r + c) / ((1 - r) / t + r + b) AR tokens (r: row, c: drafting, b: work between passes); `gamma`
    and `path_limits` exclude tokens whose acceptance is less probable, `may_extend` does not.
    """

    policy: DraftLengthPolicy
    costs: CostModel
    load: Callable[[], SharedPassRecord | None]
    longest: int

    def __post_init__(self) -> None:
        self._acceptance = PositionAcceptance(self.longest, weight=_BATCH_PRIOR_WEIGHT)
        self._idle = 0

    @property
    def needs_logits(self) -> bool:
        return self.policy.needs_logits

    @property
    def notes(self) -> Mapping[str, float]:
        load = self.load()
        return self.policy.notes if load is None else {**self.policy.notes, "texts": float(load.texts)}

    @property
    def path_limits(self) -> Sequence[float] | None:
        limits, cost = self.policy.path_limits, self._token_cost
        return None if limits is None else [max(limit, cost) for limit in limits]

    @property
    def gamma(self) -> int:
        if not (cost := self._token_cost):
            return self.policy.gamma
        paths = accumulate(self._acceptance.rates, operator.mul)
        length = max(sum(path >= cost for path in paths), int(self._idle >= _BATCH_RETRY_AFTER))
        return min(self.policy.gamma, length)

    @property
    def _token_cost(self) -> float:
        if (load := self.load()) is None:
            return 0.0
        row = self.costs.row
        single_s = load.seconds / (1 + (load.rows - 1) * row)
        between = load.between_s / max(single_s, 1e-9)
        return (row + self.costs.token) / ((1 - row + between) / load.texts + row)

    def may_extend(self, n: int, logits: Any) -> bool:
        return self.policy.may_extend(n, logits)

    def observe(self, step: Step) -> None:
        self._idle = 0 if step.draft.tokens else self._idle + 1
        self._acceptance.observe(step)
        self.policy.observe(step)


@dataclass(frozen=True)
class Policy:
    """Registry entry of a draft-length policy."""

    title: str
    make: Callable[[DraftLengths, CostModel], Any]
    bounded: bool = True
    least: int = 0
    most: int | None = None  # gamma if None
    by_logits: bool = False  # constant length for drafts without distributions

    def lengths(self, gamma: int, least: int | None, most: int | None, beta: float = 0.5) -> DraftLengths:
        if not self.bounded:
            return DraftLengths(gamma, gamma, gamma)
        highest = max(self.most or 0, gamma, least or 0) if most is None else most
        lowest = least or min(self.least, gamma, highest)
        return DraftLengths(min(highest, max(lowest, gamma)), lowest, highest, beta)


def _between(stopping: Callable[[int, int], StoppingPolicy]) -> Callable[[DraftLengths, CostModel], StoppingPolicy]:
    return lambda lengths, costs: stopping(lengths.most, lengths.least)


POLICIES = {
    "fixed": Policy("always gamma tokens", lambda lengths, costs: Fixed(lengths.gamma), bounded=False),
    "dynamic": Policy(
        "+1 after 80 % accepted, -1 after 40 %",
        lambda lengths, costs: Dynamic(lengths.gamma, lengths.least, lengths.most),
        least=3,
        most=12,
    ),
    "heuristic": Policy(
        "+2 after full acceptance, otherwise -1",
        lambda lengths, costs: Heuristic(lengths.gamma, lengths.most, lengths.least),
        least=1,
        most=20,
    ),
    "egag": Policy(
        "by the entropy of the draft distribution (EGAG)",
        lambda lengths, costs: Egag(lengths.least, lengths.most, lengths.beta),
        least=1,
        by_logits=True,
    ),
    "adaedl": Policy("until an entropy bound on acceptance fails (AdaEDL)", _between(AdaEdl), by_logits=True),
    "svip": Policy("until the drafter's entropy is high (SVIP)", _between(Svip), by_logits=True),
    "confidence": Policy("until no token has a probability of 0.4", _between(Confidence), by_logits=True),
    "path": Policy("until the path's probability is below the cost of a token", path_probability),
    "auto": Policy(
        "highest tokens per second by measured costs and acceptance",
        lambda lengths, costs: Auto(lengths.most, costs, lengths.gamma, lengths.least),
        most=8,
    ),
}
