"""What raw settings of a browser or a client mean: a recipe, or a sentence why they mean none. Knows no gradio.

Settings are named as the fields of `Recipe` and of its `Cloud` are; mode `off` is a recipe without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from specdemo.core.errors import Refused
from specdemo.recipe import Recipe
from specdemo.remote.choices import MODES, Cloud

LONGEST_NAME = 300  # characters; a local directory may take some
OFF = "off"
WHERE = {OFF: "the target is here, too"} | MODES
OF_CLOUD = tuple(field.name for field in fields(Cloud))


def recipe_of(settings: Mapping[str, Any], device: str) -> Recipe:
    """The recipe that raw settings mean; `Refused` if they cannot mean one."""
    clean = _clean(Recipe, settings)
    if clean.get("target"):
        clean.pop("pair", None)  # one's own models in place of a ready pair
    if settings.get("mode", OFF) != OFF:
        clean["cloud"] = cloud_of(settings)
    return Recipe(device=device, **clean)


def cloud_of(settings: Mapping[str, Any]) -> Cloud:
    """The link alone, whether it is to be used or not."""
    clean = _clean(Cloud, settings)
    if clean.get("mode") == OFF:
        del clean["mode"]
    return Cloud(**{"remote": "", **clean})


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
                raise Refused(f"{field.name} must be true or false, not {value!r}")
        elif isinstance(usual, (int, float)) or field.name == "exit_layer":
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise Refused(f"{field.name} must be a number, not {'empty' if value is None else repr(value)}")
            if not isinstance(usual, float):
                if value != value or value % 1:
                    raise Refused(f"{field.name} must be a whole number, not {value}")
                value = int(value)
        elif field.name == "gates":
            if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
                raise Refused(f"{field.name} must be a list of names, not {value!r}")
            value = tuple(value)
        elif not isinstance(value, str):
            raise Refused(f"{field.name} must be a name, not {value!r}")
        elif len(value) > LONGEST_NAME:
            raise Refused(f"{field.name} must be a name of at most {LONGEST_NAME} characters, not {len(value):,}")
        elif field.name == "skip_layers":
            value = _numbers(field.name, value)
        clean[field.name] = value.strip() if isinstance(value, str) else value
    return clean


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers with commas or spaces between them."""
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise Refused(f"{name} must be numbers like 5, 7, not {text!r}")
    return tuple(map(int, words))
