"""Prompts by class: texts to continue, user messages, and questions in the format of Spec-Bench."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from specdemo.core.errors import UserError, check_name
from specdemo.models.zoo import ASSETS

PROMPT_FILE = ASSETS / "prompts.json"
CHAT_FILE = ASSETS / "chat_prompts.json"


@dataclass(frozen=True)
class Prompt:
    """A prompt of the class `kind`."""

    kind: str
    name: str
    text: str
    later: tuple[str, ...] = ()  # further messages of a conversation
    messages: tuple[dict[str, str], ...] = ()  # conversation up to this message


def load_prompts(kinds: Sequence[str] = (), chat: bool = False) -> list[Prompt]:
    """Return the classes `kinds` of both kinds of prompts, by default all user messages (`chat`) or all other texts."""
    classes = _read_classes(kinds, *((PROMPT_FILE, CHAT_FILE) if kinds else (CHAT_FILE if chat else PROMPT_FILE,)))
    return [Prompt(kind, f"{kind} {i}", text) for kind, texts in classes.items() for i, text in enumerate(texts, 1)]


def alternate_classes(prompts: Iterable[Prompt], per_kind: int | None = None) -> list[Prompt]:
    """Return the first `per_kind` prompts of each class (default: all), with alternating classes."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    rows = zip_longest(*(group[:per_kind] for group in kinds.values()))
    return [prompt for row in rows for prompt in row if prompt is not None]


def _read_classes(kinds: Sequence[str], *paths: Path) -> dict[str, list[Any]]:
    classes = {kind: entries for path in paths for kind, entries in json.loads(path.read_text("utf-8")).items()}
    for kind in kinds:
        check_name("class of prompts", kind, classes)
    return {kind: entries for kind, entries in classes.items() if not kinds or kind in kinds}


def read_questions(path: Path, kinds: Sequence[str] = ()) -> list[Prompt]:
    """Return a prompt per line; `kinds` selects categories. Raises `UserError`."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the questions of {path} ({error}): give a JSON Lines file") from None
    prompts = [_question(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    categories = dict.fromkeys(prompt.kind for prompt in prompts)
    if not prompts:
        raise UserError(f"{path} contains no questions: give a JSON Lines file with question_id, category and turns")
    if unknown := [kind for kind in kinds if kind not in categories]:
        raise UserError(f"unknown category {unknown[0]!r}: {path} contains {', '.join(categories)}")
    return [prompt for prompt in prompts if not kinds or prompt.kind in kinds]


def _question(line: str, number: int) -> Prompt:
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
