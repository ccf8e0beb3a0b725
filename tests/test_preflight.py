"""Preflight: estimates against known results, and advice against drafting where it does not pay."""

import math
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.core.decode import decode
from specdemo.core.estimate import StepCost, acceptance_along_text
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import build_pipeline
from specdemo.plan import plan_run
from specdemo.preflight import (
    MAX_GAMMA,
    Estimate,
    Preflight,
    fit_costs,
    halves,
    measure_costs,
    preflight,
    replay,
    texts_for,
    usable_texts,
)
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe
from specdemo.worker import Worker

pytestmark = pytest.mark.slow

TEXT = "def add(first, second):\n    return first + second\n\n\n" * 3
FREE = dict.fromkeys(range(1, MAX_GAMMA + 2), 1.0)  # verification without additional cost
PROMPTS = [Prompt("code", f"code {i}", TEXT[i:]) for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "model", byte_level_tokenizer(), num_hidden_layers=4))


def measured_steps(recipe: Recipe, text: tuple, pool: ModelPool) -> int:
    """Steps after the prefill of a greedy run that writes this text."""
    (tokens, start), plan = text, plan_run(recipe)
    target = pool.get(plan.target)
    pipeline = build_pipeline(plan, target, pool.get(plan.drafter) if plan.drafter else None)
    roles, count = (pipeline.verifier, pipeline.drafter, pipeline.policy), len(tokens) - start
    steps = list(decode(tokens[:start], *roles, max_tokens=count, stop=target.stop, clock=lambda: 0.0))
    assert [token for step in steps for token in step.tokens] == tokens[start:]
    return len(steps) - 1


@pytest.fixture(scope="module")
def bundled() -> ModelPool:
    return ModelPool()


@pytest.mark.parametrize("method", ["draft", "nasd", "suffix", "hybrid", "lookup"])
def test_replayed_greedy_drafts_take_the_steps_of_a_run(method: str, bundled: ModelPool) -> None:
    pool, recipe = bundled, Recipe(method=method, gamma=3, temperature=0.0, device="cpu", max_tokens=48)
    plan = plan_run(recipe)
    target = pool.get(plan.target)
    drafter = pool.get(plan.drafter) if plan.drafter else None
    prompts = [Prompt("code", str(i), text) for i, text in enumerate(["x = [1, 2, 3, 1, 2, 3,", "def f(a, b):\n    "])]
    for text in usable_texts(recipe, target, prompts, 2048)[0]:
        expected = acceptance_along_text(replay(recipe, target, drafter, text))(3)
        assert expected.count == measured_steps(recipe, text, pool) < expected.tokens


def test_texts_have_the_requested_sampling_parameters(folder: str) -> None:
    """Greedy texts repeat themselves, so they would overestimate n-grams above temperature 0."""
    for sampled in (
        {"temperature": 0.5}, {"temperature": 0.2}, {"top_k": 5}, {"top_p": 0.9}, {"repetition_penalty": 1.2},
    ):  # fmt: skip
        assert not any(prompt.written for prompt in texts_for(Recipe(**{"temperature": 1.0, "top_p": 1.0} | sampled)))
    for recorded in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 1.0}, {"temperature": 0.0, "top_p": 0.9}):
        assert all(prompt.written for prompt in texts_for(Recipe(**recorded)))
    target = ModelPool().get(plan_run(Recipe(target=folder, method="nasd", device="cpu")).target)
    texts = {}
    for temperature in (0.0, 1.0):
        recipe = Recipe(target=folder, method="nasd", device="cpu", max_tokens=30, temperature=temperature, top_k=3)
        texts[temperature], origin = usable_texts(recipe, target, PROMPTS, 2048)
        assert origin == f"3 sampled, temperature {temperature:g}" + (", top-k 3" if temperature else "") + (
            ", top-p 0.95" if temperature and recipe.top_p < 1 else ""
        )
        p = SamplingParams(temperature, recipe.top_k, recipe.top_p)(
            CachedModel(target.model).read(texts[temperature][0][0]), ()
        )
        tokens, start = texts[temperature][0]
        assert all(p[i - 1, tokens[i]] > 0 for i in range(start, len(tokens)))
    assert texts[0.0] != texts[1.0]


def test_a_target_that_is_its_own_drafter_has_alpha_1_and_a_cost(folder: str) -> None:
    recipe = Recipe(target=folder, drafter=folder, temperature=1.0, top_p=1.0, device="cpu")
    pool = ModelPool()
    result = preflight(recipe, PROMPTS, pool)
    assert result.alpha == pytest.approx(1.0, abs=1e-4) and result.c > 0
    assert result.texts == "2 sampled, temperature 1 (code)"
    target = pool.get(plan_run(recipe).target)
    texts, _ = usable_texts(recipe, target, PROMPTS[::2], CachedModel(target.model).context)
    lengths = [len(text) - start - 1 for text, start in texts]  # tokens after the prefill

    def full_acceptance(gamma: int) -> float:
        return sum(lengths) / sum(math.ceil(length / (gamma + 1)) for length in lengths)

    assert [item.tokens_per_pass for item in result.estimates] == pytest.approx(
        [full_acceptance(g) for g in range(1, 9)], rel=1e-3
    )
    assert result.kv_bytes > 0 and result.weight_bytes > 0
    held_out = result.held_out
    assert held_out is not None and (held_out.setting, held_out.prompts) == (f"gamma {recipe.gamma}", 1)
    assert held_out.predicted == result.estimates[recipe.gamma - 1].speedup
    assert held_out.measured.tokens_per_pass > recipe.gamma  # all tokens are accepted
    assert held_out.error == held_out.predicted - held_out.measured.speedup


@pytest.mark.parametrize(
    "settings", [{"method": "tree"}, {"method": "lookahead"}, {"method": "draft", "rule": "coupled"}]
)
def test_forests_and_other_rules_are_decoded(folder: str, settings: dict) -> None:
    drafter = {} if settings["method"] == "lookahead" else {"drafter": folder}
    recipe = Recipe(target=folder, **drafter, **settings, temperature=0.7, device="cpu", max_tokens=24)
    result = preflight(recipe, PROMPTS, ModelPool())
    *shorter, estimate = result.estimates
    assert [row.gamma for row in shorter] == ([1, 2, 3] if recipe.method == "draft" else [])
    assert estimate.gamma == 4 and estimate.tokens_per_pass >= 1 and estimate.low <= estimate.speedup <= estimate.high
    assert result.texts.startswith(f"2 decoded with {recipe.method}, temperature 0.7")
    assert result.label(estimate) == ("gamma 4" if shorter else f"method {recipe.method}")
    assert result.v[1] == 1.0 and len(result.v) == 2
    assert result.held_out is not None and result.held_out.prompts == 1
    assert result.held_out.setting == ("gamma 3" if shorter else f"method {recipe.method}")


def test_half_of_the_prompts_of_each_class_are_held_out() -> None:
    prompts = [Prompt(kind, f"{kind} {i}", "text") for kind in ("code", "prose") for i in range(3)]
    known, others = halves([*prompts, Prompt("single", "single", "text")])
    assert [prompt.name for prompt in known] == ["code 0", "code 2", "prose 0", "prose 2", "single"]
    assert [prompt.name for prompt in others] == ["code 1", "prose 1"]
    assert halves(prompts[:1]) == (prompts[:1], prompts[:1])  # the draft length remains


@pytest.mark.parametrize(("available", "token", "first", "empty"), [(99, 0.5, 0.25, 0.0), (0, 0.0, 0.0, 0.25)])
def test_reading_before_a_draft_is_no_cost_of_its_tokens(
    available: int, token: float, first: float, empty: float
) -> None:
    machine = Machine(9, available, read=0.25)

    def pipeline() -> Any:
        machine.cached = []
        return pipeline_of(machine)

    costs = measure_costs(pipeline, [(IDS, 5)], 4, repeats=5, clock=lambda: machine.now)
    assert (costs.token, costs.first, costs.empty) == pytest.approx((token, first, empty))
    cost = costs.of_steps(4)
    assert cost(0) == pytest.approx(1 + empty) and cost(4) == pytest.approx(costs.v[5] + first + 4 * token)


def test_the_held_out_length_is_not_timed() -> None:
    machine = Machine(9)

    def pipeline() -> Any:
        machine.cached = []
        return pipeline_of(machine)

    costs = measure_costs(pipeline, [(IDS, 5)], 4, repeats=5, clock=lambda: machine.now, without=3)
    assert [*costs.v] == [1, 2, 3, 5] and 4 not in machine.rows
    assert fit_costs(costs.v, 5)[4] == pytest.approx(1.75 + 0.1)


def test_advice_is_against_drafts_that_cost_as_much_as_they_save() -> None:
    """The target as drafter: no gamma can win."""
    certain = acceptance_along_text([[1.0] * MAX_GAMMA] * 400)
    texts = {gamma: certain(gamma) for gamma in range(1, MAX_GAMMA + 1)}
    dear = StepCost(lambda rows: 1.0, token=1.0)
    estimates = tuple(Estimate.of(gamma, [(text.tokens, text.count, text.cost(dear))]) for gamma, text in texts.items())
    assert [item.tokens_per_pass for item in estimates] == pytest.approx(
        [g + 1 for g in range(1, MAX_GAMMA + 1)], rel=0.02
    )
    assert Preflight(Recipe(), 1.0, 1.0, FREE, estimates, 1, 1).advice.startswith("don't")


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


# --- measured costs ---------------------------------------------------------------------------------------------------

IDS = tuple(range(100, 200))


@dataclass
class Machine:
    """AR pass 1, each further row 0.25, draft token 0.5, prefill 50.

    The two passes after a draft cost 0.1 more, since the drafter has evicted the target's weights from the CPU cache.
    """

    correct: int  # draft tokens that agree with the text
    available: int = 99  # maximum number of draft tokens
    read: float = 0.0  # cost before the tokens of a draft
    now: float = 0.0
    cold: int = 0  # remaining passes with cold caches
    cached: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of each pass

    def propose(self, tokens: Any, budget: Any) -> Draft:
        count = 0
        while count < self.available and budget.may_extend(count, None):
            count += 1
        self.now += self.read + 0.5 * count
        self.cold = 2 if count else self.cold
        after = IDS[len(tokens) : len(tokens) + self.correct]
        return Draft.chain((*after, *(0,) * count)[:count])

    def verify(self, tokens: Any, draft: Draft) -> None:
        scored = [*tokens, *draft.tokens]
        shared = 0
        while shared < min(len(self.cached), len(tokens)) and self.cached[shared] == tokens[shared]:
            shared += 1
        self.rows.append(len(scored) - shared)
        self.now += 50.0 if not self.cached else 0.75 + 0.25 * (len(scored) - shared) + 0.1 * (self.cold > 0)
        self.cold -= 1
        self.cached = scored


def pipeline_of(machine: Machine) -> Any:
    return nullcontext(
        SimpleNamespace(drafter=machine, verifier=machine, target_cache=SimpleNamespace(vocab_size=1000))
    )


@pytest.mark.parametrize("correct", [0, 2, 9])
@pytest.mark.parametrize("available", [0, 2, 99])
def test_known_costs_are_measured(correct: int, available: int) -> None:
    machine = Machine(correct, available)

    def pipeline() -> Any:
        machine.cached = []
        return pipeline_of(machine)

    costs = measure_costs(pipeline, [(IDS, 5), (IDS[:8], 5)], 4, repeats=7, clock=lambda: machine.now)
    assert costs.ar_s == 1.0 and costs.c == pytest.approx(0.5 if available else 0.0)
    cold = 0.1 if available else 0.0  # AR steps are measured with warm caches
    assert costs.empty == 0.0 and [*costs.v] == [1, 2, 3, 4, 5]
    assert [*costs.v.values()] == pytest.approx([1.0, 1.25 + cold, 1.5 + cold, 1.75 + cold, 2.0 + cold])
    assert len(machine.rows) > 5 * 7
