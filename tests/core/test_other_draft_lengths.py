"""Other draft lengths on the same text: against rounds that are really drawn, and against the closed form."""

from __future__ import annotations

import random
import statistics

import pytest

from specdemo.core.simulate import acceptance_probs, expected_steps, other_gammas
from specdemo.core.step import Draft, Step, Verdict
from specdemo.core.theory import expected_tokens


def drawn(chance: list[float], gamma: int, rng: random.Random) -> list[tuple[int, int]]:
    """Rounds as they happen: where each starts, and how many tokens it commits."""
    found, place = [], 0
    while place < len(chance):
        kept = 0
        while kept < gamma and place + kept < len(chance) and rng.random() < chance[place + kept]:
            kept += 1
        found.append((place, kept + 1))
        place += kept + 1
    return found


@pytest.mark.parametrize("gamma", [0, 1, 3, 6])
def test_expected_rounds_are_the_mean_of_drawn_ones(gamma: int) -> None:
    rng = random.Random(gamma)
    chance = [rng.random() for _ in range(40)]
    many = [len(drawn(chance, gamma, rng)) for _ in range(4000)]
    sigma = statistics.stdev(many) / len(many) ** 0.5 if gamma else 1e-9
    assert abs(expected_steps(chance, gamma) - statistics.fmean(many)) < 5 * sigma  # wrong once in 1.7 million


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_even_chances_give_the_closed_form(alpha: float) -> None:
    n = 4000
    for gamma in (1, 2, 5):
        assert n / expected_steps([alpha] * n, gamma) == pytest.approx(expected_tokens(alpha, gamma), rel=2e-3)


def step(i: int, betas: list[float | None], kept: int, tokens: int, **more: float) -> Step:
    times = {"draft_s": 0.002 * len(betas), "verify_s": 0.01 * (1 + 0.1 * len(betas)), "host_s": 0.001, "t": 0.0}
    draft = Draft.chain((7,) * len(betas))
    verdict = Verdict(tuple(range(kept)), 7, (0.5,) * len(betas), (None,) * len(betas), tuple(betas))
    return Step(i, (7,) * tokens, draft, verdict, 3, **(times | more))


def run(seed: int, count: int = 300, gamma: int = 3) -> tuple[list[Step], list[float]]:
    """A run of a known text: rounds drawn by the chances of its places."""
    rng = random.Random(seed)
    chance = [rng.choice((0.2, 0.6, 0.95)) for _ in range(count)]
    steps = [step(0, [], 0, 1)]
    for place, committed in drawn(chance, gamma, rng):
        betas: list[float | None] = [*chance[place : place + committed][:gamma]]
        betas += [None] * (gamma - len(betas))
        steps.append(step(len(steps), betas, committed - 1, min(committed, count - place)))
    return steps, chance


def test_the_chances_of_a_run_are_those_of_its_text() -> None:
    steps, chance = run(1)
    found = acceptance_probs(steps)
    assert len(found) == len(chance)
    known = [(a, b) for a, b in zip(found, chance, strict=True) if a in (0.2, 0.6, 0.95)]
    assert len(known) > 0.8 * len(chance) and all(a == b for a, b in known)  # all but the bonus tokens


def test_the_gamma_that_was_run_gives_what_was_measured() -> None:
    ratios = []
    for seed in range(12):
        steps, chance = run(seed)
        seconds = sum(one.draft_s + one.verify_s + one.host_s for one in steps[1:])
        (same,) = other_gammas(steps, [3], lambda rows: 0.9 + 0.1 * rows)
        ratios.append(same.tokens_per_second / (len(chance) / seconds))
    assert statistics.fmean(ratios) == pytest.approx(1, abs=0.03)


def test_a_dear_drafter_is_told_to_draft_less() -> None:
    steps, _ = run(3)
    cheap = other_gammas(steps, range(9), lambda rows: 1.0)
    dear = other_gammas(steps, range(9), lambda rows: rows)
    best = [max(some, key=lambda one: one.tokens_per_second).gamma for some in (cheap, dear)]
    assert best[0] > best[1] == 0
    passes = [one.tokens_per_pass for one in cheap]
    assert passes == sorted(passes) and passes[0] == 1


def test_nothing_is_made_of_nothing() -> None:
    assert acceptance_probs([step(0, [], 0, 1), step(1, [], 0, 1)]) == []
    assert other_gammas([step(0, [], 0, 1), step(1, [], 0, 1)], [1, 2], lambda rows: 1.0) == []
    forest = Step(1, (7,), Draft((1, 2), (-1, -1)), Verdict((), 7, (0.5, 0.5), (None, None), (0.5, 0.5)), 3, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="chains only"):
        acceptance_probs([forest])
