"""Charts of the page as figures in JSON, which `cockpit/charts.js` draws."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import gradio as gr


@dataclass(frozen=True)
class Series:
    """Points of a chart. A label is written at the end of a curve, or into the key of bars."""

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
    words: str


def chart(title: str, x: str, y: str, series: Sequence[Series], names: Sequence[str] = ()) -> str:
    """Return a chart with titles of its axes. `names` are those of the x values 0, 1, 2 ..."""
    drawn = [asdict(entry) | {"points": [list(map(_rounded, point)) for point in entry.points]} for entry in series]
    return _element({"title": title, "x": x, "y": y, "names": names, "series": drawn})


def timeline(
    label: str,
    rows: Sequence[str],
    blocks: Sequence[Block],
    kinds: Mapping[str, tuple[str, str]],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Return rows of blocks over time. `kinds`: words and colour by kind; `marks`: texts above a time."""
    key = [{"kind": kind, "label": words, "colour": colour} for kind, (words, colour) in kinds.items()]
    drawn = [asdict(block) | {"start": _rounded(block.start), "duration": _rounded(block.duration)} for block in blocks]
    return _element({"label": label, "rows": rows, "blocks": drawn, "key": key, "marks": marks})


def chart_view(elem_id: str) -> gr.HTML:
    """Create the component of a chart."""
    return gr.HTML(elem_id=elem_id, elem_classes="curves", apply_default_css=False, min_width=300)


def _rounded(value: float) -> float:
    """Keep the digits that a picture shows."""
    return float(f"{value:.5g}")


def _element(figure: Mapping[str, Any]) -> str:
    return f'<chart-view figure="{html.escape(json.dumps(figure))}"></chart-view>'
