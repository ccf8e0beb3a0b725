"""Draft-length policies: rules computed by hand, bounds, and the optimum of `Auto`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdemo.core.errors import UserError
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
from specdemo.recipe import Recipe

FLAT = torch.zeros(16)
SURE = torch.tensor([30.0] + [0.0] * 15)


def step(drafted: int, accepted: int, draft_s: float = 0.0, verify_s: float = 1.0, i: int = 1) -> Step:
    draft = Draft.chain((7,) * drafted)
    verdict = Verdict(tuple(range(accepted)), 1)
    return Step(i, (1,), draft, verdict, drafted, draft_s=draft_s, verify_s=verify_s, host_s=0.0, t=0.0)


def tree_step(depth: int, accepted: int, draft_s: float = 0.0, verify_s: float = 1.0, width: int = 4) -> Step:
    """Return a step with `width` nodes per level, the children of the first node of the last level."""
    parents = tuple(width * (level - 1) if level else -1 for level in range(depth) for _ in range(width))
    verdict = Verdict(tuple(width * level for level in range(accepted)), 1)
    draft = Draft((7,) * len(parents), parents, origin=(Origin("model"),) * len(parents))
    return Step(1, (1,), draft, verdict, depth, draft_s=draft_s, verify_s=verify_s, host_s=0.0, t=0.0)


def length(policy: Any, logits: torch.Tensor | None = None) -> int:
    """Draft length if every token has these logits."""
    n = 0
    while policy.may_extend(n, None) and policy.may_extend(n, logits):
        n += 1
        assert n < 100
    return n


def test_dynamic_follows_its_thresholds_and_bounds() -> None:
    policy = Dynamic(6, 3, 12)
    lengths = []
    for accepted in (6, 7, 3, 2, 0, 0, 0, 0):
        policy.observe(step(policy.gamma, min(accepted, policy.gamma)))
        lengths.append(policy.gamma)
    assert lengths == [7, 8, 7, 6, 5, 4, 3, 3]  # 3 of 8 is at most 0.4
    for _ in range(20):
        policy.observe(step(policy.gamma, policy.gamma))
    assert policy.gamma == 12
    policy.observe(step(0, 0))
    assert policy.gamma == 12  # steps without a draft are ignored


def test_heuristic_equals_that_of_transformers() -> None:
    policy = Heuristic(5, 20)
    policy.observe(step(5, 5))
    assert policy.gamma == 7
    policy.observe(step(7, 6))
    assert policy.gamma == 6
    for _ in range(10):
        policy.observe(step(policy.gamma, 0))
    assert policy.gamma == 1


def test_the_share_of_a_tree_is_that_of_its_longest_path() -> None:
    dynamic, heuristic, adaedl = Dynamic(4, 3, 12), Heuristic(4, 20), AdaEdl(4)
    for policy in (dynamic, heuristic, adaedl):
        policy.observe(tree_step(4, 4))
    assert (dynamic.gamma, heuristic.gamma, adaedl.accepted) == (5, 6, 1.0)
    for policy in (dynamic, heuristic, adaedl):
        policy.observe(tree_step(4, 1))
    assert (dynamic.gamma, heuristic.gamma, adaedl.accepted) == (4, 5, 0.625)


def test_egag_shortens_drafts_at_high_entropy() -> None:
    assert length(Egag(1, 8), FLAT) == 1 and length(Egag(1, 8), SURE) == 8
    half = torch.cat([torch.zeros(4), torch.full((12,), -1e4)])  # ln 4 / ln 16 = 1/2
    policy = Egag(2, 8)
    assert length(policy, half) == 5
    assert policy.notes == pytest.approx({"h_norm": 0.5, "h_norm_ema": 0.5, "gamma": 5})
    policy.may_extend(0, FLAT)
    assert policy.notes["h_norm_ema"] == pytest.approx(0.75, abs=1e-6)
    assert Egag(2, 9, h_norm_ema=0.75).entropy_gamma == 4  # 2 + 7 / 4
    assert length(Egag(1, 8)) == 8  # n-gram drafters have no logits


def test_entropy_bounds_and_confidence_end_drafts() -> None:
    h = math.log(16)
    assert length(svip(8), SURE) == 8 and length(svip(8), FLAT) == 0 and math.sqrt(0.15 * h) > 0.3
    assert length(confidence(8), SURE) == 8 and length(confidence(8), FLAT) == 0
    two = torch.tensor([1.0, 1.0] + [-1e4] * 14)
    assert length(confidence(8), two) == 8  # probability 1/2 each
    assert length(PathProbability(8), two) == 2  # 1/4, and 1/8 is below 0.15
    assert length(PathProbability(8), SURE) == 8
    policy = PathProbability(8)
    assert [length(policy, two) for _ in range(3)] == [2, 2, 2]  # reset for each draft


def by_path(five: float) -> PathProbability:
    """Return the policy for a cost of five rows, in passes of one."""
    return POLICIES["path"].make(DraftLengths(4, 0, 4), CostModel({1: 1.0, 5: five}, 0.1))


def test_paths_are_as_probable_as_a_row_is_expensive() -> None:
    assert [by_path(five).threshold for five in (1.0, 1.8, 2.0, 9.0)] == [0.15, 0.15, 0.3, 0.3]
    assert [by_path(five).row_cost for five in (1.0, 1.8, 2.0, 9.0)] == [0.15, 0.15, 0.3, 0.3]


def test_no_pass_is_spent_on_a_token_that_is_probably_too_improbable() -> None:
    """A path of 0.5 leads to 0.25, above the threshold; one of 0.3 to 0.09. N-grams have no paths."""
    policy, even = by_path(1.5), torch.zeros(2)
    assert policy.may_extend(0, None) and policy.may_extend(0, even) and policy.may_extend(1, None)
    assert policy.may_extend(1, even) and not policy.may_extend(2, None)
    assert policy.may_extend(0, None) and policy.may_extend(3, None)


def test_noise_of_a_measurement_does_not_change_drafts() -> None:
    """Otherwise a seed would not give the same sampled text in another process."""
    assert by_path(1.0) == by_path(1.8) and by_path(2.0) == by_path(2.6)


def sourced(source: str | None, drafted: int, accepted: int, seconds: float = 1.0) -> Step:
    plain = step(drafted, accepted, verify_s=seconds)
    return replace(plain, draft=replace(plain.draft, origin=(Origin(source),) * drafted))


def test_drafts_that_lose_pause_and_are_tried_again() -> None:
    policy, pauses = by_path(2.0), []
    for _ in range(3):
        tried = 0
        while policy.path_threshold != math.inf:
            policy.observe(sourced("head", 2, 0, seconds=tried))
            tried += 1
        assert length(policy, SURE) == 0 and policy.may_extend(0, None)  # n-grams have no logits
        paused = 0
        while policy.path_threshold == math.inf:
            policy.observe(sourced("text", 2, paused % 3))
            paused += 1
        pauses.append((tried, paused))
    assert pauses == [(10, 32), (4, 64), (4, 128)]  # a lost step costs 0.1 + 2 rows at 0.3 + 3 tokens at 0.05 = 0.85


def test_a_tree_costs_a_row_per_node_and_a_draft_step_per_level() -> None:
    """A loss of 0.1 + 4 rows at 0.3 + 2 draft steps at 0.05 = 1.4 is below 8 until the sixth."""
    policy, tried = by_path(2.0), 0
    while policy.path_threshold != math.inf:
        policy.observe(tree_step(1, 0))
        tried += 1
    assert tried == 6


@pytest.mark.parametrize(("source", "accepted"), [("head", 1), ("text", 0)])
def test_drafts_that_gain_or_copy_never_pause(source: str, accepted: int) -> None:
    policy = by_path(2.0)
    for _ in range(200):
        policy.observe(sourced(source, 2, accepted))
    assert policy.path_threshold == 0.3


def test_adaedl_adjusts_its_threshold_to_acceptance() -> None:
    policy = AdaEdl(8)
    assert length(policy, SURE) == 8 and length(policy, FLAT) == 0
    policy.observe(step(4, 4))
    assert policy.threshold == pytest.approx(0.39)
    for _ in range(4):
        policy.observe(step(4, 0))
    assert policy.threshold > 0.39 and policy.notes == {"lambda": policy.threshold}


@pytest.mark.parametrize(
    ("alpha", "c", "expected"),
    [(0.9, 0.05, 8), (0.8, 0.2, 4), (0.6, 0.2, 2), (0.6, 0.05, 4), (0.1, 0.5, 0)],
)
def test_auto_finds_the_best_gamma(alpha: float, c: float, expected: int) -> None:
    """Acceptance rate alpha, cost c: the optimum of the closed form, +-1; no draft if none is faster."""
    policy, rng = Auto(8), torch.Generator().manual_seed(0)
    policy.observe(step(0, 0, verify_s=50.0, i=0))  # the time of the prefill is not representative
    seen = []
    for _ in range(600):
        drafted = policy.gamma
        kept = 0
        while kept < drafted and float(torch.rand((), generator=rng)) < alpha:
            kept += 1
        policy.observe(step(drafted, kept, draft_s=c * drafted))
        seen.append(policy.gamma)
    typical = sorted(seen[100:])[len(seen[100:]) // 2]
    assert abs(typical - expected) <= 1
    if expected == 0:
        assert seen.count(0) > 0.85 * len(seen) and 1 in seen[100:]  # drafts occasionally to measure again


def settled(policy: Auto, rounds: int = 40, c: float = 0.13) -> int:
    """Gamma after steps that accept two of three draft tokens, at cost c per token."""
    for _ in range(rounds):
        drafted = policy.gamma
        policy.observe(step(drafted, min(2, drafted), draft_s=c * drafted))
    return policy.gamma


def test_one_slow_step_does_not_change_auto() -> None:
    disturbed, quiet = Auto(8), Auto(8)
    gamma = settled(disturbed)
    assert settled(quiet) == gamma and disturbed.notes["auto_c"] == pytest.approx(0.13)
    disturbed.observe(step(gamma, 2, draft_s=9.0))
    disturbed.observe(step(gamma, 2, draft_s=0.13 * gamma, verify_s=60.0))
    for _ in range(2):
        quiet.observe(step(gamma, 2, draft_s=0.13 * gamma))
    assert disturbed.gamma == quiet.gamma and disturbed.notes == pytest.approx(quiet.notes)


def test_the_prefill_of_the_drafter_is_not_a_draft_cost() -> None:
    policy = Auto(8, CostModel(token=0.2))
    policy.observe(step(3, 2, draft_s=40.0))
    assert policy.notes["auto_c"] == 0.2
    policy.observe(step(3, 2, draft_s=0.39))
    assert policy.notes["auto_c"] == pytest.approx(0.13)


def test_auto_recovers_when_drafts_become_inexpensive() -> None:
    """A draft after AR steps also reads their text, which is not the cost of a draft token."""
    policy, cost, unread = Auto(8, CostModel(token=5.0)), 5.0, 0
    for i in range(1200):
        cost = 0.05 if i > 300 else cost
        drafted = policy.gamma
        policy.observe(step(drafted, drafted, draft_s=cost * drafted + 0.1 * unread * (drafted > 0)))
        unread = 0 if drafted else unread + 1
    assert policy.gamma == 8 and policy.notes["auto_c"] == pytest.approx(0.05)


def test_auto_learns_that_rows_cost_less_than_in_the_model() -> None:
    """Verification also samples, which costs the same for all lengths."""
    policy = Auto(8, CostModel({1: 1.0, 9: 5.0}), start=2)
    for _ in range(400):
        drafted = policy.gamma
        policy.observe(step(drafted, drafted, draft_s=0.1 * drafted, verify_s=1.0 + 0.05 * drafted))
    assert policy.gamma == 8


def test_auto_uses_the_cost_model() -> None:
    """If cost grows in proportion to the rows, no draft is faster; drafts end before a jump in cost."""
    assert settled(Auto(8, CostModel({1: 1.0, 8: 8.0}))) == 0
    flat, step_up = Auto(8), Auto(8, CostModel({1: 1.0, 2: 1.0, 3: 3.0}))
    assert settled(flat) == 2 and settled(step_up) == 1


def test_costs_are_interpolated_and_extrapolated() -> None:
    prices = CostModel({1: 1.0, 2: 1.1, 5: 1.4, 8: 1.4})
    assert [prices.verify(n) for n in (1, 2, 3, 5, 8, 20)] == pytest.approx([1.0, 1.1, 1.2, 1.4, 1.4, 1.4])
    assert CostModel({1: 1.0, 2: 1.1}).verify(4) == pytest.approx(1.3)
    disturbed = CostModel(
        {1: 1.0, 2: 1.1, 5: 2.5, 8: 1.4}
    )  # more rows never cost less: 5 were measured in a bad moment
    assert disturbed.verify(5) == pytest.approx(1.4)
    assert CostModel().verify(9) == 1.0


def test_auto_retries_at_increasing_intervals() -> None:
    policy = Auto(8, CostModel(token=5.0))
    waits, idle = [], 0
    for _ in range(1500):
        drafted = policy.gamma
        idle = 0 if drafted else idle + 1
        waits += [idle] if not drafted else []
        policy.observe(step(drafted, 0, draft_s=5.0 * drafted))
    ends = [wait for wait, after in zip(waits, waits[1:], strict=False) if after == 1]
    assert ends[:3] == [64, 128, 256] and len(ends) > 5 and set(ends[3:]) == {256}


def test_auto_uses_beta_for_chains_and_counts_for_trees() -> None:
    lucky = Verdict((0,), 1, draw=(0.1,), beta=(0.25,))
    told = Step(1, (7, 1), Draft.chain((7,)), lucky, 1, draft_s=0.1, verify_s=1.0, host_s=0.0, t=0.0)
    policy, other = Auto(8), Auto(8)
    policy.observe(told)
    other.observe(step(1, 1, draft_s=0.1))
    assert policy.notes["auto_a1"] < 0.7 < other.notes["auto_a1"]
    tree = Draft((7, 8, 9), (-1, -1, 0))  # 7 or 8, and 9 after 7
    whole = Step(1, (7, 9, 1), tree, Verdict((0, 2), 1), 2, draft_s=0.1, verify_s=1.0, host_s=0.0, t=0.0)
    policy = Auto(8)
    policy.observe(whole)  # no token was rejected
    assert all(rate >= 0.7 for rate in policy._acceptance.rates)


@pytest.mark.parametrize(
    ("token_s", "row_s", "expected"), [(0.1, 0.0, 8), (0.1, 0.05, 2), (0.1, 1.0, 0), (2.0, 0.0, 0)]
)
def test_auto_chooses_the_depth_of_trees(token_s: float, row_s: float, expected: int) -> None:
    """A level costs a draft step and four rows; two tokens are accepted if rows have costs, otherwise all."""
    policy, depths = Auto(8, CostModel({1: 1.0, 9: 1 + 8 * row_s}, 0.1), start=4), []
    for _ in range(300):
        depth = policy.gamma
        accepted = min(depth, 2) if row_s else depth
        policy.observe(tree_step(depth, accepted, draft_s=token_s * depth, verify_s=1 + 4 * row_s * depth))
        depths.append(policy.gamma)
    assert sorted(depths[100:])[100] == expected


def test_auto_measures_a_draft_step_per_level() -> None:
    policy = Auto(8)
    for _ in range(3):
        policy.observe(tree_step(4, 4, draft_s=0.4))
    assert policy.notes["auto_c"] == pytest.approx(0.1)


def test_bounds_come_from_the_recipe_or_the_policy() -> None:
    assert Recipe(policy="dynamic").gamma_bounds == (3, 12)
    assert Recipe(policy="egag", gamma_min=2, gamma_max=5).gamma_bounds == (2, 5)
    assert Recipe(policy="egag", gamma=6).gamma_bounds == (1, 6)
    assert Recipe(policy="svip", gamma=6).gamma_bounds == (
        0,
        6,
    )
    assert Recipe(policy="dynamic", gamma=2).gamma_bounds == (2, 12)
    assert Recipe(policy="dynamic", gamma=2, gamma_min=4).draft_lengths.gamma == 4
    with pytest.raises(UserError, match="gamma_min 5 is above gamma_max 4"):
        Recipe(policy="egag", gamma_min=5, gamma_max=4)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("gamma", [1, 2, 6])
def test_gamma_is_the_longest_first_draft(name: str, gamma: int) -> None:
    made = POLICIES[name].make(Recipe(policy=name, gamma=gamma).draft_lengths, CostModel())
    assert made.gamma == length(made) == gamma and made.notes is not None


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.bounded])
def test_bounds_limit_every_draft(name: str) -> None:
    policy = POLICIES[name].make(Recipe(policy=name, gamma_min=2, gamma_max=5).draft_lengths, CostModel(token=9.0))
    for logits, accepted in ((FLAT, 0), (SURE, 1)):
        for _ in range(12):
            drafted = min(policy.gamma, length(policy, logits))
            assert 2 <= drafted <= 5
            policy.observe(step(drafted, accepted * drafted, draft_s=9.0 * (1 - accepted) * drafted))
        assert drafted == (5 if accepted else 2)


def test_fixed_drafts_have_no_bounds() -> None:
    for bound in ({"gamma_min": 1}, {"gamma_max": 8}):
        with pytest.raises(UserError, match="has no effect with policy fixed: set gamma, or choose policy dynamic"):
            Recipe(**bound)


# --- by hand ---


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
    for five, row in ((1.0, 0.15), (1.87, 0.15), (1.89, 0.3)):  # 0.2175 and 0.2225 per row
        expected = PathProbability(4, 0, row, row, token_cost=0.05, step_cost=0.1)
        assert by_path(five) == expected
    one = POLICIES["path"].make(DraftLengths(1, 1, 1), CostModel({1: 1.0, 2: 1.5}))
    assert one == PathProbability(1, 1, 0.3, 0.3, token_cost=0.05, step_cost=0.1)
    assert POLICIES["path"].make(DraftLengths(0, 0, 0), CostModel()).threshold == 0.15


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
        (Policy("", Fixed, least=3, most=12), (4, 0, 2), DraftLengths(2, 0, 2)),
        (Policy("", Fixed, least=3, most=12), (4, None, 2), DraftLengths(2, 2, 2)),
        (Policy("", Fixed, least=3, most=12), (4, 6, 8), DraftLengths(6, 6, 8)),
    ],
)
def test_lengths_lie_between_the_bounds(policy: Policy, asked: tuple[Any, ...], lengths: DraftLengths) -> None:
    assert policy.lengths(*asked) == lengths and lengths.beta in (0.25, 0.5)


def test_registered_policies_receive_their_bounds() -> None:
    lengths, costs = DraftLengths(4, 2, 6, 0.25), CostModel({1: 1.0, 7: 2.0}, 0.1)
    made = {name: policy.make(lengths, costs) for name, policy in POLICIES.items()}
    assert made["fixed"] == Fixed(4) and made["dynamic"] == Dynamic(4, 2, 6) and made["heuristic"] == Heuristic(4, 6, 2)
    assert made["egag"] == Egag(2, 6, 0.25) and made["adaedl"] == AdaEdl(6, 2) and made["auto"] == Auto(6, costs, 4, 2)
    for name in ("svip", "confidence"):
        assert (made[name].gamma, made[name].min_gamma) == (6, 2)
    assert Fixed(4).notes == {} and Fixed(4).path_threshold is None and not Fixed(4).needs_logits
