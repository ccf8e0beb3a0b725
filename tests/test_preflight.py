"""Preflight: estimates against known results, and advice against drafting where it does not pay."""

from __future__ import annotations

import json
import math
import random
import statistics
from functools import cache

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from benchmarks import preflight_accuracy
from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.core.sampling import SamplingParams
from specdemo.core.theory import expected_tokens
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import build_pipeline
from specdemo.preflight import (
    MAX_GAMMA,
    Estimate,
    Preflight,
    encode_text,
    expected_speedup,
    preflight,
    step_outlooks,
    texts_for,
)
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe

TEXT = "def add(first, second):\n    return first + second\n\n\n" * 3
PROMPTS = [Prompt("code", f"code {i}", TEXT[i:]) for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "model", byte_level_tokenizer(), num_hidden_layers=4))


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8])
def test_constant_acceptance_gives_the_figures_of_theorem_3_8(alpha: float, gamma: int) -> None:
    outlooks = [([alpha] * MAX_GAMMA, True)] * 400
    v = dict.fromkeys(range(1, MAX_GAMMA + 2), 1.0)
    tokens, speedup = expected_speedup(outlooks, gamma, 0.1, v)
    assert tokens == pytest.approx(expected_tokens(alpha, gamma), rel=0.01)  # 400 tokens are finite
    assert speedup == pytest.approx(expected_tokens(alpha, gamma) / (1 + 0.1 * gamma), rel=0.01)


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_the_expected_number_of_steps_is_that_of_algorithm_1(gamma: int) -> None:
    """Against a recursion over positions."""
    rng = random.Random(gamma)
    length, chance = 40, [rng.random() for _ in range(60)]

    @cache
    def left(i: int) -> float:
        """Expected remaining steps after i tokens."""
        if i >= length:
            return 0.0
        count, path, steps = min(gamma, length - i - 1), 1.0, 1.0
        for k in range(count):
            steps += path * (1 - chance[i + k]) * left(i + k + 1)
            path *= chance[i + k]
        return steps + path * left(i + count + 1)

    outlooks = [(chance[i : i + MAX_GAMMA], True) for i in range(length + 1)]
    free = dict.fromkeys(range(1, MAX_GAMMA + 2), 1.0)
    tokens, speedup = expected_speedup(outlooks, gamma, 0.0, free)
    assert tokens == pytest.approx((length - 1) / left(1)) and speedup == pytest.approx(tokens)
    assert tokens > 1.2


def test_a_target_that_is_its_own_drafter_has_alpha_1_and_high_cost(folder: str) -> None:
    recipe = Recipe(target=folder, drafter=folder, temperature=1.0, top_p=1.0, device="cpu")
    pool = ModelPool()
    result = preflight(recipe, PROMPTS, pool)
    assert result.alpha == pytest.approx(1.0, abs=1e-4) and result.c > 0.3
    texts = [encode_text(pool.take(recipe.target_spec), prompt, recipe.max_tokens) for prompt in PROMPTS]
    runs = [len(text) - MAX_GAMMA - start - 1 for text, start in texts]  # tokens after the prefill

    def full_acceptance(gamma: int) -> float:
        return statistics.median(run / math.ceil(run / (gamma + 1)) for run in runs)

    assert [item.tokens_per_pass for item in result.estimates] == pytest.approx(
        [full_acceptance(g) for g in range(1, 9)], rel=1e-3
    )
    assert result.kv_bytes > 0 and result.weight_bytes > 0


@pytest.mark.parametrize("method", ["self", "nasd", "suffix", "lookup"])
def test_other_methods_need_one_model(folder: str, method: str) -> None:
    result = preflight(
        Recipe(target=folder, method=method, temperature=1.0, top_p=1.0, device="cpu"), PROMPTS, ModelPool()
    )
    assert 0 < result.alpha < 1 and (result.c > 0.2) == (method == "self")
    assert all(1 <= item.tokens_per_pass <= item.gamma + 1 and item.low <= item.high for item in result.estimates)


def test_advice_is_against_drafts_that_cost_as_much_as_they_save() -> None:
    """The target as drafter: no gamma can win."""
    v = dict.fromkeys(range(1, MAX_GAMMA + 2), 1.0)
    found = [(g, *expected_speedup([([1.0] * MAX_GAMMA, True)] * 400, g, 1.0, v)) for g in range(1, MAX_GAMMA + 1)]
    estimates = tuple(Estimate(g, tokens, speedup, speedup, speedup) for g, tokens, speedup in found)
    assert [item.tokens_per_pass for item in estimates] == pytest.approx(
        [g + 1 for g in range(1, MAX_GAMMA + 1)], rel=0.02
    )
    assert Preflight(Recipe(), 1.0, 1.0, v, estimates, 1, 1).advice.startswith("don't")


def test_positions_in_the_continuation_count(folder: str) -> None:
    recipe = Recipe(target=folder, method="nasd", temperature=1.0, top_p=1.0, device="cpu", max_tokens=20)
    target = ModelPool().take(recipe.target_spec)
    prompt = Prompt("code", "code 1", TEXT, "x = 1\n" * 40)
    tokens, start = encode_text(target, prompt, recipe.max_tokens)
    assert start == len(target.tokenizer.encode(TEXT)) and len(tokens) == start + 20 + MAX_GAMMA
    sampling = SamplingParams(1.0, 0, 1.0)
    continuation = step_outlooks(tokens, start, build_pipeline(recipe, target, None), sampling)
    complete = step_outlooks(tokens, 1, build_pipeline(recipe, target, None), sampling)
    assert len(continuation) == 20 + 1 and complete[-len(continuation) :] == continuation
    assert encode_text(target, Prompt("code", "code 1", "x" * 5), 20) == (
        target.tokenizer.encode("x" * 5),
        5,
    )  # too short


def test_texts_are_recorded_for_the_bundled_target_only(folder: str) -> None:
    recorded = texts_for(Recipe(temperature=0.2))
    assert {item.kind for item in recorded} == {item.kind for item in load_prompts()} and all(
        item.written for item in recorded
    )
    assert not {item.text for item in recorded} & {
        item.text for item in load_prompts()
    }  # disjoint from the measured prompts
    assert [item.written for item in texts_for(Recipe(temperature=0.9))] != [item.written for item in recorded]
    assert texts_for(Recipe(target=folder, method="nasd"), ["prose"]) == load_prompts(kinds=["prose"])
    with pytest.raises(UserError, match="unknown class of prompts 'magic'"):
        texts_for(Recipe(), ["magic"])


def test_estimates_are_compared_with_measurements(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--method", "nasd", "self", "--temperature", "1", "--kind", "prose", "--max-tokens", "12"]
    settings += ["--prompts", "24"]  # 20 and prefixes of four
    assert preflight_accuracy.main(["--target", folder, "--device", "cpu", *settings]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "predicted / measured" in head and lines[0].startswith("| prose | nasd gamma=3 T=1 ")
    assert lines[3].startswith("the target as drafter: ")
    nasd, self_ = json.loads(lines[2])["preflight_accuracy"]
    for item in (nasd, self_):
        assert item["kind"] == "prose" and item["prompts"] == 24 and item["measured"] > 0
        assert item["ratio"] == pytest.approx(item["estimate"]["speedup"] / item["measured"])
    assert nasd["recipe"]["method"] == "nasd" and self_["estimate"]["tokens_per_pass"] > 1


def test_advice_is_one_sentence() -> None:
    def advice(speedup: float, low: float, c: float = 0.1) -> str:
        estimate = Estimate(3, 2.0, speedup, low, speedup + 0.1)
        return Preflight(Recipe(), 0.5, c, {1: 1.0}, (estimate,), 1, 1).advice

    assert advice(1.5, 1.4) == "gamma 3: about 1.50x the speed of AR decoding"
    assert "possibly no difference" in advice(1.1, 0.9)
    assert advice(0.8, 0.7, c=0.9).startswith("don't") and "costs too much" in advice(0.8, 0.7, c=0.9)
    assert "too few tokens would be accepted" in advice(1.0, 0.9, c=0.0)


def test_unsupported_requests_raise_errors(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="does not reproduce"):
        preflight(Recipe(target=folder, method="nasd", temperature=0, device="cpu"), PROMPTS[:1], ModelPool())
    with pytest.raises(UserError, match="too short"):
        preflight(Recipe(target=folder, method="nasd", device="cpu"), [Prompt("code", "code 1", "x")], ModelPool())
    assert main(["preflight", "--target", folder, "--method", "beam"]) == 2
    assert "preflight supports the methods draft" in capsys.readouterr().err
    warm = ["--temperature", "1", "--kind", "code", "--device", "cpu"]
    assert main(["preflight", "--target", folder, "--method", "nasd", *warm]) == 0
    assert "AR decoding" in capsys.readouterr().out
