"""Does preflight come true? What it foretells of every method and class beside what is then measured, in one process.

What is read beforehand and what is decoded afterwards share no prompt where the target's own texts are at hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdemo import bench
from specdemo.bench import equality
from specdemo.cli.arguments import Parser, add_model_options, given
from specdemo.cli.commands import at_least_one, run_command
from specdemo.core.events import StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.preflight import Preflight, preflight, texts_for
from specdemo.prompts import TEMPERATURES, WRITTEN, load_prompts
from specdemo.recipe import Recipe


@dataclass(frozen=True)
class Comparison:
    """One recipe on one class of prompts: speed-ups over plain decoding, with intervals of 95 %."""

    kind: str
    recipe: Recipe
    tokens_per_pass: float
    foretold: float
    foretold_interval: tuple[float, float]
    prompts: int
    measured_tokens_per_pass: float | None
    measured: float
    measured_interval: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Foretold over measured: 1 where preflight was right."""
        return self.foretold / self.measured

    @property
    def round_foretold(self) -> float:
        """What a round was to cost, in plain passes: how far off that is is no matter of the texts."""
        return self.tokens_per_pass / self.foretold

    @property
    def round_measured(self) -> float | None:
        """What it did cost."""
        return self.measured_tokens_per_pass / self.measured if self.measured_tokens_per_pass else None


def ask(recipes: Sequence[Recipe], kinds: Sequence[str], pool: ModelPool) -> dict[tuple[str, Recipe], Preflight]:
    """A preflight of every recipe for every class."""
    return {(kind, recipe): preflight(recipe, texts_for(recipe, [kind]), pool) for kind in kinds for recipe in recipes}


def compare(
    asked: dict[tuple[str, Recipe], Preflight], recipes: Sequence[Recipe], records: Iterable[dict[str, Any]]
) -> list[Comparison]:
    """What was asked beside what `bench.measure` found for a plain recipe and then `recipes`."""
    rows = bench.table([replace(recipes[0], method="ar"), *recipes], records)
    found = []
    for kind in dict.fromkeys(row.kind for row in rows):
        mine = [row for row in rows if row.kind == kind][1:]
        for recipe, row in zip(recipes, mine, strict=True):
            if row.speedup is None or row.interval is None:
                continue  # every text ended with its first token
            one = next(one for one in asked[kind, recipe].estimates if one.gamma == recipe.gamma)
            found.append(
                Comparison(
                    kind,
                    recipe,
                    one.tokens_per_pass,
                    one.speedup,
                    (one.low, one.high),
                    row.prompts,
                    row.tokens_per_pass,
                    row.speedup,
                    row.interval,
                )
            )
    return found


def markdown(found: Sequence[Comparison]) -> str:
    """A row per class and recipe."""
    head = ["class", "recipe", "foretold", "95 %", "measured", "95 %", "foretold / measured"]
    head += ["tokens/pass", "cost of a round"]  # foretold, measured
    rows = [
        [
            one.kind,
            bench.recipe_label(one.recipe),
            f"{one.foretold:.2f}",
            "{:.2f}-{:.2f}".format(*one.foretold_interval),
            f"{one.measured:.2f}",
            "{:.2f}-{:.2f}".format(*one.measured_interval),
            f"{one.ratio:.2f}",
            f"{one.tokens_per_pass:.2f}, {one.measured_tokens_per_pass or 1:.2f}",
            f"{one.round_foretold:.2f}, {one.round_measured or 1:.2f}",
        ]
        for one in found
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def as_json(found: Sequence[Comparison]) -> str:
    """All rows in one line."""
    return json.dumps({"foretold": [{**asdict(one), "ratio": one.ratio} for one in found]})


LENGTH = 136  # tokens of each recorded continuation


def write(recipe: Recipe, pool: ModelPool, path: Path = WRITTEN) -> None:
    """Let the recipe's target continue every prompt of the file, and keep what it says."""
    classes: dict[str, list[dict[str, Any]]] = json.loads(path.read_text("utf-8"))
    for entries in classes.values():
        for seed, entry in enumerate(entries):
            for temperature in TEMPERATURES:
                plain = replace(recipe, method="ar", temperature=temperature, top_p=1.0, seed=seed, max_tokens=LENGTH)
                events = generate(plain, entry["prompt"], pool)
                entry[f"{temperature:g}"] = "".join(event.text for event in events if isinstance(event, StepEvent))
    path.write_text(json.dumps(classes, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run(options: argparse.Namespace) -> int:
    """Measure and print the table."""
    varying = ("method", "temperature")
    common = {name: value for name, value in given(options).items() if name not in varying} | {"top_p": 1.0}
    pool = ModelPool()
    if options.write:
        write(Recipe(**common, method="ar"), pool)
        return 0
    at_least_one("repeat", options.repeat)
    prompts = load_prompts(kinds=options.kind)
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    if options.prompts is not None:
        at_least_one("prompts", options.prompts)
        prompts = [one for kind in kinds for one in equality.more(load_prompts(kinds=[kind]), options.prompts)]
    found = []
    for temperature in options.temperature:
        recipes = [Recipe(**common, method=method, temperature=temperature) for method in options.method]
        asked = ask(recipes, kinds, pool)
        plain = replace(recipes[0], method="ar")
        items = bench.measure([plain, *recipes], prompts, pool, repeat=options.repeat)
        found += compare(asked, recipes, [item for item in items if isinstance(item, dict)])
    print(markdown(found))
    target = recipes[0].models[0]
    itself = Recipe(**{**common, "pair": None, "target": target, "drafter": target}, temperature=options.temperature[0])
    print(f"the target drafting for itself: {preflight(itself, texts_for(itself, kinds[:1]), pool).advice}")
    print(as_json(found))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run the benchmark."""
    parser = Parser(description="what preflight foretells beside what is then measured")
    add_model_options(parser)
    parser.add_argument(
        "--method", nargs="+", default=["draft", "nasd", "self"], help="draft, self, nasd, suffix, lookup"
    )
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="every prompt N times, with another seed each"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        metavar="N",
        help="how many of a class are measured: the bundled ones, then parts of them (default: the bundled ones)",
    )
    parser.add_argument("--write", action="store_true", help="let the target write anew the texts that are read")
    return run_command(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
