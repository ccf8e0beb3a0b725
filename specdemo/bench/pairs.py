"""Benchmarks of several pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specdemo.bench.measure import BenchProgress, measure, recipe_label
from specdemo.bench.table import BenchRow, Record, markdown_table, table
from specdemo.core.errors import UserError
from specdemo.core.formats import megabytes, number
from specdemo.drafters import METHODS
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import SAME
from specdemo.models.zoo import PAIRS
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

_figure = partial(number, missing="-")


@dataclass
class PairBench:
    """Recipes of a pair, their records, and the recipes that cannot run, with reasons."""

    name: str
    recipes: list[Recipe] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def rows(self) -> list[BenchRow]:
        return table(self.recipes, self.records) if self.records else []

    def skip(self, name: str, reason: object) -> None:
        self.skipped.append((name, str(reason)))


def pair_bench(name: str, make: Callable[..., Recipe], varied: Iterable[Mapping[str, Any]]) -> PairBench:
    """Return the recipes of a pair, which `make` returns for settings of `grid` and the pair.

    A pair without drafter and head drafts with its quantised target.
    """
    bench = PairBench(name)
    for values in varied:
        try:
            bench.recipes.append(make(**{**values, "pair": name, **_drafter(name, values)}))
        except UserError as error:
            if values["method"] == "ar":
                bench.skip(f"pair {name}", error)
                return bench
            bench.skip(f"pair {name}, method {values['method']}", error)
    if all(recipe.method == "ar" for recipe in bench.recipes):
        bench.recipes = []
    return bench


def _drafter(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    method, pair = METHODS[values["method"]], PAIRS[name]
    has_head = method.uses_head and pair.head is not None
    copied = method.uses_model and not method.optional_model and pair.drafter is None and not has_head
    return {"drafter": SAME} if copied else {}


def measure_pair(
    bench: PairBench, prompts: Sequence[Prompt], pool: ModelPool, repeat: int = 1
) -> Iterator[BenchProgress]:
    """Measure a pair; one that cannot be loaded is skipped."""
    if not bench.recipes:
        return
    try:
        for item in measure(bench.recipes, prompts, pool, repeat=repeat):
            if isinstance(item, dict):
                bench.records.append(item)
            else:
                yield item
    except UserError as error:
        bench.skip(f"pair {bench.name}", error)
        bench.recipes, bench.records = [], []


def measure_pairs(benches: Sequence[PairBench], prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[BenchProgress]:
    """Measure one pair after another; `number` and `total` count the runs of all pairs."""
    sizes = [len(bench.recipes) * len(prompts) for bench in benches]
    for i, bench in enumerate(benches):
        for item in measure_pair(bench, prompts, pool):
            number = sum(sizes[:i]) + item.number
            yield BenchProgress(number, sum(sizes), f"pair {bench.name}, {item.doing}")


def pairs_table(benches: Sequence[PairBench]) -> str:
    """Return a row per pair, recipe and class of prompts."""
    head = ("pair", "lane", "drafter MB", "class", "T", "c", "alpha", "mean overlap", "tokens/pass", "speed-up",
            "Thm 3.8")  # fmt: skip
    rows = []
    for bench in benches:
        environments = [run["environment"] for run in bench.records[0]["runs"]] if bench.records else []
        lanes = {recipe_label(recipe): (recipe, i) for i, recipe in enumerate(bench.recipes)}
        for row in bench.rows:
            recipe, i = lanes[row.lane]
            if recipe.method == "ar":
                continue
            copy = " (quantised copy)" if recipe.drafter == SAME else ""
            size = megabytes(environments[i]["drafter_bytes"] or None, 1)
            figures = (row.c, row.alpha, row.mean_beta, row.tokens_per_pass, row.speedup, row.theory)
            lane = row.lane.rpartition(" ")[0] + copy
            rows.append((bench.name, lane, size, row.kind, f"{recipe.temperature:g}", *map(_figure, figures)))
    return markdown_table(head, rows)


def skipped_lines(benches: Sequence[PairBench]) -> list[str]:
    return [f"skipped: {name}: {reason}" for bench in benches for name, reason in dict(bench.skipped).items()]
