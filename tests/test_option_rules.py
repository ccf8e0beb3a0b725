"""Every option changes the trace of every method and policy that lists it; others are refused in the terminal."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from contracts.models import save_pair
from fakes.heads import head_for
from safetensors.torch import load_file, save_file

from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.policies import POLICIES, DraftLengths
from specdemo.generate import generate
from specdemo.models.chat_caches import Stores
from specdemo.models.model_pool import ModelPool
from specdemo.option_rules import has_effect, methods_with, refuse_ineffective
from specdemo.recipe import METHODS, PRESETS, Recipe, plan_run

pytestmark = pytest.mark.slow

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self."
POOL = ModelPool()
MODELS: dict[str, str] = {}  # a random pair of four layers
HEADS: dict[str, dict[str, str]] = {}  # a random head of the target, for methods that need one
SHARPER = 1.5
OTHER = {
    "gamma": 2, "policy": "heuristic", "gamma_min": 2, "gamma_max": 2, "egag_ema_beta": 0.9, "first_target": False,
    "rule": "match", "temperature": 1.5, "top_k": 1, "top_p": 0.1, "min_p": 0.9,
    "repetition_penalty": 1.5, "bad_words": ("e", "a"),
    "stop_texts": tuple("abcdefghijklmnop"), "stop_tokens": (5,),
    "seed": 9, "drafter_temperature": 0.5, "drafter_top_p": 0.1, "max_tokens": 9, "top": 2, "threshold": 0.05,
    "skip_sample_adjustment": True, "ngram": 2,
    "filler_top_k": 1, "filler_weight": "equal", "ngram_levels": "one", "ngram_random": True, "ngram_keep": True,
    "tree_nodes": 3,
    "tree_width": 1, "exit_layer": 3, "skip_layers": (1,), "lookahead_window": 2, "lookahead_n": 2,
    "lookahead_guesses": 1, "num_beams": 2, "corpus_order": 1,
}  # fmt: skip
AROUND = {
    "gamma_min": {"policy": "svip", "temperature": 2.0},
    "gamma_max": {"policy": "svip"},
    "egag_ema_beta": {"policy": "egag", "gamma": 12, "temperature": 2.0, "tree_nodes": 60},
    "filler_top_k": {"max_tokens": 200, "temperature": 0.8, "ngram": 2},
    "filler_weight": {"max_tokens": 200, "temperature": 0.8, "ngram": 2},
    "threshold": {"rule": "threshold", "temperature": 0.5, "max_tokens": 120},
    "skip_sample_adjustment": {"temperature": 1.0, "max_tokens": 60},
    "top_k": {"temperature": 2.0},
    "top_p": {"temperature": 2.0},
    "min_p": {"temperature": 2.0},
    "seed": {"temperature": 2.0},
    "drafter_temperature": {"temperature": 2.0},
    "drafter_top_p": {"temperature": 2.0},
    "rule": {"temperature": 1.0},
}
# see other tests
NEEDS_MORE = {"chat", "external", "length_penalty", "min_length", "stop_tokens", "template_options", "use_cache"}
NAMES = [
    name
    for name, option in Recipe.OPTIONS.items()
    if option.group != "Models and devices" and name not in {"pair", "method", *NEEDS_MORE}
]
FIRST = [(methods_with(Recipe.OPTIONS[name])[0], name) for name in NAMES]
OTHERS = [(method, name) for name in NAMES for method in methods_with(Recipe.OPTIONS[name])[1:]]
CASES = [*FIRST, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)]


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    MODELS.update(zip(("target", "drafter"), save_pair(tmp_path_factory.mktemp("models")), strict=True))
    for folder in MODELS.values():
        weights = load_file(f"{folder}/model.safetensors")
        weights["lm_head.weight"] *= SHARPER
        save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    for name, method in METHODS.items():
        if method.drafter == "head":
            HEADS[name] = {"head": head_for(MODELS["target"], tmp_path_factory.mktemp("head"), name)}


@cache
def trace(**values: Any) -> list[Any]:
    """Return the steps of a run without timings; `ngram_keep` follows a run with the same stores."""
    stores = Stores()
    head = HEADS.get(values.get("method", "draft"), {})
    recipe = replace(Recipe(), **{"max_tokens": 16, "top_p": 1.0, "device": "cpu", **MODELS, **head, **values})
    if recipe.ngram_keep:
        list(generate(recipe, PROMPT, POOL, stores))
    steps = [event.step for event in generate(recipe, PROMPT, POOL, stores) if isinstance(event, StepEvent)]
    return [(s.tokens, s.draft.tokens, s.gamma, s.verdict.target_top, s.verdict.p, s.verdict.accepted) for s in steps]


def changes(name: str, base: dict[str, Any]) -> bool:
    value = "coupled" if (base["method"], name) == ("ar", "rule") else OTHER[name]
    return trace(**base) != trace(**{**base, name: value})


@pytest.mark.parametrize(("method", "name"), CASES)
def test_every_option_of_a_method_changes_its_trace(method: str, name: str) -> None:
    around = AROUND.get(name, {})
    if method in ("nasd", "suffix", "lookup") and name in ("gamma_min", "egag_ema_beta"):
        pytest.skip("these drafters have no logits")
    assert changes(name, {"method": method, **around})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["gamma", "gamma_min", "gamma_max", "egag_ema_beta"])
def test_every_draft_length_option_changes_the_trace_or_is_refused(policy: str, name: str) -> None:
    base = {"method": "draft", "policy": policy, "temperature": 2.0, "gamma": 4}
    value = {"gamma_min": 4, "gamma_max": 2}.get(name, OTHER[name])
    try:
        changed = Recipe(**{**base, name: value})
        refuse_ineffective(changed, {name: value})
    except UserError as refused:
        assert f"{name} has no effect with policy {policy}" in str(refused)
    else:
        assert trace(**base) != trace(**{**base, name: value})


@pytest.mark.parametrize("method", METHODS)
def test_options_without_effect_are_refused_if_named(method: str) -> None:
    """Every pair of option and method: in the terminal and the API by names, in the library by the constructor."""
    for name, option in Recipe.OPTIONS.items():
        if method in methods_with(option) or name in ("pair", "target", "drafter"):
            continue
        value, head = OTHER.get(name, option.default), HEADS.get(method, {})
        unnamed = replace(Recipe(), **{**AROUND.get(name, {}), **head, "method": method, name: value})
        with pytest.raises(UserError, match=f"{name} (.* )?has no effect with method {method}: choose "):
            refuse_ineffective(unnamed, [name])
        with pytest.raises(UserError, match=f"{name} (.* )?has no effect|has no {name}"):
            Recipe(**{**head, "method": method, name: value})


BY_LOGITS = [name for name, policy in POLICIES.items() if policy.by_logits]
WITH_POLICY = [name for name, method in METHODS.items() if method.uses_policy]


@pytest.mark.parametrize(
    ("method", "policy"),
    [
        pytest.param(
            method, policy, marks=() if method == "draft" or policy == BY_LOGITS[0] else pytest.mark.exhaustive
        )
        for method in WITH_POLICY
        for policy in BY_LOGITS
    ],
)
def test_policies_by_logits_are_refused_where_they_equal_fixed(method: str, policy: str) -> None:
    base = {"method": method, "temperature": 2.0, "gamma": 4}
    equal = trace(**base) == trace(**base, policy=policy)
    assert equal != has_effect(policy, method)
    if equal:
        with pytest.raises(UserError, match=f"policy {policy} has no effect with method {method}"):
            Recipe(method=method, policy=policy)


def test_presets_are_valid_recipes() -> None:
    for preset in PRESETS.values():
        assert replace(Recipe(), **preset.values) != Recipe()
    sources = replace(Recipe(), **PRESETS["sources"].values)
    assert (sources.temperature, sources.top_p, sources.repetition_penalty) == (1.0, 0.9, 1.1)
    assert plan_run(sources).lengths == DraftLengths(6, 3, 12, 0.0)
