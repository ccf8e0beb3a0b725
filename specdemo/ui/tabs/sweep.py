"""Sweeps of recipes over prompts, bounded in size: their selection, and their measurement in a panel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from specdemo.bench.measure import grid
from specdemo.core.errors import UserError
from specdemo.prompts import Prompt, alternate_classes, load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.service import Service
from specdemo.ui.tabs.measurement_panel import Outputs, PanelMeasurement, duration

ASSUMED = 100.0  # tokens per second, assumed before the first run
MOST_RUNS, MOST_TOKENS = 240, 24_000
_LISTS = {  # names of the lists of a selection
    "methods": "method",
    "gammas": "draft length",
    "policies": "draft-length policy",
    "temperatures": "temperature",
    "kinds": "class of prompts",
}


@dataclass(frozen=True)
class Sweep:
    """Measurement of every recipe on every prompt. The first recipe is AR decoding, the baseline."""

    recipes: tuple[Recipe, ...]
    prompts: tuple[Prompt, ...]

    @property
    def runs(self) -> int:
        return len(self.recipes) * len(self.prompts)

    @property
    def tokens(self) -> int:
        return self.runs * self.recipes[0].max_tokens

    def describe(self, latest: Run | None) -> str:
        """Describe size and estimated time, from the slowest lane of the latest run."""
        speeds = [lane.metrics.tokens_per_second for lane in latest.lanes.values()] if latest else []
        measured = min(filter(None, speeds), default=None)
        basis = f"an assumed {ASSUMED:.0f} tokens per second"
        if measured:
            basis = f"the {measured:.0f} tokens per second of your latest run"
        return (
            f"{len(self.recipes)} recipes × {len(self.prompts)} prompts = {self.runs} runs of at most "
            f"{self.recipes[0].max_tokens} tokens, about {duration(self.tokens / (measured or ASSUMED))} at {basis}"
        )

    def within_limits(self, latest: Run | None) -> Sweep:
        """Return the sweep. Raises `UserError` if it exceeds the limits of the page."""
        if self.runs > MOST_RUNS or self.tokens > MOST_TOKENS:
            raise UserError(
                f"{self.describe(latest)}: the page measures at most {MOST_RUNS} runs and {MOST_TOKENS:,} "
                "tokens. Reduce the selection, or use the terminal's bench"
            )
        return self

    def measurement(self, service: Service, show: Callable[[list[dict[str, Any]]], Outputs]) -> PanelMeasurement:
        """`show` returns the outputs of a panel for records of prompts."""
        return PanelMeasurement(
            start=partial(service.measurements.bench, self.recipes, self.prompts),
            show=lambda records: show(records) if records else {},
            count=lambda records: (len(records), len(self.prompts)),
            unit="prompts",
        )


def selected(chosen: Mapping[str, Any], external: Any = None) -> tuple[list[dict[str, Any]], tuple[Prompt, ...]]:
    """Convert values from the browser to settings of `bench.grid` and prompts. Raises `UserError` if invalid.

    `chosen`: lists, and `each`, the prompts per class, which alternate; `external`: servers of other engines,
    separated by spaces.
    """
    for key, name in _LISTS.items():
        if not isinstance(chosen[key], list) or not chosen[key]:
            raise UserError(f"choose at least one {name}")
    each = chosen["each"]
    if isinstance(each, bool) or not isinstance(each, int) or each < 1:
        raise UserError(f"prompts per class must be an integer from 1, not {each!r}")
    methods, gammas, policies, temperatures, kinds = (chosen[key] for key in _LISTS)
    servers = str(external or "").split()
    varied = list(islice(grid(methods, gammas, policies, temperatures, servers), MOST_RUNS + 1))
    if len(varied) > MOST_RUNS:
        raise UserError(f"that is more than {MOST_RUNS} recipes: choose fewer draft lengths, policies or temperatures")
    prompts = (prompt for kind in kinds for prompt in load_prompts([str(kind)]))
    return varied, tuple(alternate_classes(prompts, each))
