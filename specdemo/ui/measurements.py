"""Jobs of predictions, benches and calibrations. They raise `UserError` if the host does not allow them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from specdemo.bench.calibration import Calibration, calibrate
from specdemo.bench.measure import BenchProgress, measure
from specdemo.bench.pairs import PairBench, measure_pairs
from specdemo.core.errors import UserError
from specdemo.fit import FitRow, fit
from specdemo.preflight import OWN, SHORT_TEXT_TOKENS, Preflight, PreflightProgress, predict
from specdemo.prompts import Prompt, alternate_classes, load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.service import Service

_FIT_OPTIONS = ("temperature", "top_p", "chat", "dtype", "quantization", "activations", "device")
PROMPTS_PER_KIND = 3  # prompts per kind of text in a preflight
BenchJob = Callable[[], Iterator[BenchProgress | dict[str, Any]]]


def prediction_job(
    service: Service, recipe: Recipe, prompt: str = ""
) -> Callable[[], Iterator[PreflightProgress | Preflight]]:
    """Predict the speed-up from a short text after `prompt`, without one from texts of all classes."""
    if not service.permanent:
        raise UserError("preflight needs a permanent device, which this host does not have: press Run instead")
    if recipe.cloud is not None:
        raise UserError("preflight times both models on this machine: choose mode off, or press Run instead")
    if recipe.external is not None:
        raise UserError("preflight times both models on this machine: leave external empty")
    recipe = service.limits.grant(recipe, prompt)
    texts = alternate_classes(load_prompts(chat=recipe.chat), PROMPTS_PER_KIND)
    if prompt.strip():
        texts = [Prompt(OWN, OWN, prompt)]
        recipe = replace(recipe, max_tokens=min(recipe.max_tokens, SHORT_TEXT_TOKENS), min_length=0)
    return lambda: predict(recipe, texts, service.models)


def fit_job(service: Service, recipe: Recipe) -> Callable[[], Iterator[PreflightProgress | FitRow]]:
    """Compare the models of this machine as drafters for the target of `recipe`."""
    if service.limits.public or not service.permanent:
        raise UserError("the files of this host are not shown to visitors: run the program on your machine")
    values = {name: getattr(recipe, name) for name in _FIT_OPTIONS}
    return lambda: fit(recipe.models[0], (), values, service.models)


def bench_job(service: Service, recipes: Sequence[Recipe], prompts: Sequence[Prompt]) -> BenchJob:
    """Measure every recipe on every prompt."""
    granted = _grant_long(service, recipes, prompts)

    def steps() -> Iterator[BenchProgress | dict[str, Any]]:
        with service.with_services(granted) as recipes:
            yield from measure(recipes, prompts, service.models)

    return steps


def pairs_bench_job(service: Service, benches: Sequence[PairBench], prompts: Sequence[Prompt]) -> BenchJob:
    """Measure pairs in turn and add the records to `benches`."""
    for bench in benches:
        bench.recipes = _grant_long(service, bench.recipes, prompts)
    return lambda: measure_pairs(benches, prompts, service.models)


def calibration_job(
    service: Service, recipe: Recipe, prompts: Sequence[Prompt]
) -> Callable[[], Iterator[BenchProgress | Calibration]]:
    """Measure thresholds of gates."""
    (granted,) = _grant_long(service, [recipe], prompts)
    return lambda: calibrate(granted, prompts, service.models)


def _grant_long(service: Service, recipes: Sequence[Recipe], prompts: Sequence[Prompt]) -> list[Recipe]:
    if service.limits.max_seconds is not None or not service.permanent:
        raise UserError("measurements take minutes, which this host does not allow: run the program on your machine")
    longest = max((prompt.text for prompt in prompts), key=len)
    return [service.limits.grant(replace(recipe, ngram_keep=False), longest) for recipe in recipes]
