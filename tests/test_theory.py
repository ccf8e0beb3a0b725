"""The closed forms against the papers' tables."""

from __future__ import annotations

import pytest

from specdemo.core.theory import best_gamma, expected_tokens, walltime_improvement


@pytest.mark.parametrize(
    ("alpha", "gamma", "speed"),
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_leviathan_table_1(alpha: float, gamma: int, speed: float) -> None:
    assert walltime_improvement(alpha, gamma, c=0) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize(
    ("alpha", "c", "gamma", "speed"),
    [
        (0.6, 0.05, 4, 1.92),
        (0.6, 0.1, 3, 1.67),
        (0.6, 0.2, 2, 1.40),
        (0.8, 0.05, 8, 3.09),
        (0.8, 0.1, 6, 2.47),
        (0.8, 0.2, 4, 1.87),
        (0.9, 0.05, 13, 4.67),
        (0.9, 0.1, 10, 3.43),
        (0.9, 0.2, 7, 2.37),
    ],
)
def test_best_gamma(alpha: float, c: float, gamma: int, speed: float) -> None:
    assert best_gamma(alpha, c) == gamma
    assert walltime_improvement(alpha, gamma, c) == pytest.approx(speed, abs=0.005)


def test_limits() -> None:
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.0, 5) == 1
    assert best_gamma(0.3, 0.3) == 0  # no gamma improves unless alpha > c
    assert best_gamma(0.31, 0.3) == 1
