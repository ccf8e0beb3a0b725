"""Bundled prompts by class, and continuations recorded from the bundled target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdemo.core.errors import check_name
from specdemo.models.zoo import ASSETS

PROMPTS = ASSETS / "prompts.json"
WRITTEN = ASSETS / "written.json"
TEMPERATURES = (0.0, 1.0)  # at which the texts were drawn


@dataclass(frozen=True)
class Prompt:
    """A text to continue and the class it stands for."""

    kind: str
    name: str
    text: str
    written: str = ""  # how the target itself went on, if that is known


def load_prompts(path: Path = PROMPTS, kinds: Sequence[str] = ()) -> list[Prompt]:
    """The bundled prompts, of all classes or of these."""
    classes = json.loads(path.read_text("utf-8"))
    for kind in kinds:
        check_name("class of prompts", kind, classes)
    return [
        Prompt(kind, f"{kind} {i + 1}", text)
        for kind, texts in classes.items()
        for i, text in enumerate(texts)
        if not kinds or kind in kinds
    ]


def load_written(temperature: float, kinds: Sequence[str] = (), path: Path = WRITTEN) -> list[Prompt]:
    """Prompts with what the target wrote at the nearest temperature, of all classes or of these."""
    classes = json.loads(path.read_text("utf-8"))
    for kind in kinds:
        check_name("class of prompts", kind, classes)
    nearest = min(TEMPERATURES, key=lambda one: abs(one - temperature))
    return [
        Prompt(kind, f"{kind} text {i + 1}", entry["prompt"], entry[f"{nearest:g}"])
        for kind, entries in classes.items()
        for i, entry in enumerate(entries)
        if not kinds or kind in kinds
    ]
