"""Which lanes one press of Run means. Knows recipes and settings; no gradio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from specdemo.recipe import Recipe
from specdemo.ui.labels import LANES, PLAIN, SPEC, title
from specdemo.ui.settings import OFF

EXTRA = tuple(name for name in LANES if name not in (SPEC, PLAIN))  # places for kept lanes


def plan_of(settings: Mapping[str, Any], compare: Any, beside: int) -> tuple[str, ...]:
    """The places that are taken, by settings that need not make sense; `beside` lanes were kept.

    Plain decoding on this machine has its place; what is decoded elsewhere is compared with it.
    """
    extra = EXTRA[:beside]
    if settings["method"] == "ar" and settings.get("mode", OFF) == OFF:
        return PLAIN, *extra
    return (SPEC, *((PLAIN,) if compare or extra else ()), *extra)


def lanes_of(recipe: Recipe, beside: Sequence[Recipe], plan: Sequence[str]) -> list[tuple[str, Recipe]]:
    """The recipe of each place."""
    plain = replace(recipe, method="ar", cloud=None)
    lanes = {SPEC: recipe, PLAIN: plain, **dict(zip(EXTRA, beside, strict=False))}
    return [(name, one) for name, one in lanes.items() if name in plan]


def told_of_lanes(recipes: list[Recipe]) -> str:
    """The kept lanes, in words."""
    return f"Kept lanes, run with every comparison: {'; '.join(map(title, map(asdict, recipes)))}." if recipes else ""
