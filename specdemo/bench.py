"""Recipes x prompts, paired and alternating in one process: a table for people, one JSON line for machines.

Every prompt is decoded by every recipe, in a shuffled order, right after one another, so that whatever else the
machine does weighs on all alike. A speed-up is a ratio on one prompt; what is quoted is the median over prompts with
a bootstrap interval. Models are loaded and have run once before anything is timed.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdemo.generate import generate
from specdemo.models.load import Shelf
from specdemo.models.pairs import ASSETS
from specdemo.recipe import Recipe, known

PROMPTS = ASSETS / "prompts.json"


@dataclass(frozen=True)
class Prompt:
    """A text to continue and the class it stands for."""

    kind: str
    name: str
    text: str


@dataclass(frozen=True)
class Row:
    """One recipe on one class of prompts; medians over prompts, intervals of 95 %."""

    kind: str
    recipe: str
    prompts: int
    tokens_per_second: float
    speedup: float | None
    interval: tuple[float, float] | None
    slower: tuple[str, ...]  # prompts on which it lost to plain decoding
    acceptance_rate: float | None  # accepted / drafted
    alpha: float | None  # mean sum min(p, q)
    tokens_per_pass: float
    c: float | None  # a drafted token's time over a plain step's
    v: float | None  # a verifying pass's time over a plain step's
    ttft_s: float


def load_prompts(path: Path = PROMPTS, kinds: Sequence[str] = ()) -> list[Prompt]:
    """The bundled prompts, of all classes or of these."""
    classes = json.loads(path.read_text("utf-8"))
    for kind in kinds:
        known("class of prompts", kind, classes)
    return [
        Prompt(kind, f"{kind} {i + 1}", text)
        for kind, texts in classes.items()
        for i, text in enumerate(texts)
        if not kinds or kind in kinds
    ]


def label(recipe: Recipe) -> str:
    """A recipe in a few words."""
    speculative = "" if recipe.method == "ar" else f" gamma={recipe.gamma}"
    return f"{recipe.method}{speculative} T={recipe.temperature:g}"


def measure(
    recipes: Sequence[Recipe], prompts: Sequence[Prompt], shelf: Shelf, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Run everything; one record per prompt: its name, class and each recipe's metrics by index."""
    order = list(range(len(recipes)))
    for recipe in recipes:
        list(generate(replace(recipe, max_tokens=8), prompts[0].text, shelf))
    rng = random.Random(seed)
    for prompt in prompts:
        rng.shuffle(order)
        figures: list[Any] = [None] * len(recipes)
        for i in order:
            *_, end = generate(recipes[i], prompt.text, shelf)
            figures[i] = end["metrics"]
        yield {"kind": prompt.kind, "name": prompt.name, "metrics": figures}


def interval(ratios: Sequence[float], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """Bootstrap interval of 95 % for the median."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def table(recipes: Sequence[Recipe], records: Iterable[dict[str, Any]]) -> list[Row]:
    """A row per class and recipe. Speed-ups are against the plain recipe of the same temperature, if there is one."""
    records = list(records)
    plain = {recipe.temperature: i for i, recipe in enumerate(recipes) if recipe.method == "ar"}
    rows = []
    for kind in dict.fromkeys(record["kind"] for record in records):
        some = [record for record in records if record["kind"] == kind]
        for i, recipe in enumerate(recipes):
            base = plain.get(recipe.temperature)
            rows.append(_row(kind, label(recipe), some, i, None if base in (i, None) else base))
    return rows


def _row(kind: str, name: str, records: list[dict[str, Any]], i: int, base: int | None) -> Row:
    ours = [record["metrics"][i] for record in records]

    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    ratios, c, v = [], [], []
    for record, m in zip(records, ours, strict=True):
        if base is None or not m["tokens_per_second"]:
            continue
        plain = record["metrics"][base]
        passes, plain_passes = m["steps"] - 1, plain["steps"] - 1
        if not plain["tokens_per_second"] or not passes:
            continue
        step = plain["decode_s"] / plain_passes
        ratios.append((m["tokens_per_second"] / plain["tokens_per_second"], record["name"]))
        v.append(m["verify_s"] / passes / step)
        if m["drafted"]:
            c.append(m["draft_s"] / m["drafted"] / step)
    return Row(
        kind=kind,
        recipe=name,
        prompts=len(records),
        tokens_per_second=middle(m["tokens_per_second"] for m in ours) or 0.0,
        speedup=middle(ratio for ratio, _ in ratios),
        interval=interval([ratio for ratio, _ in ratios]) if ratios else None,
        slower=tuple(f"{name} ({ratio:.2f}x)" for ratio, name in sorted(ratios) if ratio < 1),
        acceptance_rate=middle(m["acceptance_rate"] for m in ours),
        alpha=middle(m["mean_beta"] for m in ours),
        tokens_per_pass=middle(m["tokens_per_target_pass"] for m in ours) or 0.0,
        c=middle(c),
        v=middle(v),
        ttft_s=middle(m["ttft_s"] for m in ours) or 0.0,
    )


COLUMNS = (
    "class",
    "recipe",
    "tokens/s",
    "speed-up",
    "95 %",
    "acc/drafted",
    "alpha",
    "tokens/pass",
    "c",
    "v",
    "slower on",
)


def markdown(rows: Sequence[Row]) -> str:
    """The table, readable as it is and as Markdown."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    cells = [
        (
            row.kind,
            row.recipe,
            number(row.tokens_per_second, 1),
            number(row.speedup),
            "-" if row.interval is None else f"{row.interval[0]:.2f}-{row.interval[1]:.2f}",
            number(row.acceptance_rate),
            number(row.alpha),
            number(row.tokens_per_pass),
            number(row.c),
            number(row.v),
            "-" if row.speedup is None else f"{len(row.slower)} of {row.prompts}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (COLUMNS, *cells)
    ]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def as_json(rows: Sequence[Row]) -> str:
    """All rows in one line."""
    return json.dumps({"bench": [asdict(row) for row in rows]})
