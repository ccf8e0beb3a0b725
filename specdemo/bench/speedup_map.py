"""Speed-ups as a map: a row per recipe, a column per class of prompts, or per draft length within a class."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdemo.core.formats import NOTHING

if TYPE_CHECKING:
    from specdemo.bench.table import BenchRow

LEGEND = "±: the 95 % interval includes 1"
_GAMMA = re.compile(r" gamma=(\d+)")


@dataclass(frozen=True)
class SpeedupMap:
    """Rows of a benchmark by recipe and column, both in the order of the benchmark."""

    across: str  # title of the columns
    columns: Sequence[str]
    recipes: Mapping[str, Mapping[str, BenchRow]]


def speedup_map(rows: Sequence[BenchRow]) -> SpeedupMap | None:
    """Return the map of at least two recipes and two columns, None without."""
    compared = [row for row in rows if row.speedup is not None]
    if len({row.kind for row in compared}) > 1:
        across, places = "class", [(row.lane, row.kind, row) for row in compared]
    else:
        lengths = [(row, length[1]) for row in compared if (length := _GAMMA.search(row.lane))]
        across, places = "γ", [(_GAMMA.sub("", row.lane), length, row) for row, length in lengths]
    recipes: dict[str, dict[str, BenchRow]] = {}
    for recipe, column, row in places:
        recipes.setdefault(recipe, {})[column] = row
    columns = list(dict.fromkeys(column for _, column, _ in places))
    return SpeedupMap(across, columns, recipes) if min(len(recipes), len(columns)) > 1 else None


def speedup_text(row: BenchRow | None) -> str:
    """Return a speed-up, marked if it may be none."""
    if row is None or row.speedup is None:
        return NOTHING
    uncertain = row.interval is not None and row.interval[0] <= 1 <= row.interval[1]
    return f"{row.speedup:.2f}×" + (" ±" if uncertain else "")
