"""A trial sees what it should: exact rules give p back, lossy ones and mutants do not, and its yardsticks are right."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdemo.core.rules import RULES, match
from specdemo.core.sampling import SamplingParams, SharedNoise
from specdemo.core.simulate import chance_distance, distance, rare_distance, trial
from specdemo.core.step import Draft, Verdict

P, Q = [0.45, 0.32, 0.18, 0.05], [0.20, 0.30, 0.15, 0.35]
COUNT = 3_000


def off(rule: str, gamma: int = 1, q: list[float] = Q, **more: Any) -> float:
    done = trial(rule, torch.tensor(P), torch.tensor(q), gamma, COUNT, seed=1, **more)
    assert len(done.tokens) == COUNT and done.tested > done.accepted > 0
    return distance(done.shares(4), P)


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_just_the_exact_rules_give_p_back(rule: str, gamma: int) -> None:
    """The seed is fixed, so it never flickers; by chance one seed in a thousand would fail here."""
    assert (off(rule, gamma) < rare_distance(P, COUNT)) == RULES[rule].exact(SamplingParams())


def test_corrections_from_p_are_seen() -> None:
    assert off("rejection", adjust=False) > rare_distance(P, COUNT)


def test_mutants_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(draft: Draft, p: Any, accept: Any, correct: Any, start: int) -> Verdict:
        """The match rule with a correction that is drawn anew: the drafted token comes too often."""
        verdict = match(draft, p, accept, correct, start)
        return replace(verdict, token=correct.sample(p[0], start))

    def lenient(draft: Draft, p: Any, accept: Any, correct: Any, start: int, **more: Any) -> Verdict:
        class Coin:
            def test(self, probability: float) -> tuple[bool, float]:
                return accept.test(1.3 * probability)

        return RULES["rejection"].apply(draft, p, Coin(), correct, start, **more)

    sure = [0.0, 1.0, 0.0, 0.0]
    for mutant in (again, lenient):
        assert off("match", q=sure) < rare_distance(P, COUNT)
        with monkeypatch.context() as patched:
            patched.setitem(RULES, "match", replace(RULES["match"], apply=mutant))
            assert off("match", q=sure) > rare_distance(P, COUNT)


def test_rejection_keeps_the_overlap() -> None:
    done = trial("rejection", torch.tensor(P), torch.tensor(Q), 3, COUNT, seed=2)
    beta = sum(map(min, P, Q))
    assert done.accepted / done.tested == pytest.approx(beta, abs=4 * math.sqrt(beta * (1 - beta) / done.tested))


@pytest.mark.parametrize("gamma", [1, 4])
def test_coupled_tokens_are_those_of_plain_drawing(gamma: int) -> None:
    done = trial("coupled", torch.tensor(P), torch.tensor(Q), gamma, 300, seed=3)
    noise = SharedNoise(3)
    assert list(done.tokens) == [noise.sample(torch.tensor(P), place) for place in range(300)] and done.accepted > 0


def outcomes(p: list[float], count: int) -> Counter:
    """Every text of `count` tokens: its distance from p, and with what chance."""
    found: Counter = Counter()
    for tokens in itertools.product(range(len(p)), repeat=count):
        shares = [tokens.count(token) / count for token in range(len(p))]
        found[distance(shares, p)] += math.prod(p[token] for token in tokens)
    return found


@pytest.mark.parametrize("p", [[0.5, 0.3, 0.2], [0.9, 0.1, 0.0], [1 / 3, 1 / 3, 1 / 3]])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_usual_distance_is_the_mean_over_every_text(p: list[float], count: int) -> None:
    mean = sum(off * chance for off, chance in outcomes(p, count).items())
    assert chance_distance(p, count) == pytest.approx(mean)


@pytest.mark.parametrize("odds", [0.5, 0.1, 0.01])
def test_the_rare_distance_is_as_rare_as_it_says(odds: float) -> None:
    p = [0.5, 0.3, 0.2]
    bound = rare_distance(p, 9, odds)
    assert sum(chance for off, chance in outcomes(p, 9).items() if off > bound) <= odds


def test_a_sure_token_is_never_off() -> None:
    assert chance_distance([1.0, 0.0], 100) == 0 and distance([1.0, 0.0], [0.0, 1.0]) == 1
