"""Predictions, benches and calibrations of the page, whose passes run alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from specdemo.bench.calibration import Calibration, calibrate
from specdemo.bench.measure import BenchProgress, measure
from specdemo.bench.pairs import PairBench, measure_pairs
from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.preflight import OWN, SHORT_TEXT_TOKENS, Preflight, PreflightProgress, predict, texts_for
from specdemo.prompts import Prompt, alternate_classes
from specdemo.recipe import Recipe
from specdemo.ui.limits import HostLimits
from specdemo.ui.streams import read_result
from specdemo.ui.visitors import Visitors
from specdemo.worker import Stream, Worker, WorkerGroup, unshared_passes

PROMPTS_PER_KIND = 3  # prompts per kind of text in a preflight
T = TypeVar("T")


class Measurements:
    """Measure recipes with the models of the page. `admit` submits a job of a visitor."""

    def __init__(
        self,
        models: ModelPool,
        worker: Worker | WorkerGroup,
        limits: HostLimits,
        visitors: Visitors,
        admit: Callable[..., Stream[Any]],
        with_services: Callable[[Sequence[Recipe]], AbstractContextManager[list[Recipe]]],
    ) -> None:
        self._models, self._worker = models, worker
        self._limits, self._visitors = limits, visitors
        self._admit, self._with_services = admit, with_services

    def predict(self, recipe: Recipe, prompt: str = "", address: str = "") -> Stream[PreflightProgress | Preflight]:
        """Predict the speed-up from a short text after `prompt`, without one from texts of all classes."""
        if isinstance(self._worker, WorkerGroup):
            raise UserError("preflight needs a permanent device, which this host does not have: press Run instead")
        if recipe.cloud is not None:
            raise UserError("preflight times both models on this machine: choose mode off, or press Run instead")
        if recipe.external is not None:
            raise UserError("preflight times both models on this machine: leave external empty")
        recipe = self._limits.grant(recipe, prompt)
        texts = alternate_classes(texts_for(recipe), PROMPTS_PER_KIND)
        if prompt.strip():
            texts = [Prompt(OWN, OWN, prompt)]
            recipe = replace(recipe, max_tokens=min(recipe.max_tokens, SHORT_TEXT_TOKENS), min_length=0)
        return self._admit(lambda: _measured(predict(recipe, texts, self._models)), address)

    async def preflight(self, recipe: Recipe, address: str = "") -> Preflight:
        return await read_result(self.predict(recipe, address=address), Preflight)

    def bench(
        self, recipes: Sequence[Recipe], prompts: Sequence[Prompt], visitor: str, address: str = ""
    ) -> Stream[BenchProgress | dict[str, Any]]:
        """Measure every recipe on every prompt; stop the visitor's previous bench."""
        granted = self._grant_long(recipes, prompts)

        def steps() -> Iterator[BenchProgress | dict[str, Any]]:
            with self._with_services(granted) as recipes:
                yield from measure(recipes, prompts, self._models)

        return self._start_bench(steps, visitor, address)

    def bench_pairs(
        self, benches: Sequence[PairBench], prompts: Sequence[Prompt], visitor: str, address: str = ""
    ) -> Stream[BenchProgress | dict[str, Any]]:
        """Measure one pair after another and add the records to `benches`; stop the visitor's previous bench."""
        for bench in benches:
            bench.recipes = self._grant_long(bench.recipes, prompts)
        return self._start_bench(lambda: measure_pairs(benches, prompts, self._models), visitor, address)

    def _grant_long(self, recipes: Sequence[Recipe], prompts: Sequence[Prompt]) -> list[Recipe]:
        if self._limits.max_seconds is not None or isinstance(self._worker, WorkerGroup):
            raise UserError(
                "measurements take minutes, which this host does not allow: run the program on your machine"
            )
        longest = max((prompt.text for prompt in prompts), key=len)
        return [self._limits.grant(replace(recipe, ngram_keep=False), longest) for recipe in recipes]

    def _start_bench(
        self, job: Callable[[], Iterator[BenchProgress | dict[str, Any]]], visitor: str, address: str
    ) -> Stream[BenchProgress | dict[str, Any]]:
        known = self._visitors.enter(visitor)
        stream = self._admit(lambda: _measured(job()), address, visitor, replaced=known.bench)
        known.stop_bench()
        known.bench = stream
        return stream

    def calibrate(
        self, recipe: Recipe, prompts: Sequence[Prompt], visitor: str, address: str = ""
    ) -> Stream[BenchProgress | Calibration]:
        """Measure thresholds of gates."""
        (granted,) = self._grant_long([recipe], prompts)
        return self._admit(lambda: _measured(calibrate(granted, prompts, self._models)), address, visitor)


def _measured(results: Iterator[T]) -> Iterator[T]:
    with unshared_passes():
        yield from results
