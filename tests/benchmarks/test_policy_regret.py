"""Replayed runs have the distribution of real runs, and the regret of known cases is exact."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from benchmarks.policy_regret import RecordedAcceptance, Replay, main, regret, replay_speed
from specdemo.core.decode import decode
from specdemo.core.policies import Auto, CostModel, Fixed
from specdemo.core.theory import expected_tokens
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

P = {(): (0.6, 0.4), (0,): (0.9, 0.1), (1,): (0.2, 0.8)}  # distributions after each prefix
Q = {(): (0.3, 0.7), (0,): (0.5, 0.5), (1,): (0.6, 0.4)}
FREE = CostModel({1: 1.0, 9: 1.0}, 0.0)


def test_replayed_runs_accept_as_often_as_real_runs() -> None:
    """Distribution of the number of accepted drafts (of two) against an enumeration of Algorithm 1 (2211.17192)."""
    both = {prefix: [min(pair) for pair in zip(P[prefix], Q[prefix], strict=True)] for prefix in P}
    one = sum(both[()])
    two = sum(both[()][x] * sum(both[(x,)]) for x in (0, 1))
    real = [1 - one, one - two, two]
    replayed, runs = [0.0] * 3, 4000
    for x, y in product((0, 1), repeat=2):
        chances = [min(1.0, Q[prefix][z] / P[prefix][z]) for prefix, z in (((), x), ((x,), y))]
        for seed in range(runs):
            replay = Replay(RecordedAcceptance((0.0, *chances, 0.0), (0.0,) * 4), FREE, seed)
            steps = decode([1], replay, replay, Fixed(2), max_tokens=4, stop=(), clock=lambda: 0.0)
            accepted = len([step for step in steps if step.i <= 1][1].verdict.accepted)
            replayed[accepted] += P[()][x] * P[(x,)][y] / runs
    for share, expected in zip(replayed, real, strict=True):
        assert abs(share - expected) < 5 * 0.5 / runs**0.5  # false alarm rate below 1e-6


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_constant_acceptance_gives_the_speed_of_the_cost_model(alpha: float, gamma: int) -> None:
    costs = CostModel({1: 1.0, 2: 1.1, 9: 1.5}, 0.2)
    recorded = RecordedAcceptance((alpha,) * 4000, (alpha,) * 4000)
    expected = expected_tokens(alpha, gamma) / (costs.verify(gamma + 1) + 0.2 * gamma)
    runs = 20 if 0 < alpha < 1 else 1
    assert replay_speed(recorded, costs, Fixed(gamma), runs) == pytest.approx(expected, rel=0.01)


def test_the_prompt_cost_is_added_once_and_only_with_drafts() -> None:
    recorded = RecordedAcceptance((1.0,) * 21, (1.0,) * 21, prompt_cost=5.0)
    assert replay_speed(recorded, FREE, Fixed(0), 1) == 1.0
    assert replay_speed(recorded, FREE, Fixed(1), 1) == pytest.approx(20 / (10 + 5))


def test_known_losses_are_measured() -> None:
    """Gamma 8 is best for drafts that are always accepted and AR decoding for drafts that never are."""
    recipe = Recipe(temperature=0)
    good, bad = RecordedAcceptance((1.0,) * 91, (1.0,) * 91), RecordedAcceptance((0.0,) * 91, (0.0,) * 91)
    costs = CostModel({1: 1.0, 9: 1.0}, 0.25)
    never = regret("code", recipe, [bad, bad], costs, Fixed(8), 5)
    assert (never.best_gamma, never.best) == (0, 1.0) and never.ratio == pytest.approx(1 / 3, rel=0.1)
    always = regret("code", recipe, [good, good], costs, Fixed(8), 5)
    assert always.best_gamma == 8 and always.ratio == always.median == 1.0
    auto = regret("code", recipe, [good, bad], costs, Auto(8, costs), 5)
    assert auto.texts == 2 and auto.ratio > 1.1  # no gamma is good on both


@pytest.mark.parametrize("c", [0.02, 0.13, 0.5])
@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.9])
def test_auto_loses_little_to_the_best_fixed_gamma(alpha: float, c: float) -> None:
    costs = CostModel({1: 1.0, 2: 1.04, 9: 1.2}, c)
    recorded = [RecordedAcceptance((0.0, *(alpha,) * 400), (alpha,) * 401)]
    assert regret("code", Recipe(temperature=1.0), recorded, costs, Auto(8, costs), 8).ratio > 0.96


def test_the_command_prints_a_row_per_class_or_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_model(tmp_path / "model", byte_level_tokenizer(), num_hidden_layers=4))
    command = ["--target", folder, "--device", "cpu", "--method"]
    settings = ["--temperature", "1", "--kind", "prose", "--max-tokens", "24", "--runs", "2"]
    assert main([*command, "self", *settings]) == 0
    head, _, row, line = capsys.readouterr().out.splitlines()
    assert "best fixed gamma" in head and row.startswith("| prose | self auto T=1 | ")
    (record,) = json.loads(line)["policy_regret"]
    assert record["ratio"] == pytest.approx(record["speed"] / record["best"]) and 0 <= record["best_gamma"] <= 8
    assert main([*command, "nasd", *settings]) == 2
    assert "policy_regret supports the methods draft, self, not nasd" in capsys.readouterr().err
    assert main([*command, "self", "--policy", "svip", *settings]) == 2
    assert "needs the logits of every draft token" in capsys.readouterr().err
    assert main([*command, "self", "--runs", "0"]) == 2
