"""Bundled prompts by class, and continuations recorded from the bundled target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdemo.core.errors import check_name
from specdemo.models.zoo import ASSETS

PROMPT_FILE = ASSETS / "prompts.json"
CONTINUATION_FILE = ASSETS / "written.json"
RECORDED_TEMPERATURES = (0.0, 1.0)  # of the continuations


@dataclass(frozen=True)
class Prompt:
    kind: str
    name: str
    text: str
    written: str = ""  # continuation by the target, if recorded


def load_prompts(path: Path = PROMPT_FILE, kinds: Sequence[str] = ()) -> list[Prompt]:
    classes = _read_classes(path, kinds)
    return [Prompt(kind, f"{kind} {i}", text) for kind, texts in classes.items() for i, text in enumerate(texts, 1)]


def load_written(temperature: float, kinds: Sequence[str] = (), path: Path = CONTINUATION_FILE) -> list[Prompt]:
    """Return prompts with continuations at the nearest recorded temperature."""
    nearest = min(RECORDED_TEMPERATURES, key=lambda recorded: abs(recorded - temperature))
    return [
        Prompt(kind, f"{kind} text {i}", entry["prompt"], entry[f"{nearest:g}"])
        for kind, entries in _read_classes(path, kinds).items()
        for i, entry in enumerate(entries, 1)
    ]


def _read_classes(path: Path, kinds: Sequence[str]) -> dict[str, list[Any]]:
    classes = json.loads(path.read_text("utf-8"))
    for kind in kinds:
        check_name("class of prompts", kind, classes)
    return {kind: entries for kind, entries in classes.items() if not kinds or kind in kinds}
