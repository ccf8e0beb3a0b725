"""The estimate of draft lengths: against enumeration, closed forms and simulated runs."""

import math

import pytest

from specdemo.core.estimate import (
    ExpectedSteps,
    StepCost,
    acceptance_along_text,
    acceptance_by_position,
    estimate,
    fastest,
    step_starts,
)
from specdemo.core.theory import best_gamma, constant_acceptance, expected_tokens, speedup

COST = StepCost(lambda rows: 0.8 + 0.2 * rows, token=0.05, other=0.1, plain=1.0)


def test_step_starts_are_sums_over_all_outcomes() -> None:
    """Drafts of two tokens, one and none: enumerate how many of their tokens are accepted."""
    chances = [[0.5, 0.25], [0.75], [], [0.5], []]
    starts = [0.0] * 12
    starts[0] = 1.0
    for i, draft in enumerate(chances):
        for accepted in range(len(draft) + 1):
            odds = math.prod(draft[:accepted]) * (1 - draft[accepted] if accepted < len(draft) else 1)
            starts[i + accepted + 1] += starts[i] * odds
    assert step_starts(chances) == pytest.approx(starts[:5])
    assert step_starts([[], [], []]) == [1.0, 1.0, 1.0] and step_starts([]) == []


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_all_forms_of_constant_acceptance_agree(alpha: float) -> None:
    """By formula, by position, and in a text so long that its end does not count."""
    forms = [
        constant_acceptance(alpha),
        acceptance_by_position([alpha] * 6),
        acceptance_along_text([[alpha] * 6] * 4000),
    ]
    found = [estimate(form, COST, range(7)) for form in forms]
    for gamma, *rows in zip(range(7), *found, strict=True):
        cost = 1 + 0.2 * gamma + 0.05 * gamma + 0.1 if gamma else 1.0
        for row in rows:
            assert row.gamma == gamma and row.tokens_per_pass == pytest.approx(expected_tokens(alpha, gamma), rel=2e-3)
            assert row.speed == pytest.approx(expected_tokens(alpha, gamma) / cost, rel=2e-3)


def test_drafts_end_with_the_text_and_the_prompt_of_the_drafter_counts() -> None:
    expected = acceptance_along_text([[1.0] * 3] * 6)(3)
    assert expected.tokens == 6 and [step for step in expected.steps if step[0]] == [(1.0, 3), (1.0, 1)]
    (row,) = estimate(lambda gamma: expected, COST, [3], opening=2.0)
    assert row.speed == pytest.approx(6 / (2.0 + COST(3) + COST(1)))


def test_the_fastest_length_is_the_best_gamma_and_ties_go_to_the_shorter() -> None:
    for alpha in (0.2, 0.6, 0.9):
        found = fastest(estimate(constant_acceptance(alpha), COST, range(65)))
        assert found.gamma == best_gamma(alpha, COST.token, v=COST.verify, o=COST.other)
        costs = {k: (COST.token, COST.verify(k + 1), COST.other) for k in range(1, 65)}
        gains = [speedup(expected_tokens(alpha, k), k, *terms) for k, terms in costs.items()]
        assert found.speed == pytest.approx(max(1.0, *gains))
    free = estimate(acceptance_by_position([0.0] * 4), StepCost(lambda rows: 1.0, token=0.0), range(5))
    assert fastest(free).gamma == 0


def test_a_step_without_cost_has_a_finite_speed() -> None:
    (row,) = estimate(lambda gamma: ExpectedSteps(2.0, [(1.0, 1)]), StepCost(lambda rows: 0.0, token=0.0), [1])
    assert math.isfinite(row.speed)
