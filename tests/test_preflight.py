"""Preflight: estimates against known results, and advice against drafting where it does not pay."""

import math
import threading
from collections.abc import Iterator

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.models.model_pool import ModelPool
from specdemo.preflight import (
    MAX_GAMMA,
    Estimate,
    Preflight,
    decoded_runs,
    fixed_length,
    halves,
    measured_speed,
    prediction_of_runs,
    preflight,
)
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe, plan_run
from specdemo.worker import Worker

pytestmark = pytest.mark.slow

TEXT = "def add(first, second):\n    return first + second\n\n\n" * 3
PROMPTS = [Prompt("code", f"code {i}", TEXT[i:]) for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "model", byte_level_tokenizer(), num_hidden_layers=4))


@pytest.fixture(scope="module")
def bundled() -> ModelPool:
    return ModelPool()


@pytest.mark.parametrize("method", ["draft", "nasd"])
def test_shorter_drafts_take_the_steps_of_a_run(method: str, bundled: ModelPool) -> None:
    recipe = Recipe(method=method, gamma=8, temperature=0.0, device="cpu", max_tokens=48)
    prompts = load_prompts(["code"])[:3]
    runs = {gamma: [*decoded_runs(fixed_length(recipe, gamma), prompts, bundled)] for gamma in (3, 8)}
    estimates = prediction_of_runs(recipe, runs[8]).estimates
    for gamma, decoded in runs.items():
        measured = measured_speed(gamma, decoded).tokens_per_pass
        assert estimates[gamma - 1].tokens_per_pass == pytest.approx(measured, rel=0.1)


def test_a_target_that_is_its_own_drafter_has_alpha_1_and_a_cost(folder: str) -> None:
    recipe = Recipe(target=folder, drafter=folder, temperature=1.0, top_p=1.0, device="cpu")
    pool = ModelPool()
    result = preflight(recipe, PROMPTS, pool)
    assert result.alpha == pytest.approx(1.0, abs=1e-4) and result.c > 0
    assert result.texts == "2 decoded with draft, temperature 1 (code)"
    runs = decoded_runs(fixed_length(recipe, MAX_GAMMA), PROMPTS[::2], pool)
    lengths = [sum(len(step.tokens) for step in run.steps[1:]) for run in runs]

    def full_acceptance(gamma: int) -> float:
        return sum(lengths) / math.ceil(sum(lengths) / (gamma + 1))

    assert [item.tokens_per_pass for item in result.estimates] == pytest.approx(
        [full_acceptance(g) for g in range(1, 9)], rel=1e-3
    )
    assert result.kv_bytes > 0 and result.weight_bytes > 0
    held_out = result.held_out
    assert held_out is not None and (held_out.setting, held_out.prompts) == (f"gamma {recipe.gamma}", 1)
    assert held_out.predicted == result.estimates[recipe.gamma - 1].speedup
    assert held_out.measured.tokens_per_pass > recipe.gamma - 1  # all tokens are accepted, up to the end of the text
    assert held_out.error == held_out.predicted - held_out.measured.speedup


@pytest.mark.parametrize(
    "settings", [{"method": "tree"}, {"method": "lookahead"}, {"method": "draft", "rule": "coupled"}]
)
def test_only_chains_have_other_lengths(folder: str, settings: dict) -> None:
    drafter = {} if settings["method"] == "lookahead" else {"drafter": folder}
    recipe = Recipe(target=folder, **drafter, **settings, temperature=0.7, device="cpu", max_tokens=24)
    result = preflight(recipe, PROMPTS, ModelPool())
    has_lengths = recipe.method == "draft"
    assert [row.gamma for row in result.estimates] == ([*range(1, MAX_GAMMA + 1)] if has_lengths else [4])
    assert all(row.tokens_per_pass >= 1 and row.low <= row.speedup <= row.high for row in result.estimates)
    assert result.texts.startswith(f"2 decoded with {recipe.method}, temperature 0.7")
    assert result.label(result.best).startswith("gamma" if has_lengths else f"method {recipe.method}")
    assert result.v[1] == 1.0 and len(result.v) == (MAX_GAMMA + 1 if has_lengths else 2)
    assert result.held_out is not None and result.held_out.prompts == 1
    assert result.held_out.setting == ("gamma 4" if has_lengths else f"method {recipe.method}")


def test_half_of_the_prompts_of_each_class_are_held_out() -> None:
    prompts = [Prompt(kind, f"{kind} {i}", "text") for kind in ("code", "prose") for i in range(3)]
    known, others = halves([*prompts, Prompt("single", "single", "text")])
    assert [prompt.name for prompt in known] == ["code 0", "code 2", "prose 0", "prose 2", "single"]
    assert [prompt.name for prompt in others] == ["code 1", "prose 1"]
    assert halves(prompts[:1]) == (prompts[:1], prompts[:1])  # the draft length remains


def test_advice_is_against_drafts_that_cost_as_much_as_they_save() -> None:
    """The target as drafter: no gamma can win."""
    estimates = tuple(Estimate(gamma, gamma + 1.0, 1.0, 0.9, 1.1) for gamma in (1, 2))
    assert Preflight(Recipe(), 1.0, 1.0, {1: 1.0}, estimates, 1, 1).advice.startswith("don't")


@pytest.mark.parametrize("method", ["nasd", "lookahead"])
def test_other_jobs_run_during_a_preflight(folder: str, method: str) -> None:
    """It is stopped between its passes."""
    recipe, pool = Recipe(target=folder, method=method, device="cpu", max_tokens=30), ModelPool()
    pool.get(plan_run(recipe).target)
    worker, started = Worker(), threading.Event()

    def job() -> Iterator[Preflight]:
        started.set()
        yield preflight(recipe, PROMPTS, pool)

    estimate = worker.submit(job)
    assert started.wait(60)

    def others() -> Iterator[bool]:
        for _ in range(20):
            yield estimate.done
        estimate.stop()

    stream = worker.submit(others)
    assert stream.wait(60) and estimate.wait(60)
    assert stream.items == [False] * 20 and estimate.items == [] and estimate.error is None
    worker.close()
