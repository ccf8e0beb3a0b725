"""Simulated texts under each rule, and estimates of other draft lengths."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdemo.core.rules import RULES, match
from specdemo.core.sampling import SamplingParams, SharedNoise
from specdemo.core.simulate import (
    LEAST_S,
    GammaEstimate,
    RecordedStep,
    StepTimes,
    Trial,
    chance_distance,
    compared_verdicts,
    distance,
    other_gammas,
    rare_distance,
    recorded_steps,
    step_starts,
    trial,
)
from specdemo.core.step import Draft, Step, Verdict
from specdemo.core.theory import expected_tokens

pytestmark = pytest.mark.slow

P, Q = [0.45, 0.32, 0.18, 0.05], [0.20, 0.30, 0.15, 0.35]
COUNT = 3_000


def error(rule: str, gamma: int = 1, q: list[float] = Q, **more: Any) -> float:
    result = trial(rule, torch.tensor(P), torch.tensor(q), gamma, COUNT, seed=1, **more)
    assert len(result.tokens) == COUNT and result.tested > result.accepted > 0
    return distance(result.shares(4), P)


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_only_exact_rules_reproduce_p(rule: str, gamma: int) -> None:
    """Fixed seed; 1 seed in 1,000 would fail."""
    assert (error(rule, gamma) < rare_distance(P, COUNT)) == RULES[rule].exact(SamplingParams())


def test_corrections_from_p_are_detected() -> None:
    assert error("rejection", adjust=False) > rare_distance(P, COUNT)


def test_residuals_of_a_scalar_q_are_detected() -> None:
    assert error("rejection", scalar=True) > rare_distance(P, COUNT)


def test_mutants_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(draft: Draft, p: Any, accept: Any, correct: Any, start: int) -> Verdict:
        """Match rule with a second sample as correction: the draft token is too frequent."""
        verdict = match(draft, p, accept, correct, start)
        return replace(verdict, token=correct.sample(p[0], start))

    def lenient(draft: Draft, p: Any, accept: Any, correct: Any, start: int, **more: Any) -> Verdict:
        class Coin:
            def test(self, probability: float) -> tuple[bool, float]:
                return accept.test(1.3 * probability)

        return RULES["rejection"].apply(draft, p, Coin(), correct, start, **more)

    sure = [0.0, 1.0, 0.0, 0.0]
    for mutant in (again, lenient):
        assert error("match", q=sure) < rare_distance(P, COUNT)
        with monkeypatch.context() as patched:
            patched.setitem(RULES, "match", replace(RULES["match"], apply=mutant))
            assert error("match", q=sure) > rare_distance(P, COUNT)


def test_acceptance_rate_of_rejection_is_the_overlap() -> None:
    result = trial("rejection", torch.tensor(P), torch.tensor(Q), 3, COUNT, seed=2)
    beta = sum(map(min, P, Q))
    assert result.accepted / result.tested == pytest.approx(beta, abs=4 * math.sqrt(beta * (1 - beta) / result.tested))


@pytest.mark.parametrize("gamma", [1, 4])
def test_coupled_tokens_equal_direct_samples(gamma: int) -> None:
    result = trial("coupled", torch.tensor(P), torch.tensor(Q), gamma, 300, seed=3)
    noise = SharedNoise(3)
    assert list(result.tokens) == [noise.sample(torch.tensor(P), place) for place in range(300)] and result.accepted > 0
    same = trial("coupled", torch.tensor(P), torch.tensor(P), gamma, 300, seed=3)  # drafts use the noise of their place
    assert same.tokens == result.tokens and same.accepted == same.tested


def outcomes(p: list[float], count: int) -> Counter:
    """Distribution of the distance from p over all texts of `count` tokens."""
    distances: Counter = Counter()
    for tokens in itertools.product(range(len(p)), repeat=count):
        shares = [tokens.count(token) / count for token in range(len(p))]
        distances[distance(shares, p)] += math.prod(p[token] for token in tokens)
    return distances


@pytest.mark.parametrize("p", [[0.5, 0.3, 0.2], [0.9, 0.1, 0.0], [1 / 3, 1 / 3, 1 / 3]])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_chance_distance_is_the_mean_over_all_texts(p: list[float], count: int) -> None:
    mean = sum(error * chance for error, chance in outcomes(p, count).items())
    assert chance_distance(p, count) == pytest.approx(mean)


@pytest.mark.parametrize("odds", [0.5, 0.1, 0.01])
def test_rare_distance_is_exceeded_with_probability_at_most_odds(odds: float) -> None:
    p = [0.5, 0.3, 0.2]
    bound = rare_distance(p, 9, odds)
    assert sum(chance for error, chance in outcomes(p, 9).items() if error > bound) <= odds


def test_deterministic_tokens_have_distance_zero() -> None:
    assert chance_distance([1.0, 0.0], 100) == 0 and distance([1.0, 0.0], [0.0, 1.0]) == 1


def simulated(probs: list[float], gamma: int, rng: random.Random) -> list[tuple[int, int]]:
    """Simulate steps: start and number of committed tokens of each."""
    steps, position = [], 0
    while position < len(probs):
        accepted = 0
        while accepted < gamma and position + accepted < len(probs) and rng.random() < probs[position + accepted]:
            accepted += 1
        steps.append((position, accepted + 1))
        position += accepted + 1
    return steps


def expected_steps(probs: list[float], gamma: int) -> float:
    ends = [min(i + gamma, len(probs) - 1) for i in range(len(probs))]
    return sum(step_starts([probs[i:end] for i, end in enumerate(ends)]))


@pytest.mark.parametrize("gamma", [0, 1, 3, 6])
def test_expected_steps_equal_the_simulated_mean(gamma: int) -> None:
    rng = random.Random(gamma)
    probs = [rng.random() for _ in range(40)]
    counts = [len(simulated(probs, gamma, rng)) for _ in range(4000)]
    sigma = statistics.stdev(counts) / len(counts) ** 0.5 if gamma else 1e-9
    assert abs(expected_steps(probs, gamma) - statistics.fmean(counts)) < 5 * sigma  # wrong once in 1.7 million


def step(i: int, betas: list[float | None], accepted: int, tokens: int, **more: float) -> Step:
    times = {"draft_s": 0.002 * len(betas), "verify_s": 0.01 * (1 + 0.1 * len(betas)), "host_s": 0.001, "t": 0.0}
    draft = Draft.chain((7,) * len(betas))
    verdict = Verdict(tuple(range(accepted)), 7, (0.5,) * len(betas), (None,) * len(betas), tuple(betas))
    return Step(i, (7,) * tokens, draft, verdict, 3, **(times | more))


def run(seed: int, count: int = 300, gamma: int = 3) -> tuple[list[Step], list[float]]:
    """Simulate a run of a text with known acceptance probabilities."""
    rng = random.Random(seed)
    probs = [rng.choice((0.2, 0.6, 0.95)) for _ in range(count)]
    steps = [step(0, [], 0, 1)]
    for position, committed in simulated(probs, gamma, rng):
        betas: list[float | None] = [*probs[position : position + committed][:gamma]]
        betas += [None] * (gamma - len(betas))
        steps.append(step(len(steps), betas, committed - 1, min(committed, count - position)))
    return steps, probs


def speed(steps: list[Step]) -> float:
    tokens = sum(len(step.tokens) for step in steps[1:])
    return tokens / sum(step.draft_s + step.verify_s + step.host_s for step in steps[1:])


def pass_cost(rows: float) -> float:
    return 0.9 + 0.1 * rows


def test_acceptance_of_a_run_is_that_of_its_text() -> None:
    steps, probs = run(1)
    estimated = [beta for step in recorded_steps(steps) for beta in step.betas]
    assert len(estimated) == len(probs)
    known = [(a, b) for a, b in zip(estimated, probs, strict=True) if a is not None]
    assert len(known) > 0.8 * len(probs) and all(a == b for a, b in known)  # all but the bonus tokens
    counted = [beta for step in recorded_steps(steps, counted=True) for beta in step.betas if beta is not None]
    assert set(counted) == {0.0, 1.0} and sum(counted) == sum(step.accepted for step in steps)


def test_the_run_is_within_its_range() -> None:
    ratios, hits = [], 0
    for seed in range(20):
        steps, _ = run(seed)
        (same,) = other_gammas(steps, [3], pass_cost)
        ratios.append(same.tokens_per_second / speed(steps))
        hits += same.low <= speed(steps) <= same.high
        assert same.low < same.tokens_per_second < same.high
    assert statistics.fmean(ratios) == pytest.approx(1, abs=0.03)
    assert hits >= 16  # of 20 at 95 %: fails once in 3,000


def test_gamma_0_is_the_measured_ar_run() -> None:
    """Passes of AR decoding are cheaper than v(1) of the drafting run, since no draft evicts the weights."""
    steps, _ = run(4)
    plain = [step(i, [], 0, 1, verify_s=0.004 + 0.001 * (i % 3), host_s=0.0005) for i in range(100)]
    zero, one = other_gammas(steps, [0, 1], pass_cost, plain)
    assert zero.tokens_per_second == pytest.approx(speed(plain)) and zero.tokens_per_pass == 1
    assert zero.low < speed(plain) < zero.high
    without, same = other_gammas(steps, [0, 1], pass_cost)
    assert without.tokens_per_second < zero.tokens_per_second  # estimated from passes after drafts
    assert same.tokens_per_second == pytest.approx(one.tokens_per_second, rel=0.02)


@pytest.mark.parametrize("seconds", [0.0, 5e-324])
def test_no_estimate_without_durations(seconds: float) -> None:
    none = dict.fromkeys(("draft_s", "verify_s", "host_s"), seconds)
    steps = [step(i, [0.5, 0.5], 1, 2, **none) for i in range(1, 9)]
    assert other_gammas(steps, [0, 1, 3], pass_cost, [step(i, [], 0, 1, **none) for i in range(1, 4)]) == []


def test_no_estimate_without_tested_tokens() -> None:
    assert other_gammas([step(0, [], 0, 1), step(1, [], 0, 1)], [1, 2], lambda rows: 1.0) == []
    forest = Step(1, (7,), Draft((1, 2), (-1, -1)), Verdict((), 7, (0.5, 0.5), (None, None), (0.5, 0.5)), 3, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="^other draft lengths can be estimated for chains only$"):
        recorded_steps([forest])


# --- by hand ---


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


def test_shares_are_relative_frequencies() -> None:
    assert Trial((0, 2, 2, 0, 2), 1, 1, 1).shares(4) == [0.4, 0.0, 0.6, 0.0]


def test_a_trial_counts_its_steps() -> None:
    """If p equals q all drafts are accepted; a step commits gamma + 1 tokens."""
    p = torch.tensor(P)
    done = trial("rejection", p, p, 3, 10, seed=1)
    assert (len(done.tokens), done.rounds, done.tested, done.accepted) == (10, 3, 9, 9)
    assert trial("rejection", p, p, 3, 8, seed=1).rounds == 2
    never = trial("rejection", torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), 2, 4, seed=1)
    assert (never.tokens, never.rounds, never.tested, never.accepted) == ((1, 1, 1, 1), 4, 4, 0)
    assert trial("rejection", p, p, 3, 30, seed=1).tokens != trial("rejection", p, p, 3, 30, seed=2).tokens


def test_a_text_depends_on_its_seed_only() -> None:
    """Tokens before a limit are those of a longer text, and other draft lengths sample other tokens."""
    p, q = torch.tensor(P), torch.tensor(Q)
    long = trial("rejection", p, q, 2, 40, seed=5)
    assert trial("rejection", p, q, 2, 15, seed=5).tokens == long.tokens[:15]
    assert long.rounds > trial("rejection", p, q, 2, 15, seed=5).rounds


def test_a_scalar_q_excludes_the_drafted_token_only() -> None:
    """A draft of 0 with q = 0.8 is rejected with odds 1/2; then max(p - q, 0) without the q of 2 is p of 1 and 2."""
    p, q = torch.tensor([0.4, 0.3, 0.3]), torch.tensor([0.8, 0.0, 0.2])
    exact = trial("rejection", p, q, 1, 4000, seed=1).shares(3)
    scalar = trial("rejection", p, q, 1, 4000, seed=1, scalar=True).shares(3)
    assert exact == pytest.approx([0.4, 0.3, 0.3], abs=0.03)
    assert scalar[1] < 0.27 and scalar[2] > 0.33  # the correction is 1 or 2 with equal odds, instead of 3 : 1


@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
def test_compared_rules_decide_as_in_the_first_step_of_a_text(rule: str) -> None:
    p, q = torch.tensor(P), torch.tensor(Q)
    for seed in range(20):
        draft, (verdict,) = compared_verdicts([rule], p, q, 3, seed)
        tokens = (*(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens)
        assert trial(rule, p, q, 3, len(tokens), seed).tokens == tokens


def recorded(draft: int, verify_s: float, draft_s: float = 0.0, host_s: float = 0.0) -> RecordedStep:
    return RecordedStep((1.0,), draft, False, draft_s, verify_s, host_s)


def test_times_of_steps_are_means() -> None:
    """Passes of 2 and 4 rows take 0.6 s, v is 1 + rows / 2; two drafts of 1 and 3 tokens take 0.2 s."""
    steps = [recorded(1, 0.2, 0.05, 0.1), recorded(3, 0.4, 0.15, 0.3)]
    cost = lambda rows: 1 + rows / 2  # noqa: E731
    times = StepTimes.of(steps, cost, None)
    assert times == StepTimes(pytest.approx(0.12 * 1.5), pytest.approx(0.12), 0.05, 0.2, cost)
    assert times.step(2) == pytest.approx(0.12 * 2.5 + 0.1 + 0.2) and times.step(0) == pytest.approx(0.18 + 0.2)
    assert StepTimes.of(steps, cost, 0.5).plain == 0.5
    empty = [*steps, recorded(0, 0.3), recorded(0, 0.5)]
    times = StepTimes.of(empty, cost, 0.9)
    assert (times.plain, times.scale) == (0.4, pytest.approx(0.12)) and times.host == pytest.approx(0.1)
    assert StepTimes.of(steps[:1], cost, None).token == 0.05
    only_empty = StepTimes.of(empty[2:], cost, None)
    assert (only_empty.scale, only_empty.token, only_empty.plain) == (0.0, 0.0, 0.4)


def test_recorded_steps_contain_what_was_committed() -> None:
    steps = [
        step(0, [0.5], 1, 2),
        step(1, [0.5, 0.25, None], 1, 2, draft_s=9.0, verify_s=0.25),  # with the prompt of the drafter
        step(2, [0.75, 0.5, 0.25], 3, 4, verify_s=0.5),
        step(3, [], 0, 1),
        step(4, [0.5], 1, 1, verify_s=0.75),  # cut
    ]
    expected = [
        RecordedStep((0.5, 0.25), 3, False, pytest.approx(0.006), 0.25, 0.001),
        RecordedStep((0.75, 0.5, 0.25, None), 3, False, 0.006, 0.5, 0.001),
        RecordedStep((None,), 0, True, 0.0, 0.01, 0.001),
        RecordedStep((0.5,), 1, True, 0.002, 0.75, 0.001),
    ]
    assert recorded_steps(steps) == expected
    counted = [(1.0, 0.0), (1.0, 1.0, 1.0, None), (None,), (1.0,)]
    assert [record.betas for record in recorded_steps(steps, counted=True)] == counted
    quick = recorded_steps([step(1, [0.5], 1, 2, draft_s=0.001), step(2, [0.5], 1, 2, draft_s=0.002)])
    assert [record.draft_s for record in quick] == [0.001, 0.002]


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_certain_acceptance_gives_the_speed_without_randomness(gamma: int) -> None:
    """Twelve tokens after the prefill: steps of gamma + 1 tokens, the last of which is shorter."""
    times = {"draft_s": 0.03, "verify_s": 0.2, "host_s": 0.05}
    prefill = step(0, [], 0, 1, draft_s=9.0)
    steps = [prefill, *(step(i, [1.0] * 3, 3, 4, **times) for i in (1, 2, 3))]
    (estimate,) = other_gammas(steps, [gamma], lambda rows: rows, draws=5)
    seconds = tokens = 0.0
    count = 0
    while tokens < 12:
        drafted = min(gamma, 12 - int(tokens) - 1)
        seconds += 0.05 * (drafted + 1) + 0.01 * drafted + 0.05
        tokens, count = tokens + drafted + 1, count + 1
    speed = pytest.approx(12 / seconds)
    assert estimate == GammaEstimate(gamma, 12 / count, speed, speed, speed)


@pytest.mark.parametrize("plain_s", [None, 0.7])
def test_steps_without_a_draft_take_the_time_of_the_baseline(plain_s: float | None) -> None:
    """Of twelve tokens a draft of ten leaves one, by a pass over a row: 0.05 s as measured, or that of the baseline."""
    times = {"draft_s": 0.03, "verify_s": 0.2, "host_s": 0.05}
    steps = [step(0, [], 0, 1), *(step(i, [1.0] * 3, 3, 4, **times) for i in (1, 2, 3))]
    baseline = [] if plain_s is None else [step(i, [], 0, 1, verify_s=plain_s) for i in (0, 1)]
    (estimate,) = other_gammas(steps, [10], lambda rows: rows, baseline, draws=5)
    speed = pytest.approx(12 / (0.05 * 11 + 0.01 * 10 + 0.05 + (plain_s or 0.05) + 0.05))
    assert estimate == GammaEstimate(10, 6.0, speed, speed, speed)


def test_the_baseline_is_resampled() -> None:
    steps = [step(0, [], 0, 1), *(step(i, [1.0], 1, 2) for i in range(1, 9))]
    slow, quick = (step(i, [], 0, 1, verify_s=seconds, host_s=0.0) for i, seconds in ((1, 0.3), (2, 0.1)))
    prefill = step(0, [], 0, 1, verify_s=99.0)
    (plain,) = other_gammas(steps, [0], pass_cost, [prefill, slow, quick])
    assert plain == GammaEstimate(0, 1.0, pytest.approx(5.0), pytest.approx(1 / 0.3), pytest.approx(10.0))
    (constant,) = other_gammas(steps, [0], pass_cost, [prefill, quick, quick])
    assert constant == GammaEstimate(0, 1.0, *[pytest.approx(10.0)] * 3)
    after = other_gammas(steps, [0, 1], pass_cost, [prefill, quick, quick])
    assert [estimate.gamma for estimate in after] == [0, 1]
    assert [one.gamma for one in other_gammas(steps, [1, 0], pass_cost, [prefill, quick, quick])] == [1, 0]
    # Of 40 passes 14 to 26 are quick at 95 %: 40 tokens in 9.2 to 6.8 s.
    (many,) = other_gammas(steps, [0], pass_cost, [slow, quick] * 20)
    assert 4 < many.low < 5 < many.high < 6.5
    # No speed up to a nanosecond.
    assert other_gammas(steps, [0], pass_cost, [step(1, [], 0, 1, verify_s=LEAST_S, host_s=0.0)]) == []
    assert other_gammas(steps, [0, 1], pass_cost, [quick], draws=0) == []  # no range
    # Without drafts the pass of the baseline is used: 0.1 s and 0.001 s of the host.
    (estimated,) = other_gammas(steps, [1], pass_cost, [quick])
    assert estimated.tokens_per_pass == pytest.approx(2.0)


def test_untested_tokens_have_the_mean_acceptance() -> None:
    """Betas 0.5 and unknown, in steps of one draft token: a draft of one token is accepted with probability 0.5."""
    steps = [step(0, [], 0, 1), *(step(i, [0.5, None, None], 1, 2) for i in range(1, 101))]
    (one,) = other_gammas(steps, [1], pass_cost)
    assert one.tokens_per_pass == pytest.approx(expected_tokens(0.5, 1), rel=0.01)
    (three,) = other_gammas(steps, [3], pass_cost)
    assert three.tokens_per_pass == pytest.approx(expected_tokens(0.5, 3), rel=0.02)


def test_samples_without_tested_tokens_have_no_acceptance() -> None:
    """A response was late: one of four samples of two steps has no tested token."""
    steps = [step(1, [0.5], 1, 2), step(2, [None], 0, 1)]
    (one,) = other_gammas(steps, [1], pass_cost)
    # Of three tokens with acceptance 0.5, the second starts a pass after a rejection, the third unless it is drafted.
    assert one.tokens_per_pass == pytest.approx(3 / (1 + 0.5 + 1 - 0.5 * 0.5))


def test_estimates_are_of_120_reproducible_samples() -> None:
    steps, _ = run(6, 60)
    estimates = other_gammas(steps, [2], pass_cost)
    assert estimates == other_gammas(steps, [2], pass_cost, draws=120) != other_gammas(steps, [2], pass_cost, draws=121)
