"""Questions in the format of Spec-Bench, and its table of mean accepted tokens and speed-up per category."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from specdemo.bench.measure import recipe_label
from specdemo.bench.table import Record, markdown_table
from specdemo.core.errors import UserError
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

ALL = "all"


def read_questions(path: Path, kinds: Sequence[str] = ()) -> list[Prompt]:
    """Return a prompt per line; `kinds` selects categories. Raises `UserError`."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the questions of {path} ({error}): give a JSON Lines file") from None
    prompts = [_prompt(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    categories = dict.fromkeys(prompt.kind for prompt in prompts)
    if not prompts:
        raise UserError(f"{path} contains no questions: give a JSON Lines file with question_id, category and turns")
    if unknown := [kind for kind in kinds if kind not in categories]:
        raise UserError(f"unknown category {unknown[0]!r}: {path} contains {', '.join(categories)}")
    return [prompt for prompt in prompts if not kinds or prompt.kind in kinds]


def _prompt(line: str, number: int) -> Prompt:
    try:
        question = json.loads(line)
    except (ValueError, RecursionError):
        question = None
    fields = question if isinstance(question, dict) else {}
    name, category, turns = (fields.get(field) for field in ("question_id", "category", "turns"))
    texts = isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)
    if not (isinstance(name, int | str) and isinstance(category, str) and category and texts):
        raise UserError(f'line {number} is no question: write {{"question_id": 1, "category": "qa", "turns": ["..."]}}')
    first, *later = cast(list[str], turns)
    return Prompt(category, f"{category} {name}", first, later=tuple(later))


def category_table(recipes: Sequence[Recipe], records: Sequence[Record]) -> str:
    """Return mean accepted tokens per step and speed-up by category: ratios of sums, without the prefill."""
    categories = [*dict.fromkeys(record["kind"] for record in records), ALL]
    ar = {recipe.temperature: i for i, recipe in enumerate(recipes) if recipe.method == "ar"}
    rows = []
    for i, recipe in enumerate(recipes):
        if recipe.method != "ar":
            base = ar[recipe.temperature]
            cells = (_cell([r for r in records if name in (r["kind"], ALL)], i, base) for name in categories)
            rows.append((recipe_label(recipe), *cells))
    table = markdown_table(("lane", *categories), rows)
    return f"Mean accepted tokens per step and speed-up, by category:\n\n{table}"


def _cell(records: Iterable[Record], index: int, base: int) -> str:
    pairs = [(record["runs"][index], record["runs"][base]) for record in records]
    timed = [(run, ar) for run, ar in pairs if run["wall_s"] and ar["wall_s"] and run["steps"] > 1]
    if not timed:
        return "-"
    tokens, steps, wall = (sum(run[name] for run, _ in timed) for name in ("decode_tokens", "steps", "wall_s"))
    ar_tokens, ar_wall = (sum(ar[name] for _, ar in timed) for name in ("decode_tokens", "wall_s"))
    return f"{tokens / (steps - len(timed)):.2f}, {(tokens / wall) / (ar_tokens / ar_wall):.2f}x"
