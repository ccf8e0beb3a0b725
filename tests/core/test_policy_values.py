"""Draft-length policies and cost models: values computed by hand, at the limits of their conditions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes.policy_steps import FLAT, SURE, by_path, length, sourced, step

from specdemo.core.origin import Origin
from specdemo.core.policies import (
    POLICIES,
    AdaEdl,
    Auto,
    CostModel,
    DraftLengths,
    Dynamic,
    Egag,
    Fixed,
    Heuristic,
    PathProbability,
    Policy,
    PositionAcceptance,
    confidence,
    svip,
)
from specdemo.core.step import Draft, Step, Verdict


def test_costs_of_rows_and_passes() -> None:
    assert CostModel().row == 0.0 and CostModel({1: 1.0, 2: 1.5}).row == 0.5
    assert CostModel({1: 1.0, 2: 1.1, 5: 1.8}).row == pytest.approx(0.2)
    cheap = CostModel({1: 0.5, 3: 2.0})  # a pass costs at least that of one row
    assert [cheap.verify(rows) for rows in (1, 2, 3, 5)] == [1.0, 1.5, 2.0, 3.0]
    assert CostModel({4: 3.0}).verify(1) == 3.0 and CostModel({4: 0.5}).verify(9) == 1.0
    unordered = CostModel({8: 4.0, 1: 1.0, 4: 2.0})
    assert [unordered.verify(rows) for rows in (1, 2.5, 4, 6, 8)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert CostModel().token == 0.0


def test_acceptance_decays_and_is_shrunk_towards_its_mean() -> None:
    rates = PositionAcceptance(3)
    assert rates.rates == pytest.approx([0.7] * 3)
    rates.observe(step(4, 1))  # accepted, then rejected
    mean = (1 + 12 * 0.7) / (2 + 12)
    assert rates.rates == pytest.approx([(1 + 12 * mean) / 13, 12 * mean / 13, mean])
    rates.observe(step(4, 4))  # positions after the third are not counted
    accepted, tested = [0.95 + 1, 1.0, 1.0], [0.95 + 1, 0.95 + 1, 1.0]
    mean = (sum(accepted) + 12 * 0.7) / (sum(tested) + 12)
    expected = [(a + 12 * mean) / (t + 12) for a, t in zip(accepted, tested, strict=True)]
    assert rates.rates == pytest.approx(expected)
    rates.observe(step(0, 0))
    assert rates.rates == pytest.approx(expected)
    few = PositionAcceptance(1, prior=0.5, weight=1.0, decay=0.5)
    few.observe(step(1, 0))
    assert few.rates == pytest.approx([(0 + 1 * 0.25) / 2])  # mean (0 + 0.5) / 2


def test_beta_counts_only_where_a_draw_decided() -> None:
    verdict = Verdict((0,), 1, draw=(0.5, None, 0.5), beta=(0.25, 0.5, None))
    mixed = Step(1, (7, 1), Draft.chain((7, 7, 7)), verdict, 3, 0.1, 1.0, 0.0, 0.0)
    rates = PositionAcceptance(3, weight=1.0)
    rates.observe(mixed)
    mean = (0.25 + 0.0 + 0.7) / 3
    assert rates.rates == pytest.approx([(0.25 + mean) / 2, (0 + mean) / 2, mean])
    certain = PositionAcceptance(1, weight=1.0)
    certain.observe(replace(mixed, verdict=replace(verdict, beta=(None, None, None))))
    assert certain.rates == pytest.approx([0.35 / 2])  # an unknown beta counts as 0


def best_of(max_gamma: int, min_gamma: int, row: float, token: float, gain: float) -> int:
    """Return the length with most tokens per cost at an acceptance of 0.7; drafts must gain the factor `gain`."""
    rates = {k: sum(0.7**i for i in range(k + 1)) / (1 + k * (row + token)) for k in range(min_gamma, max_gamma + 1)}
    best = max((k for k in rates if k), key=rates.__getitem__)
    return best if rates[best] > gain else min_gamma


@pytest.mark.parametrize("min_gamma", [0, 2])
@pytest.mark.parametrize("row", [0.0, 0.05, 0.2, 0.6])
@pytest.mark.parametrize("token", [0.0, 0.03, 0.1, 0.4])
def test_auto_starts_with_the_best_length_of_the_prior(min_gamma: int, row: float, token: float) -> None:
    costs = CostModel({1: 1.0, 9: 1 + 8 * row}, token)
    assert Auto(8, costs, min_gamma=min_gamma).gamma == best_of(8, min_gamma, row, token, 1.06)
    assert Auto(8, costs, 5, min_gamma).gamma == 5
    assert Auto(8, costs, min_gain=9.0, min_gamma=min_gamma).gamma == min_gamma


@pytest.mark.parametrize(("token", "gamma"), [(0.6, 1), (0.605, 0)])
def test_auto_requires_a_gain_of_6_percent(token: float, gamma: int) -> None:
    """One token yields 1.7 tokens in 1.6 or 1.605 passes: 1.0625 or 1.0592."""
    assert Auto(1, CostModel(token=token)).gamma == gamma


def test_auto_notes_acceptance_and_cost() -> None:
    policy = Auto(4, CostModel(token=0.25), start=2)
    assert policy.notes == {"auto_a1": pytest.approx(0.7), "auto_c": 0.25}
    policy.observe(step(2, 2, i=0))
    assert policy.notes == {"auto_a1": pytest.approx(0.7), "auto_c": 0.25} and policy.gamma == 2
    for _ in range(3):
        policy.observe(step(2, 2, draft_s=0.6, verify_s=2.0))  # 0.3 s per token in passes of 2 s
    assert policy.notes["auto_c"] == pytest.approx(0.15) and policy.notes["auto_a1"] > 0.75


def test_auto_fits_a_line_to_the_measured_passes() -> None:
    """Passes take 2 s and 0.5 s per further row; the model assumes 1 and 0.5, which gives the same line."""
    policy = Auto(4, CostModel({1: 1.0, 5: 3.0}, 0.1))
    for drafted in (1, 3, 1, 3):
        policy.observe(step(drafted, drafted, draft_s=0.2 * drafted, verify_s=2.0 + 0.5 * drafted))
    assert policy._verification_s() == pytest.approx([2.0, 2.5, 3.0, 3.5, 4.0])
    assert policy._token_s() == pytest.approx(0.2)
    single = Auto(2, CostModel({1: 1.0, 3: 2.0}))
    single.observe(step(1, 1, verify_s=3.0))  # 1.5 in the model
    assert single._verification_s() == pytest.approx([2.0, 3.0, 4.0])
    falling = Auto(2, CostModel({1: 1.0, 3: 2.0}))
    for drafted, seconds in ((0, 3.0), (1, 1.0)):
        falling.observe(step(drafted, drafted, verify_s=seconds))
    assert falling._verification_s() == pytest.approx([2.0] * 3)  # the mean


@pytest.mark.parametrize(
    ("gamma", "drafted", "accepted", "expected"),
    [(5, 5, 4, 6), (5, 5, 3, 5), (5, 5, 2, 4), (5, 4, 3, 5), (6, 5, 4, 6), (3, 5, 2, 3), (5, 0, 0, 5)],
)
def test_dynamic_thresholds_are_inclusive(gamma: int, drafted: int, accepted: int, expected: int) -> None:
    policy = Dynamic(gamma, 3, 6)
    policy.observe(step(drafted, accepted))
    assert policy.gamma == expected


@pytest.mark.parametrize(
    ("gamma", "drafted", "accepted", "expected"), [(5, 5, 5, 7), (6, 5, 5, 7), (5, 5, 4, 4), (2, 2, 0, 2), (5, 0, 0, 5)]
)
def test_heuristic_bounds(gamma: int, drafted: int, accepted: int, expected: int) -> None:
    policy = Heuristic(gamma, 7, 2)
    policy.observe(step(drafted, accepted))
    assert policy.gamma == expected and Heuristic(2, 7).min_gamma == 1


CERTAIN = torch.tensor([0.0] + [-1e4] * 15)  # entropy 0, exactly
EVEN = torch.tensor([0.0] * 2 + [-1e4] * 14)  # entropy ln 2


def test_thresholds_of_logits_are_inclusive() -> None:
    assert length(svip(4, threshold=0.0), CERTAIN) == length(confidence(4, threshold=0.5), EVEN) == 4
    assert length(AdaEdl(4, threshold=1.0), CERTAIN) == length(PathProbability(4, threshold=1.0), CERTAIN) == 4
    assert length(confidence(4, threshold=0.51), EVEN) == length(AdaEdl(4, threshold=1.0), EVEN) == 0
    for policy in (svip(4, 2, 0.0), confidence(4, 2, 0.51), AdaEdl(4, 2, threshold=1.0), PathProbability(4, 2, 0.51)):
        assert length(policy, EVEN) == 2 and policy.needs_logits  # the minimum
        assert not policy.may_extend(4, CERTAIN) and policy.may_extend(1, None)
    assert svip(4).may_extend(3, None) and AdaEdl(4).may_extend(3, None)
    bound = 1 - math.sqrt(0.2 * math.log(2))  # 0.6277
    assert length(AdaEdl(4, threshold=bound - 1e-3), EVEN) == 4 and length(AdaEdl(4, threshold=bound + 1e-3), EVEN) == 0
    bound = math.sqrt(0.15 * math.log(2))  # 0.3225
    assert length(svip(4, threshold=bound + 1e-3), EVEN) == 4 and length(svip(4, threshold=bound - 1e-3), EVEN) == 0
    assert length(svip(4), EVEN) == 0 and length(confidence(4), torch.tensor([0.0] * 3 + [-1e4] * 13)) == 0


def test_adaedl_smooths_acceptance() -> None:
    policy = AdaEdl(8, rate=0.75, step=0.125, threshold=0.5, target_acceptance=0.5)
    thresholds = []
    for accepted in (2, 2, 0, 0, 4, 4, 4):  # of 4
        policy.observe(step(4, accepted))
        thresholds.append((policy.accepted, policy.threshold))
    smoothed = [0.5, 0.5, 0.375, 0.28125, 0.4609375, 0.595703125, 0.69677734375]
    assert thresholds == [*zip(smoothed, (0.375, 0.25, 0.375, 0.5, 0.625, 0.5, 0.375), strict=True)]
    policy.observe(step(0, 0))
    assert policy.accepted == smoothed[-1]
    low, high = AdaEdl(4, step=0.75, threshold=0.5), AdaEdl(4, step=0.75, threshold=0.5)
    low.observe(step(4, 4))
    high.observe(step(4, 0))
    assert (low.threshold, high.threshold) == (0.0, 1.0)


def test_egag_averages_entropies_with_its_weight() -> None:
    policy = Egag(1, 9, beta=0.75)
    assert (policy.gamma, policy.entropy_gamma, policy.notes) == (9, 9, {})
    assert policy.may_extend(8, None) and not policy.may_extend(9, None)
    assert policy.may_extend(8, CERTAIN) and policy.notes == {"h_norm": 0.0, "h_norm_ema": 0.0, "gamma": 9}
    policy.may_extend(0, FLAT)  # 0.75 * 0 + 0.25 * 1
    assert policy.notes == pytest.approx({"h_norm": 1.0, "h_norm_ema": 0.25, "gamma": 7})
    assert policy.may_extend(6, None) and not policy.may_extend(7, None)
    policy.may_extend(0, EVEN)  # ln 2 / ln 16 = 1/4
    assert policy.notes == pytest.approx({"h_norm": 0.25, "h_norm_ema": 0.25, "gamma": 7})
    assert Egag(1, 9).beta == 0.5 and Egag(1, 9).needs_logits


def test_a_path_ends_at_its_threshold() -> None:
    policy = PathProbability(8, threshold=0.25)
    assert [policy.may_extend(n, EVEN) for n in range(3)] == [True, True, False]  # 1/2, 1/4, 1/8
    assert policy.may_extend(0, EVEN) and policy.may_extend(1, None)  # 1/2, then 1/4 is expected
    assert policy.may_extend(1, EVEN) and not policy.may_extend(2, None)  # 1/4, then 1/16
    least = PathProbability(8, 2, threshold=0.9)
    assert least.may_extend(0, EVEN) and least.may_extend(1, None) and not least.may_extend(2, None)
    assert least.path_threshold is None and policy.path_threshold == 0.25


def test_the_costs_of_a_path_are_fixed() -> None:
    for five, row in ((1.0, 0.1), (1.55, 0.1), (1.57, 0.15), (1.87, 0.15), (1.89, 0.3)):  # per row: 0.1375 to 0.2225
        expected = PathProbability(4, 0, row, row, token_cost=0.05, step_cost=0.1)
        assert by_path(five) == expected
    one = POLICIES["path"].make(DraftLengths(1, 1, 1), CostModel({1: 1.0, 2: 1.5}))
    assert one == PathProbability(1, 1, 0.3, 0.3, token_cost=0.05, step_cost=0.1)
    assert POLICIES["path"].make(DraftLengths(0, 0, 0), CostModel()).threshold == 0.1


def test_gains_repay_losses_and_pauses_grow_to_their_limit() -> None:
    policy = PathProbability(8, row_cost=0.5, most_lost=(2.0, 1.0), retry_after=(2, 3))
    lengths = []
    for accepted in (0, 4, 0, 0, None, 0, None, 0, None):
        if accepted is not None:
            policy.observe(sourced("model", 2, accepted))  # costs 1, so 0, 4, 0, 0 lose 1, 0, 1, 2
            lengths.append(policy.path_threshold == math.inf)
            continue
        pause = 0
        while policy.path_threshold == math.inf:
            policy.observe(sourced("model", 2, 0))
            pause += 1
        lengths.append(pause)
    assert lengths == [False, False, False, True, 2, True, 3, True, 3]
    least = PathProbability(8, 1, row_cost=9.0)
    for _ in range(9):
        least.observe(sourced("model", 2, 0))
    assert least.may_extend(0, SURE) and least.may_extend(1, SURE)  # a minimum is never paused
    empty = PathProbability(8, step_cost=4.0)
    for paused in (False, True):
        empty.observe(step(0, 0))
        assert (empty.path_threshold == math.inf) == paused
    copied = PathProbability(8, row_cost=9.0)
    copied.observe(replace(step(2, 0), draft=Draft.chain((7, 7), origin=(Origin("head"), Origin("text")))))
    assert copied.path_threshold == 0.15


@pytest.mark.parametrize(
    ("policy", "asked", "lengths"),
    [
        (Policy("", Fixed, bounded=False), (4, None, None, 0.25), DraftLengths(4, 4, 4)),
        (Policy("", Fixed), (4, None, None, 0.25), DraftLengths(4, 0, 4, 0.25)),
        (Policy("", Fixed, least=3, most=12), (4, None, None), DraftLengths(4, 3, 12)),
        (Policy("", Fixed, least=3, most=12), (2, None, None), DraftLengths(2, 2, 12)),
        (Policy("", Fixed, least=3, most=12), (15, None, None), DraftLengths(15, 3, 15)),
        (Policy("", Fixed, least=3, most=12), (4, 20, None), DraftLengths(20, 20, 20)),
        (Policy("", Fixed, least=3, most=12), (4, 0, 2), DraftLengths(2, 2, 2)),
        (Policy("", Fixed, least=3, most=12), (4, None, 2), DraftLengths(2, 2, 2)),
        (Policy("", Fixed, least=3, most=12), (4, 6, 8), DraftLengths(6, 6, 8)),
    ],
)
def test_lengths_lie_between_the_bounds(policy: Policy, asked: tuple[Any, ...], lengths: DraftLengths) -> None:
    assert policy.lengths(*asked) == lengths and lengths.beta in (0.25, 0.5)
