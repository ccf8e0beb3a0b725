"""Settings that come back: from a link, from the visit before, or the usual ones. Knows no gradio.

Settings are a dict by the names of the sidebar's controls, with `prompt` and `compare`. What comes from outside is
taken field by field, and only where a recipe can be made of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdemo.core.errors import Refused
from specdemo.recipe import Recipe
from specdemo.ui.asked import OF_CLOUD, cloud_of, recipe_of

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
                    raise Refused(f"the prompt must be a text of at most {LONGEST_PROMPT:,} characters")
            elif name == "compare":
                if not isinstance(value, bool):
                    raise Refused(f"compare must be true or false, not {value!r}")
            else:
                if name in OF_CLOUD:
                    cloud_of({**recipe_settings(settings), name: value})
                recipe_of({**recipe_settings(settings), name: value}, device)
        except Refused as error:
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
