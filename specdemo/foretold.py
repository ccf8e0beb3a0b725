"""Does preflight come true? What it foretells of every method and class beside what is then measured, in one process.

What is read beforehand and what is decoded afterwards share no prompt where the target's own texts are at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdemo import bench
from specdemo.models.shelf import Shelf
from specdemo.preflight import Preflight, preflight, texts_for
from specdemo.recipe import Recipe


@dataclass(frozen=True)
class Foretold:
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


def ask(recipes: Sequence[Recipe], kinds: Sequence[str], shelf: Shelf) -> dict[tuple[str, Recipe], Preflight]:
    """A preflight of every recipe for every class."""
    return {(kind, recipe): preflight(recipe, texts_for(recipe, [kind]), shelf) for kind in kinds for recipe in recipes}


def compare(
    asked: dict[tuple[str, Recipe], Preflight], recipes: Sequence[Recipe], records: Iterable[dict[str, Any]]
) -> list[Foretold]:
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
                Foretold(
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


def markdown(found: Sequence[Foretold]) -> str:
    """A row per class and recipe."""
    head = ["class", "recipe", "foretold", "95 %", "measured", "95 %", "foretold / measured"]
    head += ["tokens/pass", "cost of a round"]  # foretold, measured
    rows = [
        [
            one.kind,
            bench.label(one.recipe),
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


def as_json(found: Sequence[Foretold]) -> str:
    """All rows in one line."""
    return json.dumps({"foretold": [{**asdict(one), "ratio": one.ratio} for one in found]})
