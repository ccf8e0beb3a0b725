"""Texts that the bundled target wrote by itself, to be read where nothing is to be generated.

What a text's prompt is made of says little of how the text will go on: above all, greedy text repeats itself. So a few
prompts of every class, none of them among those that are measured, are kept with what the target made of them:
``python -m specdemo foretold --write`` asks it anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdemo.bench.measure import Prompt
from specdemo.generate import generate
from specdemo.models.pairs import ASSETS
from specdemo.models.shelf import Shelf
from specdemo.recipe import Recipe, known

WRITTEN = ASSETS / "written.json"
TEMPERATURES = (0.0, 1.0)  # at which the texts were drawn
LENGTH = 136  # tokens of each


def load_written(temperature: float, kinds: Sequence[str] = (), path: Path = WRITTEN) -> list[Prompt]:
    """Prompts with what the target wrote at the nearest temperature, of all classes or of these."""
    classes = json.loads(path.read_text("utf-8"))
    for kind in kinds:
        known("class of prompts", kind, classes)
    nearest = min(TEMPERATURES, key=lambda one: abs(one - temperature))
    return [
        Prompt(kind, f"{kind} text {i + 1}", entry["prompt"], entry[f"{nearest:g}"])
        for kind, entries in classes.items()
        for i, entry in enumerate(entries)
        if not kinds or kind in kinds
    ]


def write(recipe: Recipe, shelf: Shelf, path: Path = WRITTEN) -> None:
    """Let the recipe's target continue every prompt of the file, and keep what it says."""
    classes: dict[str, list[dict[str, Any]]] = json.loads(path.read_text("utf-8"))
    for entries in classes.values():
        for seed, entry in enumerate(entries):
            for temperature in TEMPERATURES:
                plain = replace(recipe, method="ar", temperature=temperature, top_p=1.0, seed=seed, max_tokens=LENGTH)
                records = generate(plain, entry["prompt"], shelf)
                entry[f"{temperature:g}"] = "".join(record["text"] for record in records if "i" in record)
    path.write_text(json.dumps(classes, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
