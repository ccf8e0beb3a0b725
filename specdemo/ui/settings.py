"""Settings that come back: from a link, from the visit before, or the usual ones. Knows no gradio.

Settings are a dict by the names of the sidebar's controls, with `prompt` and `compare`. What comes from outside is
taken field by field, and only where a recipe can be made of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from specdemo.core.errors import UserError
from specdemo.recipe import Recipe
from specdemo.remote.config import MODES, CloudConfig

LONGEST_PROMPT = 100_000  # characters that a link or a browser's memory may bring
Settings = dict[str, Any]


def from_link(query: Mapping[str, str], usual: Settings) -> Settings:
    """What a link's query says, as values of the types that the controls have; names it does not know are left out."""
    found = {}
    for name, text in query.items():
        if name not in usual:
            continue
        if isinstance(usual[name], str):
            found[name] = text
            continue
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError):
            found[name] = text  # which is then refused
    return found


def restored(wanted: Any, usual: Settings, device: str) -> tuple[Settings, list[str]]:
    """`usual` with as much of `wanted` as can be meant, and a sentence for everything that cannot."""
    settings, refused = dict(usual), []
    for name, value in wanted.items() if isinstance(wanted, Mapping) else ():
        if name not in usual or value == usual[name]:
            continue
        try:
            if name == "prompt":
                if not isinstance(value, str) or len(value) > LONGEST_PROMPT:
                    raise UserError(f"the prompt must be a text of at most {LONGEST_PROMPT:,} characters")
            elif name == "compare":
                if not isinstance(value, bool):
                    raise UserError(f"compare must be true or false, not {value!r}")
            else:
                if name in OF_CLOUD:
                    cloud_of({**recipe_settings(settings), name: value})
                recipe_of({**recipe_settings(settings), name: value}, device)
        except UserError as error:
            refused.append(str(error))
        else:
            settings[name] = value
    return settings, refused


def recipe_settings(settings: Settings) -> Settings:
    """Those that are a recipe's."""
    return {name: value for name, value in settings.items() if name not in ("prompt", "compare")}


def kept_recipes(kept: Any, usual: Settings, device: str) -> list[Recipe]:
    """Recipes of the lanes that a browser remembers; none of what cannot be meant."""
    found = []
    for wanted in kept if isinstance(kept, list) else ():
        settings, refused = restored(wanted, usual, device)
        if isinstance(wanted, Mapping) and not refused:
            found.append(recipe_of(recipe_settings(settings), device))
    return found


LONGEST_NAME = 300  # characters; a local directory may take some
OFF = "off"
WHERE = {OFF: "the target is here, too"} | MODES
OF_CLOUD = tuple(field.name for field in fields(CloudConfig))


def recipe_of(settings: Mapping[str, Any], device: str) -> Recipe:
    """The recipe that raw settings mean; `UserError` if they cannot mean one."""
    clean = _clean(Recipe, settings)
    if clean.get("target"):
        clean.pop("pair", None)  # one's own models in place of a ready pair
    if settings.get("mode", OFF) != OFF:
        clean["cloud"] = cloud_of(settings)
    return Recipe(device=device, **clean)


def cloud_of(settings: Mapping[str, Any]) -> CloudConfig:
    """The link alone, whether it is to be used or not."""
    clean = _clean(CloudConfig, settings)
    if clean.get("mode") == OFF:
        del clean["mode"]
    return CloudConfig(**{"remote": "", **clean})


def _clean(kind: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the types that the fields have."""
    clean = {}
    for field in fields(kind):
        if field.name not in settings or field.name == "cloud":
            continue
        value, usual = settings[field.name], "" if field.default is MISSING else field.default
        if usual is None and value in (None, 0, ""):  # a field of numbers cannot be left empty in every browser
            continue
        if isinstance(usual, bool):
            if not isinstance(value, bool):
                raise UserError(f"{field.name} must be true or false, not {value!r}")
        elif isinstance(usual, (int, float)) or field.name == "exit_layer":
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UserError(f"{field.name} must be a number, not {'empty' if value is None else repr(value)}")
            if not isinstance(usual, float):
                if value != value or value % 1:
                    raise UserError(f"{field.name} must be a whole number, not {value}")
                value = int(value)
        elif field.name == "gates":
            if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
                raise UserError(f"{field.name} must be a list of names, not {value!r}")
            value = tuple(value)
        elif not isinstance(value, str):
            raise UserError(f"{field.name} must be a name, not {value!r}")
        elif len(value) > LONGEST_NAME:
            raise UserError(f"{field.name} must be a name of at most {LONGEST_NAME} characters, not {len(value):,}")
        elif field.name == "skip_layers":
            value = _numbers(field.name, value)
        clean[field.name] = value.strip() if isinstance(value, str) else value
    return clean


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers with commas or spaces between them."""
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise UserError(f"{name} must be numbers like 5, 7, not {text!r}")
    return tuple(map(int, words))
