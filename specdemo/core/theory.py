"""Closed-form results on speculative decoding, and expected speeds of draft lengths from acceptance and costs.

`alpha` is E[beta], acceptance per tested token (2211.17192, section 3.1); `share` is accepted / drafted, which
falls with gamma; `c` is the drafter's time per token divided by the target's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

STAGES = ("draft_s", "verify_s", "host_s")  # names of the times of a step


@dataclass(frozen=True, slots=True)
class CostTerms:
    """Measured coefficients of `speedup`, per step and in one-row target passes."""

    drafted: float  # number of tokens
    draft: float
    v: float
    o: float

    @classmethod
    def of(
        cls, draft_s: float, verify_s: float, host_s: float, *, drafted: int, steps: int, pass_s: float
    ) -> CostTerms:
        """Divide sums over `steps` > 0 by their number, and seconds by those of a one-row pass."""
        unit = steps * pass_s
        return cls(drafted / steps, draft_s / unit, verify_s / unit, host_s / unit)

    @property
    def step(self) -> float:
        """Cost of a step."""
        return self.draft + self.v + self.o

    @property
    def c(self) -> float:
        return self.draft / self.drafted if self.drafted else 0.0


def expected_tokens(alpha: float, gamma: float) -> float:
    """Expected tokens per target pass, (1 - alpha^(gamma+1)) / (1 - alpha) (2211.17192, eq. 1)."""
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def accepted_share(alpha: float, gamma: float) -> float:
    """Expected accepted / drafted for gamma > 0 (2211.17192, eq. 1, without the target's token)."""
    return (expected_tokens(alpha, gamma) - 1) / gamma


def alpha_of_share(share: float, gamma: float) -> float:
    """Return alpha for `share` in [0, 1] and gamma > 0, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_share(middle, gamma) < share else (low, middle)
    return high


def walltime_improvement(alpha: float, gamma: float, c: float) -> float:
    """Speed-up over AR decoding if verification costs an AR step (2211.17192, Theorem 3.8)."""
    return speedup(expected_tokens(alpha, gamma), gamma, c)


def speedup(tokens: float, drafted: float, c: float, v: float = 1.0, o: float = 0.0) -> float:
    """Cost model: tokens per step / cost of a step, in one-row target passes.

    `c` per draft token, `v` per pass, overhead `o`. Theorem 3.8 of 2211.17192 is v = 1, o = 0.
    """
    return tokens / (v + drafted * c + o)


def share_speedup(share: float, gamma: float, c: float) -> float:
    """Formula of practice guides, (1 + gamma alpha) / (1 + gamma rho), with alpha = `share`, rho = `c`.

    Equals Theorem 3.8 for `share = accepted_share(alpha, gamma)`.
    """
    return speedup(1 + gamma * share, gamma, c)


def operations(alpha: float, gamma: float, c: float) -> float:
    """Arithmetic operations per token relative to AR decoding (2211.17192, Theorem 3.11).

    `c` is the ratio of operations per token, c-hat in the paper.
    """
    return (gamma * c + gamma + 1) / expected_tokens(alpha, gamma)


def memory_accesses(alpha: float, gamma: float) -> float:
    """Reads of the target's weights and KV cache per token, relative to AR decoding (2211.17192, section 3.4)."""
    return 1 / expected_tokens(alpha, gamma)


def alpha_of_speedup(speed: float, gamma: float, c: float) -> float:
    """Invert Theorem 3.8 for gamma > 0."""
    return alpha_of_share((speed * (gamma * c + 1) - 1) / gamma, gamma)


def can_improve(alpha: float, c: float) -> bool:
    """Return True iff some gamma improves the walltime (2211.17192, Corollary 3.9).

    Converse: gamma drafts gain alpha + ... + alpha^gamma <= gamma alpha and cost gamma c.
    """
    return alpha > c


def least_improvement(alpha: float, c: float) -> float:
    """Speed-up of gamma = 1, (1 + alpha) / (1 + c), a lower bound (2211.17192, Corollary 3.9)."""
    return (1 + alpha) / (1 + c)


def constant_acceptance(alpha: float) -> Callable[[int], ExpectedSteps]:
    """Expect `alpha` at every position."""
    return lambda gamma: ExpectedSteps(expected_tokens(alpha, gamma), ((1.0, gamma),))


def best_gamma(
    alpha: float,
    c: float,
    longest: int = 64,
    v: Callable[[float], float] = lambda rows: 1.0,
    o: float = 0.0,
    plain: float | None = 1.0,
) -> int:
    """Return the draft length with the largest `speedup`, 0 if drafting never pays (2211.17192, section 3.5).

    `v(rows)` is the cost of a pass, `plain` that of a step without drafts (None: v(1) + o, as over a link).
    """
    cost = StepCost(v, c, o, plain)
    return fastest(estimate(constant_acceptance(alpha), cost, range(longest + 1))).gamma


def thumb_gamma(c: float) -> float:
    """Rule of thumb sqrt(1 / rho - 1) with rho = `c` > 0; it ignores acceptance."""
    return math.sqrt(max(0.0, 1 / c - 1))


def overlap(p: Sequence[float], q: Sequence[float]) -> float:
    """Acceptance probability beta = sum min(p, q) = 1 - D_LK(p, q) (2211.17192, Theorem 3.5)."""
    return sum(map(min, p, q))


def largest_ratio(p: Sequence[float], q: Sequence[float]) -> float:
    """M = max p / q: classic rejection sampling accepts a draw from q with probability 1 / M; infinite if q lacks p."""
    return max(a / b if b > 0 else math.inf for a, b in zip(p, q, strict=True) if a > 0)


def weight_variance(p: Sequence[float], q: Sequence[float]) -> float:
    """Variance of the importance weights p / q of draws from q, sum p^2 / q - 1; infinite if q lacks p."""
    return sum(a * a / b if b > 0 else math.inf for a, b in zip(p, q, strict=True) if a > 0) - 1


def block_accepted(p: Sequence[float], q: Sequence[float], gamma: int) -> float:
    """Expected accepted tokens of block verification with equal p and q at every position.

    The first i tokens are accepted with probability w_i = min(1, w_{i-1} p / q) (2403.10444, appendix B).
    """
    weights, expected = {1.0: 1.0}, 0.0  # mass of each weight
    for _ in range(gamma):
        masses: dict[float, float] = defaultdict(float)
        for weight, mass in weights.items():
            for a, b in zip(p, q, strict=True):
                if b > 0:
                    masses[min(1.0, weight * a / b)] += mass * b
        weights = masses
        expected += sum(weight * mass for weight, mass in weights.items())
    return expected


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q) in nats; infinite if q is zero on the support of p."""
    pairs = [(a, b) for a, b in zip(p, q, strict=True) if a > 0]
    return math.inf if any(b == 0 for _, b in pairs) else max(0.0, sum(a * math.log(a / b) for a, b in pairs))


def pinsker(kl: float) -> float:
    """Pinsker's inequality: beta >= 1 - sqrt(KL / 2), useful for KL < 2."""
    return max(0.0, 1 - math.sqrt(kl / 2))


def bretagnolle_huber(kl: float) -> float:
    """Bretagnolle-Huber inequality: beta >= exp(-KL) / 2, useful for large KL.

    The often quoted bound 1 / (1 + KL) is false: p = (1, 0), q = (e, 1 - e) has beta = e, KL = -ln e.
    """
    return math.exp(-kl) / 2


def most_bytes_per_token(k: int, vocab_size: int, *, scalars: bool, rows: int, entry_bytes: int = 4) -> int:
    """Upper bound of the payload per committed token: that of a step, which commits at least one token.

    Up: k ids, k probabilities if `scalars`, `rows` of q; down: a count and an id.
    """
    return 4 * k * (2 if scalars else 1) + rows * entry_bytes * vocab_size + 8


def speedup_over(alpha: float, gamma: float, c: float, r: float, v: float = 1.0) -> float:
    """Speed-up over a link relative to local AR decoding, S = E[tokens] / (v + gamma c + r).

    `r`: round-trip time in AR steps.
    """
    return speedup(expected_tokens(alpha, gamma), gamma, c, v, r)


LEAST_COST = 1e-9  # avoids a division by zero


@dataclass(frozen=True)
class StepCost:
    """Cost of a step."""

    verify: Callable[[float], float]  # by number of rows
    token: float
    other: float = 0.0
    plain: float | None = None  # cost of a step without a draft, if it differs

    def __call__(self, drafted: float) -> float:
        if not drafted and self.plain is not None:
            return self.plain
        return self.verify(drafted + 1) + self.token * drafted + self.other


@dataclass(frozen=True)
class ExpectedSteps:
    """Tokens, and the expected number of steps that give them with the length of their drafts."""

    tokens: float
    steps: Sequence[tuple[float, int]]

    @property
    def count(self) -> float:
        return sum(count for count, _ in self.steps)

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.count

    def cost(self, step_cost: StepCost) -> float:
        return sum(count * step_cost(drafted) for count, drafted in self.steps if count)


@dataclass(frozen=True)
class LengthEstimate:
    """Expected figures of a draft length; `low` to `high` contains 95 % of simulated runs, if there are any."""

    gamma: int
    tokens_per_pass: float
    speed: float  # tokens per unit of cost
    low: float = 0.0
    high: float = math.inf


def estimate(
    acceptance: Callable[[int], ExpectedSteps], cost: StepCost, gammas: Iterable[int], opening: float = 0.0
) -> list[LengthEstimate]:
    """Return an estimate per draft length. `opening` is the cost before the steps."""
    expected = [(gamma, acceptance(gamma)) for gamma in gammas]
    return [
        LengthEstimate(gamma, steps.tokens_per_pass, steps.tokens / max(opening + steps.cost(cost), LEAST_COST))
        for gamma, steps in expected
    ]


def fastest(estimates: Iterable[LengthEstimate]) -> LengthEstimate:
    """Return the fastest, then shortest estimate."""
    return max(estimates, key=lambda row: (row.speed, -row.gamma))


def acceptance_by_position(rates: Sequence[float]) -> Callable[[int], ExpectedSteps]:
    """Expect `rates[i]` at position i of a draft if the tokens before it were accepted."""
    paths, path = [1.0], 1.0
    for rate in rates:
        path *= rate
        paths.append(paths[-1] + path)
    return lambda gamma: ExpectedSteps(paths[gamma], ((1.0, gamma),))


def acceptance_along_text(chances: Sequence[Sequence[float]]) -> Callable[[int], ExpectedSteps]:
    """Expect `chances[i]`, the conditional acceptance of a draft at position i of a text."""

    def steps(gamma: int) -> ExpectedSteps:
        drafts = [draft[: min(gamma, len(chances) - i - 1)] for i, draft in enumerate(chances)]
        lengths = map(len, drafts)
        return ExpectedSteps(len(chances), [*zip(step_starts(drafts), lengths, strict=True)])

    return steps


def step_starts(chances: Sequence[Sequence[float]]) -> list[float]:
    """Probability that a step starts at each position; `chances[i]`: conditional acceptance of a draft there."""
    starts = [1.0, *[0.0] * len(chances)]
    for i, draft in enumerate(chances):
        path = starts[i]
        for position, chance in enumerate(draft, i + 1):
            starts[position] += path * (1 - chance)
            path *= chance
        starts[i + len(draft) + 1] += path
    return starts[: len(chances)]
