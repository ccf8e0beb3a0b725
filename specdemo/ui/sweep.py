"""A small bench from the page's settings: which recipes on which prompts, and whether that is too much to ask.

Knows nothing of gradio and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from specdemo.bench import Prompt, grid, load_prompts
from specdemo.core.errors import Refused
from specdemo.recipe import METHODS, Recipe
from specdemo.ui.frames import Run

DRAFTING = [name for name in METHODS if name not in ("ar", "beam")]  # what may be faster than plain decoding
MOST_RUNS, MOST_TOKENS = 240, 24_000
ASSUMED = 100.0  # tokens per second, until the visitor has run something


@dataclass(frozen=True)
class Sweep:
    """Recipes x prompts; the first recipe is plain decoding."""

    recipes: tuple[Recipe, ...]
    prompts: tuple[Prompt, ...]

    @property
    def runs(self) -> int:
        """How many runs are timed."""
        return len(self.recipes) * len(self.prompts)

    @property
    def tokens(self) -> int:
        """The most that they can write."""
        return self.runs * self.recipes[0].max_tokens

    def told(self, latest: Run | None) -> str:
        """Its size in words, with a guess at its time from the slower lane of the visitor's latest run."""
        speeds = [lane.metrics.as_dict()["tokens_per_second"] for lane in latest.lanes.values()] if latest else []
        known = min(filter(None, speeds), default=None)
        basis = (
            f"the {known:.0f} tokens per second of your latest run"
            if known
            else f"an assumed {ASSUMED:.0f} tokens per second"
        )
        return (
            f"{len(self.recipes)} recipes × {len(self.prompts)} prompts = {self.runs} runs of at most "
            f"{self.recipes[0].max_tokens} tokens, about {duration(self.tokens / (known or ASSUMED))} at {basis}"
        )


def sweep(
    make: Callable[[dict[str, Any]], Recipe],
    latest: Run | None,
    *,
    methods: Any,
    gammas: Any,
    policies: Any,
    temperatures: Any,
    kinds: Any,
    each: Any,
) -> Sweep:
    """What raw values from a browser mean; `Refused` if they mean nothing, or more than the page will measure.

    `make` turns the settings that vary (those of `bench.grid`) into a recipe. `kinds` are classes of prompts, of which
    `each` gives so many. Prompts take turns by class, so that a part of them has something of every class.
    """
    lists = {
        "method": methods,
        "draft length": gammas,
        "draft-length policy": policies,
        "temperature": temperatures,
        "class of prompts": kinds,
    }
    for name, chosen in lists.items():
        if not isinstance(chosen, list) or not chosen:
            raise Refused(f"choose at least one {name}")
    if isinstance(each, bool) or not isinstance(each, int) or each < 1:
        raise Refused(f"prompts per class must be a whole number from 1 on, not {each!r}")
    varied = list(islice(grid(methods, gammas, policies, temperatures), MOST_RUNS + 1))
    if len(varied) > MOST_RUNS:
        raise Refused(f"that is more than {MOST_RUNS} recipes: choose fewer draft lengths, policies or temperatures")
    by_kind = [load_prompts(kinds=[str(kind)])[:each] for kind in kinds]
    prompts = [some[i] for i in range(max(map(len, by_kind))) for some in by_kind if i < len(some)]
    found = Sweep(tuple(map(make, varied)), tuple(prompts))
    if found.runs > MOST_RUNS or found.tokens > MOST_TOKENS:
        raise Refused(
            f"{found.told(latest)}: too much for the page, which measures up to {MOST_RUNS} runs and {MOST_TOKENS:,} "
            "tokens at a time. Choose less of something, or use the terminal's bench"
        )
    return found


def duration(seconds: float) -> str:
    """Roughly how long that is."""
    return f"{max(seconds, 1):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
