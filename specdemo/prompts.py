"""Prompts by class: texts to continue, and user messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specdemo.core.errors import check_name
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
