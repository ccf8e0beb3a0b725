"""Charts as JSON, drawn by `cockpit/charts.js`."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

from specdemo.ui.theme import CATEGORIES

_LARGEST = 1e12  # traces of unknown origin may contain any times


@dataclass(frozen=True)
class Series:
    """Points of a chart. Labels of bars are in its key."""

    kind: str  # line, dot or bar; bars of the same x are stacked
    colour: str
    points: Sequence[tuple[float, float]]
    label: str = ""


@dataclass(frozen=True)
class Block:
    """Part of a row of a timeline. Times are in milliseconds."""

    row: int
    kind: str
    start: float
    duration: float
    tooltip: str


def by_category(kind: str, groups: Mapping[str, Sequence[tuple[float, float]]]) -> list[Series]:
    colours = cycle(CATEGORIES)
    return [Series(kind, next(colours), points, label) for label, points in groups.items()]


def chart(title: str, x: str, y: str, series: Sequence[Series], names: Sequence[str] = (), elem_id: str = "") -> str:
    """Return a chart; `names` replace the x values 0, 1 ..."""
    drawn = [asdict(entry) | {"points": [list(map(_rounded, point)) for point in entry.points]} for entry in series]
    return _element({"title": title, "x": x, "y": y, "names": names, "series": drawn}, elem_id)


def timeline(
    label: str,
    rows: Sequence[str],
    blocks: Sequence[Block],
    kinds: Mapping[str, tuple[str, str]],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Return rows of blocks. `kinds`: words and colour; `marks`: texts above a time."""
    key = [{"kind": kind, "label": words, "colour": colour} for kind, (words, colour) in kinds.items()]
    drawn = [asdict(block) | {"start": _rounded(block.start), "duration": _rounded(block.duration)} for block in blocks]
    return _element({"label": label, "rows": rows, "blocks": drawn, "key": key, "marks": marks})


def _rounded(value: float) -> float:
    return float(f"{min(max(value, -_LARGEST), _LARGEST):.5g}")


def _element(figure: Mapping[str, Any], elem_id: str = "") -> str:
    name = f'id="{elem_id}" ' if elem_id else ""
    return f'<chart-view {name}figure="{html.escape(json.dumps(figure))}"></chart-view>'
