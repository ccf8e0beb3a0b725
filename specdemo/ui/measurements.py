"""Predictions, benches and calibrations of the page, in passes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from specdemo.bench.calibration import Calibration, calibrate
from specdemo.bench.measure import BenchProgress, measure
from specdemo.bench.pairs import PairBench, measure_pairs
from specdemo.core.errors import UserError
from specdemo.preflight import OWN, SHORT_TEXT_TOKENS, Preflight, PreflightProgress, predict, texts_for
from specdemo.prompts import Prompt, alternate_classes
from specdemo.recipe import Recipe
from specdemo.ui.service import Service
from specdemo.worker import Stream, unshared_passes

PROMPTS_PER_KIND = 3  # prompts per kind of text in a preflight
T = TypeVar("T")


def start_prediction(
    service: Service, recipe: Recipe, prompt: str = "", address: str = ""
) -> Stream[PreflightProgress | Preflight]:
    """Predict the speed-up from a short text after `prompt`, without one from texts of all classes."""
    if not service.permanent:
        raise UserError("preflight needs a permanent device, which this host does not have: press Run instead")
    if recipe.cloud is not None:
        raise UserError("preflight times both models on this machine: choose mode off, or press Run instead")
    if recipe.external is not None:
        raise UserError("preflight times both models on this machine: leave external empty")
    recipe = service.limits.grant(recipe, prompt)
    texts = alternate_classes(texts_for(recipe), PROMPTS_PER_KIND)
    if prompt.strip():
        texts = [Prompt(OWN, OWN, prompt)]
        recipe = replace(recipe, max_tokens=min(recipe.max_tokens, SHORT_TEXT_TOKENS), min_length=0)
    return service.admit(lambda: _measured(predict(recipe, texts, service.models)), address)


def start_bench(
    service: Service, recipes: Sequence[Recipe], prompts: Sequence[Prompt], visitor: str, address: str = ""
) -> Stream[BenchProgress | dict[str, Any]]:
    """Measure every recipe on every prompt; stop the visitor's previous bench."""
    granted = _grant_long(service, recipes, prompts)

    def steps() -> Iterator[BenchProgress | dict[str, Any]]:
        with service.with_services(granted) as recipes:
            yield from measure(recipes, prompts, service.models)

    return _replace_bench(service, steps, visitor, address)


def start_pairs_bench(
    service: Service, benches: Sequence[PairBench], prompts: Sequence[Prompt], visitor: str, address: str = ""
) -> Stream[BenchProgress | dict[str, Any]]:
    """Measure one pair after another and add the records to `benches`; stop the visitor's previous bench."""
    for bench in benches:
        bench.recipes = _grant_long(service, bench.recipes, prompts)
    return _replace_bench(service, lambda: measure_pairs(benches, prompts, service.models), visitor, address)


def _grant_long(service: Service, recipes: Sequence[Recipe], prompts: Sequence[Prompt]) -> list[Recipe]:
    if service.limits.max_seconds is not None or not service.permanent:
        raise UserError("measurements take minutes, which this host does not allow: run the program on your machine")
    longest = max((prompt.text for prompt in prompts), key=len)
    return [service.limits.grant(replace(recipe, ngram_keep=False), longest) for recipe in recipes]


def _replace_bench(
    service: Service, job: Callable[[], Iterator[BenchProgress | dict[str, Any]]], visitor: str, address: str
) -> Stream[BenchProgress | dict[str, Any]]:
    known = service.visitors.enter(visitor)
    stream = service.admit(lambda: _measured(job()), address, visitor, replaced=known.bench)
    known.stop_bench()
    known.bench = stream
    return stream


def start_calibration(
    service: Service, recipe: Recipe, prompts: Sequence[Prompt], visitor: str, address: str = ""
) -> Stream[BenchProgress | Calibration]:
    """Measure thresholds of gates."""
    (granted,) = _grant_long(service, [recipe], prompts)
    return service.admit(lambda: _measured(calibrate(granted, prompts, service.models)), address, visitor)


def _measured(results: Iterator[T]) -> Iterator[T]:
    with unshared_passes():
        yield from results
