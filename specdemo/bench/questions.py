"""Questions in the format of Spec-Bench."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from specdemo.core.errors import UserError
from specdemo.prompts import Prompt


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
