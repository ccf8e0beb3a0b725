"""Closed forms against the tables of the papers and against enumeration of the outcomes."""

import itertools
import math
import random
import statistics

import pytest

from specdemo.bench.published_tables import LEVIATHAN_2
from specdemo.core import theory

ALPHAS = [0.0, 0.1, 0.35, 0.6, 0.85, 0.99, 1.0]


@pytest.mark.parametrize(
    ("alpha", "gamma", "more", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_leviathan_table_1(alpha: float, gamma: int, more: float, speed: float) -> None:
    assert theory.walltime_improvement(alpha, gamma, c=0) == pytest.approx(speed, abs=0.005)
    assert theory.operations(alpha, gamma, c=0) == pytest.approx(more, abs=0.005)


def test_leviathan_table_2_is_close_to_the_theorem() -> None:
    shares = [speed / theory.walltime_improvement(alpha, gamma, c) for *_, gamma, alpha, c, speed in LEVIATHAN_2]
    assert [round(100 * share) for share in (min(shares), statistics.median(shares), max(shares))] == [68, 109, 129]


@pytest.mark.parametrize(("gamma", "share", "speed"), [(2, 0.8, 2.17), (4, 0.7, 2.71), (6, 0.6, 2.88), (8, 0.5, 2.78)])
def test_the_practice_guide_s_table(gamma: int, share: float, speed: float) -> None:
    assert theory.share_speedup(share, gamma, c=0.1) == pytest.approx(speed, abs=0.006)  # 2.875 is printed as 2.88
    alpha = theory.alpha_of_share(share, gamma)
    assert alpha > share  # tokens after a rejection are drafted but not tested
    assert theory.walltime_improvement(alpha, gamma, c=0.1) == pytest.approx(theory.share_speedup(share, gamma, c=0.1))


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
    assert theory.best_gamma(alpha, c) == gamma
    assert theory.walltime_improvement(alpha, gamma, c) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_expectations_equal_the_sum_over_all_outcomes(alpha: float, gamma: int) -> None:
    """Every pattern of gamma accept/reject outcomes, weighted by its probability and its number of tokens."""
    tokens = accepted = 0.0
    for coins in itertools.product([True, False], repeat=gamma):
        chance = math.prod(alpha if coin else 1 - alpha for coin in coins)
        kept = len(list(itertools.takewhile(bool, coins)))
        tokens += chance * (kept + 1)
        accepted += chance * kept / gamma
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(tokens)
    assert theory.accepted_share(alpha, gamma) == pytest.approx(accepted)
    # gamma drafter tokens at 0.2 and gamma + 1 rows of the target, where plain decoding needs a row per token
    assert theory.operations(alpha, gamma, 0.2) == pytest.approx((0.2 * gamma + gamma + 1) / tokens)


@pytest.mark.parametrize("c", [0.0, 0.05, 0.3, 0.6, 1.0, 1.5])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_some_gamma_improves_iff_alpha_exceeds_c(alpha: float, c: float) -> None:
    best = max(theory.walltime_improvement(alpha, gamma, c) for gamma in range(1, 100))
    assert (best > 1 + 1e-12) == theory.can_improve(alpha, c) == (theory.best_gamma(alpha, c) > 0)
    if theory.can_improve(alpha, c):
        assert best >= theory.least_improvement(alpha, c) - 1e-12 and theory.least_improvement(alpha, c) > 1
    assert theory.least_improvement(alpha, c) == pytest.approx(theory.walltime_improvement(alpha, 1, c))


def a_law(chance: random.Random, size: int) -> list[float]:
    weights = [chance.random() ** 4 for _ in range(size)]
    return [weight / sum(weights) for weight in weights]


def test_bounds_on_beta_are_valid_except_the_quoted_1_over_1_plus_kl() -> None:
    chance = random.Random(7)
    useful = {theory.pinsker: 0, theory.bretagnolle_huber: 0}
    for _ in range(2_000):
        p, q = a_law(chance, 3), a_law(chance, 3)
        beta, kl = theory.overlap(p, q), theory.divergence(p, q)
        assert beta == pytest.approx(1 - sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2)  # 1 - D_LK
        for bound in useful:
            assert 0 <= bound(kl) <= beta + 1e-12
        useful[max(useful, key=lambda bound: bound(kl))] += 1
    assert all(useful.values())  # each bound is the tighter bound for some p, q
    e = 0.01
    beta, kl = theory.overlap([1, 0], [e, 1 - e]), theory.divergence([1, 0], [e, 1 - e])
    assert beta == e and kl == pytest.approx(-math.log(e))
    assert 1 / (1 + kl) > beta >= max(theory.pinsker(kl), theory.bretagnolle_huber(kl))


def test_divergence_is_infinite_outside_the_support_of_q() -> None:
    assert theory.divergence([0.5, 0.5], [1.0, 0.0]) == math.inf
    assert theory.divergence([1.0, 0.0], [0.5, 0.5]) == pytest.approx(math.log(2))
    assert theory.divergence([0.3, 0.7], [0.3, 0.7]) == 0 == theory.divergence([1.0], [1.0])
    assert theory.pinsker(math.inf) == theory.bretagnolle_huber(math.inf) == 0
    assert theory.pinsker(0) == 1 and theory.bretagnolle_huber(0) == 0.5
    assert theory.pinsker(0.5) == 0.5


def test_expected_acceptance_of_a_block() -> None:
    """Sum of the mean weights of all drafts; at least the sum of powers of beta, equal for a single token."""
    rng = random.Random(3)
    for _ in range(20):
        p, q = a_law(rng, 3), a_law(rng, 3)
        beta = theory.overlap(p, q)
        for gamma in (1, 2, 4):
            expected = 0.0
            for draft in itertools.product(range(3), repeat=gamma):
                weight, mass = 1.0, math.prod(q[token] for token in draft)
                for token in draft:
                    weight = min(1.0, weight * p[token] / q[token])
                    expected += mass * weight
            assert theory.block_accepted(p, q, gamma) == pytest.approx(expected)
            assert theory.block_accepted(p, q, gamma) >= theory.expected_tokens(beta, gamma) - 1 - 1e-12
        assert theory.block_accepted(p, q, 1) == pytest.approx(beta)
    assert theory.block_accepted([1.0, 0.0], [0.0, 1.0], 3) == 0
    assert theory.block_accepted([0.2, 0.3, 0.5], [0.5, 0.3, 0.2], 3) == pytest.approx(1.695)


def test_classic_rejection_and_importance_sampling() -> None:
    """Against moments of the weights p / q; speculative sampling accepts at least as many draws."""
    rng = random.Random(5)
    for _ in range(50):
        p, q = a_law(rng, 4), a_law(rng, 4)
        weights = [a / b for a, b in zip(p, q, strict=True)]
        mean = sum(b * w for b, w in zip(q, weights, strict=True))
        variance = sum(b * (w - mean) ** 2 for b, w in zip(q, weights, strict=True))
        assert mean == pytest.approx(1) and theory.weight_variance(p, q) == pytest.approx(variance)
        accepted = sum(b * w / theory.largest_ratio(p, q) for b, w in zip(q, weights, strict=True))
        assert accepted == pytest.approx(1 / theory.largest_ratio(p, q)) and accepted <= theory.overlap(p, q) + 1e-12
    assert theory.largest_ratio([0.5, 0.5], [1.0, 0.0]) == theory.weight_variance([0.5, 0.5], [1.0, 0.0]) == math.inf
    assert (theory.largest_ratio([1.0, 0.0], [1.0, 0.0]), theory.weight_variance([1.0, 0.0], [1.0, 0.0])) == (1, 0)


def test_chen_s_table() -> None:
    """Acceptance that explains the published speed-ups: walltime improvement is inverted."""
    for speed, alpha in ((1.92, 0.724), (2.01, 0.748), (2.46, 0.851)):
        assert theory.alpha_of_speedup(speed, 4, c=0.128) == pytest.approx(alpha, abs=0.001)
        assert theory.walltime_improvement(theory.alpha_of_speedup(speed, 4, 0.128), 4, 0.128) == pytest.approx(speed)


def test_false_bounds_have_counterexamples() -> None:
    p, q = (0.5, 0.5), (0.6, 0.4)
    assert theory.overlap(p, q) == pytest.approx(0.90) and 1 - theory.divergence(p, q) == pytest.approx(0.98, abs=5e-4)
