"""Expected speed of draft lengths from acceptance and costs of any unit, for predictions, advice and policy `auto`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
    """Expected figures of a draft length."""

    gamma: int
    tokens_per_pass: float
    speed: float  # tokens per unit of cost


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
