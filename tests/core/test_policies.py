"""Draft-length policies: rules computed by hand, bounds, the optimum of `Auto`, and texts that share passes."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdemo.core.errors import UserError
from specdemo.core.policies import (
    POLICIES,
    AdaEdl,
    Auto,
    BatchLimit,
    Confidence,
    CostModel,
    DraftLengths,
    Dynamic,
    Egag,
    Fixed,
    Heuristic,
    PathProbability,
    Svip,
)
from specdemo.core.step import Draft, Origin, Step, Verdict
from specdemo.recipe import Recipe, plan_run
from specdemo.shared_passes import SharedPassRecord

FLAT = torch.zeros(16)
SURE = torch.tensor([30.0] + [0.0] * 15)
PAUSED = [math.inf] * 4


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


def sourced(source: str | None, drafted: int, accepted: int, seconds: float = 1.0) -> Step:
    plain = step(drafted, accepted, verify_s=seconds)
    return replace(plain, draft=replace(plain.draft, origin=(Origin(source),) * drafted))


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


@pytest.mark.parametrize(
    ("two", "four", "costs"),
    [
        (1.11, 1.33, [0.1, 0.1, 0.1, 0.1]),  # rows at 0.11
        (1.13, 1.39, [0.22, 0.22, 0.22, 0.1]),  # at 0.13; eight rows cost little more
        (1.0, 1.42, [0.1, 0.3, 0.3, 0.1]),
        (1.6, 2.7, [0.6, 0.6, 0.6, 0.1]),
    ],
)
def test_costs_of_tokens_are_rounded_by_row_and_have_a_minimum(two: float, four: float, costs: list[float]) -> None:
    passes = CostModel({1: 1.0, 2: two, 4: four, 8: four + 0.04}, token=0.1)
    assert POLICIES["path"].make(DraftLengths(4, 0, 4), passes).costs == pytest.approx(costs)
    assert POLICIES["path"].make(DraftLengths(2, 0, 2), CostModel()).costs == [0.05, 0.05]


@pytest.mark.parametrize(("overlap", "mass"), [(0.75, 0.75), (None, 0.0)])
def test_sampled_acceptance_is_estimated_by_the_overlap(overlap: float | None, mass: float) -> None:
    policy = Auto(4)
    verdict = Verdict((0,), 1, draw=(0.1, 0.9, None), beta=(overlap, 0.25, None))
    policy.observe(replace(step(3, 1), verdict=verdict))
    mean = (mass + 0.25 + 12 * 0.7) / (2 + 12)  # two tests, and a prior of 0.7 with the weight of 12
    assert policy.notes["auto_a1"] == pytest.approx((mass + 12 * mean) / (1 + 12))


def test_drafts_that_lose_pause_and_are_tried_again() -> None:
    policy, pauses = PathProbability(4, costs=(0.3, 0.45)), []
    for _ in range(3):
        tried = 0
        while policy.path_limits != PAUSED:
            policy.observe(sourced("head", 2, 0, seconds=tried))
            tried += 1
        assert length(policy, SURE) == 0 and policy.may_extend(0, None)  # n-grams have no logits
        paused = 0
        while policy.path_limits == PAUSED:
            policy.observe(sourced("text", 2, paused % 3))
            paused += 1
        pauses.append((tried, paused))
    assert pauses == [(10, 32), (4, 64), (4, 128)]  # a lost step costs 0.1 + 0.3 + 0.45 = 0.85


@pytest.mark.parametrize(("source", "accepted"), [("head", 1), ("text", 0)])
def test_drafts_that_gain_or_copy_never_pause(source: str, accepted: int) -> None:
    policy = PathProbability(4, costs=(0.3, 0.45))
    for _ in range(200):
        policy.observe(sourced(source, 2, accepted))
    assert policy.path_limits == [0.3, 0.45, 0.45, 0.45]


def test_a_tree_costs_all_its_nodes() -> None:
    policy = PathProbability(2, costs=(0.25, 0.5), most_lost=(3.75, 9.0))
    policy.observe(tree_step(2, 0))  # 0.1 + 0.25 + 7 * 0.5
    assert policy.path_limits == [math.inf] * 2


def test_copies_are_as_long_as_earlier_copies_were_accepted() -> None:
    policy, lengths = PathProbability(6, costs=(0.1, 0.3)), []
    for accepted in (0, 0, 0, *[1] * 30):
        lengths.append(length(policy))
        policy.observe(sourced("text", lengths[-1], accepted * lengths[-1]))
    assert lengths[:4] == [5, 1, 1, 1]  # 0.8, ..., 0.328, 0.262; then 0.356, 0.19; the first is always tried
    assert lengths[-1] == 6 and lengths[1:] == sorted(lengths[1:])
    policy.observe(sourced("head", 6, 0))
    assert length(policy) == 6


@pytest.mark.parametrize(
    ("alpha", "c", "expected"),
    [(0.9, 0.05, 8), (0.8, 0.2, 4), (0.6, 0.2, 2), (0.6, 0.05, 4), (0.1, 0.5, 0)],
)
def test_auto_finds_the_best_gamma(alpha: float, c: float, expected: int) -> None:
    """Acceptance rate alpha, cost c, passes of 1 ms: the optimum of the closed form, +-1; no draft if none pays."""
    policy, rng = Auto(8), torch.Generator().manual_seed(0)
    policy.observe(step(0, 0, verify_s=0.05, i=0))  # the time of the prefill is not representative
    seen = []
    for _ in range(600):
        drafted = policy.gamma
        kept = 0
        while kept < drafted and float(torch.rand((), generator=rng)) < alpha:
            kept += 1
        policy.observe(step(drafted, kept, draft_s=0.001 * c * drafted, verify_s=0.001))
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
    policy.observe(step(0, 0))
    for seconds in (9.0, 0.6):  # the first also reads the token of the AR step; older durations are dropped
        policy.observe(step(3, 2, draft_s=seconds))
    assert policy.notes["auto_c"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("costs", "passes", "first_row_s"),
    [
        ({1: 1.0, 3: 2.0}, [(1, 3.0), (1, 3.0)], 2.0),  # 1.5 in the model
        ({1: 1.0, 5: 3.0}, [(1, 2.5), (3, 3.5), (1, 2.5), (3, 3.5)], 2.0),  # a line through both
        ({1: 1.0, 3: 2.0}, [(1, 3.0), (2, 1.0), (1, 3.0), (2, 1.0)], 2.0),  # more rows are never cheaper: the mean
    ],
)
def test_measured_passes_scale_the_cost_model(
    costs: dict[int, float], passes: list[tuple[int, float]], first_row_s: float
) -> None:
    policy = Auto(4, CostModel(costs))
    for drafted, seconds in passes:
        policy.observe(step(drafted, drafted, draft_s=0.25 * drafted, verify_s=seconds))
    assert policy.notes["auto_c"] == pytest.approx(0.25 / first_row_s)


def test_auto_retries_at_increasing_intervals() -> None:
    """A retry drafts a token in two steps, since the first also reads the text of the AR steps."""
    policy, lengths = Auto(8, CostModel(token=5.0)), []
    for _ in range(1500):
        lengths.append(policy.gamma)
        policy.observe(step(lengths[-1], 0, draft_s=5.0 * lengths[-1]))
    retry = [1, 1]
    expected = [*[0] * 64, *retry, *[0] * 128, *retry, *([*[0] * 256, *retry] * 6)]
    assert lengths == expected[:1500]


def test_siblings_of_an_accepted_node_are_no_rejections() -> None:
    tree = Draft((7, 8, 9), (-1, -1, 0))  # 7 or 8, and 9 after 7
    policy = Auto(8)
    policy.observe(Step(1, (7, 9, 1), tree, Verdict((0, 2), 1), 2, draft_s=0.1, verify_s=1.0, host_s=0.0, t=0.0))
    assert policy.notes["auto_a1"] > 0.7


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


def bounds(recipe: Recipe) -> tuple[int, int]:
    lengths = plan_run(recipe).lengths
    return lengths.least, lengths.most


def test_bounds_come_from_the_recipe_or_the_policy() -> None:
    assert bounds(Recipe(policy="dynamic")) == (3, 12)
    assert bounds(Recipe(policy="egag", gamma_min=2, gamma_max=5)) == (2, 5)
    assert bounds(Recipe(policy="egag", gamma=6)) == (1, 6)
    assert bounds(Recipe(policy="svip", gamma=6)) == (0, 6)
    assert bounds(Recipe(policy="dynamic", gamma=2)) == (2, 12)
    for policy in ("dynamic", "egag", "heuristic"):  # they learn from drafts, and so always draft
        assert bounds(Recipe(policy=policy, gamma_min=0)) == bounds(Recipe(policy=policy)) >= (1, 1)
    assert plan_run(Recipe(policy="dynamic", gamma=2, gamma_min=4)).lengths.gamma == 4
    with pytest.raises(UserError, match="gamma_min 5 is above gamma_max 4"):
        Recipe(policy="egag", gamma_min=5, gamma_max=4)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("gamma", [1, 2, 6])
def test_gamma_is_the_longest_first_draft(name: str, gamma: int) -> None:
    made = POLICIES[name].make(plan_run(Recipe(policy=name, gamma=gamma)).lengths, CostModel())
    assert made.gamma == length(made) == gamma and made.notes is not None


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.bounded])
def test_bounds_limit_every_draft(name: str) -> None:
    policy = POLICIES[name].make(plan_run(Recipe(policy=name, gamma_min=2, gamma_max=5)).lengths, CostModel(token=0.9))
    for logits, accepted in ((FLAT, 0), (SURE, 1)):
        for _ in range(12):
            drafted = min(policy.gamma, length(policy, logits))
            assert 2 <= drafted <= 5
            policy.observe(step(drafted, accepted * drafted, draft_s=9.0 * (1 - accepted) * drafted))
        assert drafted == (5 if accepted else 2)


# --- values computed by hand ---


def test_costs_of_rows_and_passes() -> None:
    assert CostModel().row == 0.0 and CostModel({1: 1.0, 2: 1.5}).row == 0.5
    assert CostModel({1: 1.0, 2: 1.1, 5: 1.8}).row == pytest.approx(0.2)
    cheap = CostModel({1: 0.5, 3: 2.0})  # a pass costs at least that of one row
    assert [cheap.verify(rows) for rows in (1, 2, 3, 5)] == [1.0, 1.5, 2.0, 3.0]
    unordered = CostModel({8: 4.0, 1: 1.0, 4: 2.0})
    assert [unordered.verify(rows) for rows in (1, 2.5, 4, 6, 8)] == [1.0, 1.5, 2.0, 3.0, 4.0]


def test_auto_requires_a_gain_and_keeps_the_minimum() -> None:
    """At the prior acceptance of 0.7 a token of cost c gains 1.7 / (1 + c), which must exceed 1.06."""
    assert [Auto(1, CostModel(token=token)).gamma for token in (0.6, 0.61)] == [1, 0]
    assert Auto(8, CostModel({1: 1.0, 2: 1.0, 3: 3.0}), min_gamma=2).gamma == 2


@pytest.mark.parametrize(
    ("gamma", "drafted", "accepted", "expected"),
    [(5, 5, 4, 6), (5, 5, 3, 5), (5, 5, 2, 4), (5, 4, 3, 5), (6, 5, 4, 6), (3, 5, 2, 3), (5, 0, 0, 5)],
)
def test_dynamic_thresholds_are_inclusive(gamma: int, drafted: int, accepted: int, expected: int) -> None:
    policy = Dynamic(gamma, 3, 6)
    policy.observe(step(drafted, accepted))
    assert policy.gamma == expected


CERTAIN = torch.tensor([0.0] + [-1e4] * 15)  # entropy 0, exactly
EVEN = torch.tensor([0.0] * 2 + [-1e4] * 14)  # entropy ln 2
THIRDS = torch.tensor([0.0] * 3 + [-1e4] * 13)


def test_thresholds_of_logits_are_inclusive() -> None:
    assert length(Svip(4, threshold=0.0), CERTAIN) == length(Confidence(4, threshold=0.5), EVEN) == 4
    assert length(AdaEdl(4, threshold=1.0), CERTAIN) == length(PathProbability(4, costs=(1.0,)), CERTAIN) == 4
    for policy in (
        Svip(4, 2, 0.0),
        Confidence(4, 2, 0.51),
        AdaEdl(4, 2, threshold=1.0),
        PathProbability(4, 2, (0.51,)),
    ):
        assert length(policy, EVEN) == 2 and policy.needs_logits  # the minimum
        assert not policy.may_extend(4, CERTAIN) and policy.may_extend(1, None)
    assert length(Svip(4), EVEN) == length(Confidence(4), THIRDS) == 0 and length(Confidence(4), EVEN) == 4
    bound = 1 - math.sqrt(0.2 * math.log(2))
    assert length(AdaEdl(4, threshold=bound - 1e-3), EVEN) == 4 and length(AdaEdl(4, threshold=bound + 1e-3), EVEN) == 0
    bound = math.sqrt(0.15 * math.log(2))
    assert length(Svip(4, threshold=bound + 1e-3), EVEN) == 4 and length(Svip(4, threshold=bound - 1e-3), EVEN) == 0


def test_adaedl_smooths_acceptance() -> None:
    policy = AdaEdl(8, rate=0.75, step=0.125, threshold=0.5, target_acceptance=0.5)
    thresholds = []
    for accepted in (2, 2, 0, 0, 4, 4, 4):  # of 4
        policy.observe(step(4, accepted))
        thresholds.append((policy.accepted, policy.threshold))
    smoothed = [0.5, 0.5, 0.375, 0.28125, 0.4609375, 0.595703125, 0.69677734375]
    assert thresholds == [*zip(smoothed, (0.375, 0.25, 0.375, 0.5, 0.625, 0.5, 0.375), strict=True)]


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


def test_a_path_ends_at_its_threshold() -> None:
    policy = PathProbability(8, costs=(0.25,))
    assert [policy.may_extend(n, EVEN) for n in range(3)] == [True, True, False]  # 1/2, 1/4, 1/8
    assert policy.may_extend(0, EVEN) and policy.may_extend(1, None)  # 1/2, then 1/4 is expected
    assert policy.may_extend(1, EVEN) and not policy.may_extend(2, None)  # 1/4, then 1/16
    rising = PathProbability(8, costs=(0.25, 0.5, 0.75))
    assert rising.may_extend(0, EVEN) and not rising.may_extend(1, None)  # 1/4 is expected
    assert [rising.may_extend(n, logits) for n, logits in enumerate((CERTAIN, EVEN, EVEN))] == [True, True, False]
    least = PathProbability(8, 2, costs=(0.9,))
    assert least.may_extend(0, EVEN) and least.may_extend(1, None) and not least.may_extend(2, None)
    assert least.path_limits is None and policy.path_limits == [0.25] * 8


# --- texts that share passes ------------------------------------------------------------------------------------------


ROW = 0.2
COSTS = CostModel({1: 1.0, 6: 1 + 5 * ROW})


def limited(texts: int, work: float = 0.0, rounds: int = 0) -> BatchLimit:
    """Return the limit of four tokens in a pass over two rows per text, with `work` between passes per text.

    The unit of time is a pass over one row. `rounds` steps of a single text with four accepted tokens precede.
    """
    load: SharedPassRecord | None = None
    policy = BatchLimit(Fixed(4), COSTS, lambda: load, 4)
    for _ in range(rounds):
        policy.observe(step(4, 4))
    if texts > 1:
        load = SharedPassRecord(texts, 2 * texts, 1 + (2 * texts - 1) * ROW, work * texts)
    return policy


@pytest.mark.parametrize(
    ("texts", "work", "rounds", "length"),
    [
        *((texts, 0.0, 200, 4) for texts in (1, 2, 8, 32)),  # tokens that are always accepted are always drafted
        *((texts, 0.0, 0, length) for texts, length in ((1, 4), (2, 3), (4, 1), (8, 1), (32, 0))),
        *((32, work, 0, length) for work, length in ((0.1, 1), (0.2, 2), (0.4, 3), (1.0, 4))),
    ],
)
def test_drafts_are_shorter_the_more_texts_share_a_pass(texts: int, work: float, rounds: int, length: int) -> None:
    """Without observations each token is accepted with probability 0.7: 0.7, 0.49, 0.34, 0.24.

    A token costs t r / (1 + (t - 1) r + t work) with r = 0.2: 0.33 at two texts, 0.5 at four, 0.67 at eight, 0.89 at
    32; with work 0.62, 0.47, 0.32, 0.16.
    """
    policy = limited(texts, work, rounds)
    assert policy.gamma == length
    assert policy.notes == ({"texts": texts} if texts > 1 else {})
