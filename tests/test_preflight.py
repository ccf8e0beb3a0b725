"""Estimates before anything is generated: right where the answer is known, plain where drafting does not pay."""

from __future__ import annotations

import json
import math
import random
import statistics
from functools import cache

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from benchmarks import preflight_accuracy
from specdemo.cli.main import main
from specdemo.core.errors import UserError
from specdemo.core.sampling import SamplingParams
from specdemo.core.theory import expected_tokens
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import build_pipeline
from specdemo.preflight import MAX_GAMMA, Estimate, Preflight, _expected, _rounds, preflight, read_text, texts_for
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe

TEXT = "def add(first, second):\n    return first + second\n\n\n" * 3
PROMPTS = [Prompt("code", f"code {i}", TEXT[i:]) for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "model", byte_level_tokenizer(), num_hidden_layers=4))


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8])
def test_constant_acceptance_gives_the_theorems_figures(alpha: float, gamma: int) -> None:
    rounds = [([alpha] * MAX_GAMMA, True)] * 400
    v = dict.fromkeys(range(1, MAX_GAMMA + 2), 1.0)
    tokens, speedup = _expected(rounds, gamma, 0.1, v)
    assert tokens == pytest.approx(expected_tokens(alpha, gamma), rel=0.01)  # a run of 400 tokens has an end
    assert speedup == pytest.approx(expected_tokens(alpha, gamma) / (1 + 0.1 * gamma), rel=0.01)


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_a_run_is_expected_to_take_the_rounds_of_algorithm_1(gamma: int) -> None:
    """Against the plain recursion: from each place, what a round commits and what is then still to do."""
    rng = random.Random(gamma)
    length, chance = 40, [rng.random() for _ in range(60)]

    @cache
    def left(i: int) -> float:
        """Expected rounds once i tokens are there."""
        if i >= length:
            return 0.0
        count, path, rounds = min(gamma, length - i - 1), 1.0, 1.0
        for k in range(count):
            rounds += path * (1 - chance[i + k]) * left(i + k + 1)
            path *= chance[i + k]
        return rounds + path * left(i + count + 1)

    rounds = [(chance[i : i + MAX_GAMMA], True) for i in range(length + 1)]
    free = dict.fromkeys(range(1, MAX_GAMMA + 2), 1.0)
    tokens, speedup = _expected(rounds, gamma, 0.0, free)
    assert tokens == pytest.approx((length - 1) / left(1)) and speedup == pytest.approx(tokens)
    assert tokens > 1.2


def test_a_target_that_drafts_for_itself_is_always_right_and_never_cheap(folder: str) -> None:
    recipe = Recipe(target=folder, drafter=folder, temperature=1.0, top_p=1.0, device="cpu")
    pool = ModelPool()
    found = preflight(recipe, PROMPTS, pool)
    assert found.alpha == pytest.approx(1.0, abs=1e-4) and found.c > 0.3
    texts = [read_text(pool.take(recipe.target_spec), prompt, recipe.max_tokens) for prompt in PROMPTS]
    runs = [len(text) - MAX_GAMMA - start - 1 for text, start in texts]  # tokens after the first pass

    def whole(gamma: int) -> float:
        return statistics.median(run / math.ceil(run / (gamma + 1)) for run in runs)

    assert [one.tokens_per_pass for one in found.estimates] == pytest.approx([whole(g) for g in range(1, 9)], rel=1e-3)
    assert found.kv_bytes > 0 and found.weight_bytes > 0


@pytest.mark.parametrize("method", ["self", "nasd", "suffix", "lookup"])
def test_one_model_is_enough_for_the_others(folder: str, method: str) -> None:
    found = preflight(
        Recipe(target=folder, method=method, temperature=1.0, top_p=1.0, device="cpu"), PROMPTS, ModelPool()
    )
    assert 0 < found.alpha < 1 and (found.c > 0.2) == (method == "self")
    assert all(1 <= one.tokens_per_pass <= one.gamma + 1 and one.low <= one.high for one in found.estimates)


def test_a_draft_that_costs_what_it_saves_is_advised_against() -> None:
    """The target drafting for itself: always right, and no cheaper than what it spares, so no gamma can win."""
    v = dict.fromkeys(range(1, MAX_GAMMA + 2), 1.0)
    found = [(g, *_expected([([1.0] * MAX_GAMMA, True)] * 400, g, 1.0, v)) for g in range(1, MAX_GAMMA + 1)]
    estimates = tuple(Estimate(g, tokens, speedup, speedup, speedup) for g, tokens, speedup in found)
    assert [one.tokens_per_pass for one in estimates] == pytest.approx(
        [g + 1 for g in range(1, MAX_GAMMA + 1)], rel=0.02
    )
    assert Preflight(Recipe(), 1.0, 1.0, v, estimates, 1, 1).advice.startswith("don't")


def test_of_a_written_text_what_the_target_wrote_counts(folder: str) -> None:
    recipe = Recipe(target=folder, method="nasd", temperature=1.0, top_p=1.0, device="cpu", max_tokens=20)
    target = ModelPool().take(recipe.target_spec)
    prompt = Prompt("code", "code 1", TEXT, "x = 1\n" * 40)
    tokens, start = read_text(target, prompt, recipe.max_tokens)
    assert start == len(target.tokenizer.encode(TEXT)) and len(tokens) == start + 20 + MAX_GAMMA
    sampling = SamplingParams(1.0, 0, 1.0)
    counted = _rounds(tokens, start, build_pipeline(recipe, target, None), sampling)
    whole = _rounds(tokens, 1, build_pipeline(recipe, target, None), sampling)
    assert len(counted) == 20 + 1 and whole[-len(counted) :] == counted  # n-grams know the prompt all the same
    assert read_text(target, Prompt("code", "code 1", "x" * 5), 20) == (
        target.tokenizer.encode("x" * 5),
        5,
    )  # too short


def test_texts_are_the_bundled_targets_own_or_bare_prompts(folder: str) -> None:
    own = texts_for(Recipe(temperature=0.2))
    assert {one.kind for one in own} == {one.kind for one in load_prompts()} and all(one.written for one in own)
    assert not {one.text for one in own} & {one.text for one in load_prompts()}  # nothing that is measured is read
    assert [one.written for one in texts_for(Recipe(temperature=0.9))] != [one.written for one in own]
    assert texts_for(Recipe(target=folder, method="nasd"), ["prose"]) == load_prompts(kinds=["prose"])
    with pytest.raises(UserError, match="unknown class of prompts 'magic'"):
        texts_for(Recipe(), ["magic"])


def test_what_was_foretold_is_held_against_what_is_measured(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--method", "nasd", "self", "--temperature", "1", "--kind", "prose", "--max-tokens", "12"]
    settings += ["--prompts", "24"]  # 20 and the beginnings of four
    assert preflight_accuracy.main(["--target", folder, "--device", "cpu", *settings]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "foretold / measured" in head and lines[0].startswith("| prose | nasd gamma=3 T=1 |")
    assert lines[2].startswith("the target drafting for itself: ")
    nasd, self_ = json.loads(lines[3])["foretold"]
    for one in (nasd, self_):
        assert one["kind"] == "prose" and one["prompts"] == 24 and one["measured"] > 0
        assert one["ratio"] == pytest.approx(one["foretold"] / one["measured"])
    assert nasd["recipe"]["method"] == "nasd" and self_["tokens_per_pass"] > 1


def test_advice_is_plain() -> None:
    def advice(speedup: float, low: float, c: float = 0.1) -> str:
        estimate = Estimate(3, 2.0, speedup, low, speedup + 0.1)
        return Preflight(Recipe(), 0.5, c, {1: 1.0}, (estimate,), 1, 1).advice

    assert advice(1.5, 1.4) == "gamma 3: about 1.50x the speed of plain decoding"
    assert "may make no difference" in advice(1.1, 0.9)
    assert advice(0.8, 0.7, c=0.9).startswith("don't") and "too dear" in advice(0.8, 0.7, c=0.9)
    assert "too little would be accepted" in advice(1.0, 0.9, c=0.0)


def test_what_cannot_be_told_is_refused_in_words(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="would write none"):
        preflight(Recipe(target=folder, method="nasd", temperature=0, device="cpu"), PROMPTS[:1], ModelPool())
    with pytest.raises(UserError, match="too short"):
        preflight(Recipe(target=folder, method="nasd", device="cpu"), [Prompt("code", "code 1", "x")], ModelPool())
    assert main(["preflight", "--target", folder, "--method", "beam"]) == 2
    assert "preflight knows the methods draft" in capsys.readouterr().err
    warm = ["--temperature", "1", "--kind", "code", "--device", "cpu"]
    assert main(["preflight", "--target", folder, "--method", "nasd", *warm]) == 0
    assert "plain decoding" in capsys.readouterr().out
