"""Options: each is in terminal, page, link and API; invalid values and ineffective combinations give one sentence."""

import html
import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from contracts.models import save_pair
from fakes.heads import head_for
from fakes.page import form_markup
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from benchmarks.cli_reference import cli_reference
from specdemo.cli.arguments import given, parser
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.options import Option
from specdemo.core.policies import POLICIES, DraftLengths
from specdemo.generate import generate
from specdemo.models.chat_caches import Stores
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import PAIRS
from specdemo.option_rules import has_effect, methods_with, refuse_ineffective
from specdemo.recipe import METHODS, PRESETS, Recipe, RunOptions, plan_run
from specdemo.remote.config import SIGNALS, CloudConfig
from specdemo.ui.limits import PUBLIC
from specdemo.ui.page import build
from specdemo.ui.settings import OPTIONS, from_link, recipe_of, restored, setting_of

ROOT = Path(__file__).parents[1]
ADDRESS = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def page() -> Any:
    built = build(pair="bundled")
    built.worker.close()
    return built.blocks


@pytest.fixture(scope="module")
def endpoints(page: Any) -> dict[str, set[str]]:
    """Parameters with a default, by endpoint of the API."""
    described = page.get_api_info()["named_endpoints"]
    return {
        endpoint: {
            part["parameter_name"] for part in described[endpoint]["parameters"] if part["parameter_has_default"]
        }
        for endpoint in ("/generate", "/preflight")
    }


def other(option: Option) -> Any:
    """Return a valid value that differs from the default."""
    special = {
        "pair": "smollm2-360m", "mode": "cloud_only", "remote": ADDRESS, "device": "cpu", "drafter_device": "cpu",
        "target": "some/target", "drafter": "some/drafter", "bad_words": ("a b", "c"), "skip_layers": (5, 7),
        "stop_texts": ("a b", "c"), "stop_tokens": (5, 7), "template_options": ("a=1", "b=c d"),
        "gates": ("nll", "rare"), "threshold": 0.25, "word_frequencies": "words.txt", "seed": 9, "temperature": 0.625,
        "head": "some/head", "method": "nasd", "external": "vllm=http://127.0.0.1:8000",
    }  # fmt: skip
    if option.name in special:
        return special[option.name]
    if option.type is bool:
        return not option.default
    if option.choices:
        return next(name for name in option.choices if name != option.default)
    change = 1 if option.type is int else 0.125
    value = (option.default or 0) + change
    return value if option.bounds is None or value <= option.bounds[1] else option.default - change


def around(option: Option) -> dict[str, Any]:
    """Return further values without which the value of `other` is refused."""
    needed = {
        "drafter": {"target": "some/target"}, "head": {"target": "some/target", "method": "eagle"},
        "threshold": {"rule": "ratio"}, "target": {"method": "nasd"},
        "on_loss": {"method": "draft"}, "gamma_min": {"policy": "svip"}, "gamma_max": {"policy": "svip"},
        "egag_ema_beta": {"policy": "egag"}, "gate_ratio": {"gates": ("nll",)},
        "gate_rare": {"gates": ("rare",)}, "word_frequencies": {"gates": ("rare",)},
        "activations": {"pair": "smollm2-135m", "method": "ar"}, "template_options": {"chat": True},
    }  # fmt: skip
    signal = option.name.removeprefix("gate_")
    if signal in SIGNALS and signal != option.name:
        return {"gates": (signal,)}
    if option.name in Recipe.OPTIONS and option.name not in RunOptions.OPTIONS:
        return {"method": methods_with(option)[0]}
    return needed.get(option.name, {})


def expected(option: Option) -> Recipe:
    """Return the recipe with the value of `other`."""
    values = {**around(option), option.name: other(option)}
    link = {name: values.pop(name) for name in list(values) if name in CloudConfig.OPTIONS}
    return Recipe(**values, cloud=CloudConfig(**{"remote": ADDRESS, **link}) if link else None)


def settings_for(option: Option) -> dict[str, Any]:
    """Return the settings of `expected` that differ from the defaults."""
    values = {**around(option), option.name: other(option)}
    if option.name in CloudConfig.OPTIONS:
        values = {"mode": "speculative", "remote": ADDRESS, **values}
    return {name: value if name == "mode" else setting_of(OPTIONS[name], value) for name, value in values.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_in_terminal_page_link_and_api(name: str, page: Any, endpoints: dict[str, set[str]]) -> None:
    option, recipe = OPTIONS[name], expected(OPTIONS[name])
    assert recipe != Recipe()
    # terminal
    values = {**around(option), name: other(option)}
    flags = ["--remote", ADDRESS] if name in CloudConfig.OPTIONS and name != "remote" else []
    for key, value in values.items():
        repeated = OPTIONS[key].many and not OPTIONS[key].choices
        if isinstance(value, bool):
            flags.append(OPTIONS[key].flag if value else OPTIONS[key].flag.replace("--", "--no-"))
        elif repeated:
            flags += [word for item in value for word in (OPTIONS[key].flag, str(item))]
        else:
            flags += [OPTIONS[key].flag, *map(str, value if isinstance(value, tuple) else [value])]
    if option.terminal:
        assert Recipe(**given(parser().parse_args(["run", "x", *flags]))) == recipe
    else:
        with pytest.raises(SystemExit):
            parser().parse_args(["run", "x", *flags])
    # page
    form = form_markup(page)
    label = html.escape(option.label + (" (lossy)" if option.lossy else ""))
    assert re.search(rf'id="{option.element}">[^~]*?(<span>|<legend>){re.escape(label)}</', form)
    assert form.count(f'data-setting="{name}"') == 1
    # link: as settings.js writes it
    defaults = {name: setting_of(option, option.default) for name, option in OPTIONS.items()}
    changed = settings_for(option)
    linked = ({name: defaults[name] for name in PAIRS["bundled"].settings} if "pair" in changed else {}) | changed
    query = {key: value if isinstance(value, str) else json.dumps(value) for key, value in linked.items()}
    settings, errors = restored(from_link(query, defaults), defaults, "auto")
    assert not errors and recipe_of(settings, "auto") == recipe
    # API
    assert all(name in defaulted for defaulted in endpoints.values())
    assert recipe_of({**defaults, **changed}, "auto") == recipe


def test_the_documentation_is_up_to_date() -> None:
    """Otherwise: `python -m benchmarks.cli_reference > docs/cli.md`."""
    assert (ROOT / "docs/cli.md").read_text("utf-8") == cli_reference()
    assert "ngram_keep" not in cli_reference()  # the terminal has no earlier runs


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.range])
def test_values_outside_the_range_are_refused(name: str) -> None:
    option = OPTIONS[name]
    kind = Recipe if name in Recipe.OPTIONS else CloudConfig
    low, high = option.bounds
    for value in (low - 1, high + 1, math.nan, math.inf, -math.inf, 10**400):
        with pytest.raises(UserError, match=f"{name} must be {option.range}, not") as refused:
            kind(**{name: value})
        if option.hint:
            assert str(refused.value).endswith(option.hint) == (value < low)
    for value in ("4", True, [4]):
        with pytest.raises(UserError, match=f"{name} must be a number, not"):
            kind(**{name: value})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"gamma": 3.5}, "gamma must be a whole number, not 3.5"),
        ({"chat": 1}, "chat must be true or false, not 1"),
        ({"gama": 3}, "unknown option 'gama': known are pair, "),
        ({"exit_layer": 1, "skip_layers": (2,)}, "either exit_layer or skip_layers"),
        ({"threshold": 0.5}, "rule rejection has no threshold"),
        ({"bad_words": ("",)}, "bad_words contains an empty text"),
        ({"bad_words": ("\ud800",)}, "bad_words has an invalid character at position 1"),
        ({"cloud": 5}, "cloud must be a CloudConfig, not 5"),
        (
            {"cloud": CloudConfig(gates=("nll",)), "universal": True},
            "disable universal, and choose method",
        ),
        ({"temperature": 1e-38}, "temperature must be 0 or at least 0.001, not 1e-38"),
        ({"gamma": 10**5000}, "a number with thousands of digits"),
        ({"stop_tokens": (1, math.nan)}, "stop_tokens must be a list of whole numbers"),
        ({"rule": ""}, "unknown rule ''"),
        ({"method": "nasd", "filler_weight": "equal", "filler_top_k": 1}, "filler_weight equal has no effect with"),
    ],
)
def test_invalid_values_get_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        Recipe(**values)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["bad_words", "stop_tokens"])
def test_validation_ends_at_the_first_invalid_item(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} must be") as refused:
        Recipe(**{name: ({},) * 2000})
    cause = refused.value.__context__
    assert isinstance(cause, ValidationError) and cause.error_count() == 1


def test_the_configuration_of_the_page_is_plain_data(page: Any) -> None:
    """Gradio copies it for each visitor, with all objects that it refers to."""
    assert json.loads(json.dumps(page.get_config_file()))


def test_visitors_of_a_public_page_cannot_change_the_host(page: Any) -> None:
    defaults = {name: setting_of(option, option.default) for name, option in OPTIONS.items()}
    PUBLIC.check_settings(defaults, defaults)
    for name in ("device", "drafter_device", "dtype", "word_frequencies"):
        with pytest.raises(UserError, match=f"{name} is set by the host"):
            PUBLIC.check_settings({**defaults, name: "cpu"}, defaults)


# --- rules between options --------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
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


@pytest.mark.slow
@pytest.mark.parametrize(("method", "name"), CASES)
@pytest.mark.usefixtures("models")
def test_every_option_of_a_method_changes_its_trace(method: str, name: str) -> None:
    around = AROUND.get(name, {})
    if method in ("nasd", "suffix", "lookup") and name in ("gamma_min", "egag_ema_beta"):
        pytest.skip("these drafters have no logits")
    assert changes(name, {"method": method, **around})


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["gamma", "gamma_min", "gamma_max", "egag_ema_beta"])
@pytest.mark.usefixtures("models")
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


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("models")
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


@pytest.mark.slow
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
@pytest.mark.usefixtures("models")
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
