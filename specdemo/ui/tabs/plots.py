"""Gradio's own plots, as the tabs use them: curves, dots and bars from rows, in colours that both themes have.

Colours are names of tabs.css, `var(--…)`: a plot that is there takes on another theme by itself. A curve of one point
is drawn as a dot, which the style sheet knows by its colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr


def lines(
    title: str, x: str, y: str, colours: dict[str, str], in_legend: Sequence[str], legend: str, name: str
) -> gr.LinePlot:
    """An empty plot of curves; `in_legend` are those that the legend, whose title is `legend`, names."""
    return gr.LinePlot(
        x="x",
        y="y",
        color="part",
        title=title,
        x_title=x,
        y_title=y,
        color_title=legend,
        color_map=colours,
        colors_in_legend=list(in_legend),
        height=300,
        min_width=300,
        elem_id=name,
        elem_classes="curves",
    )


def bars(title: str, colours: dict[str, str], order: list[str], name: str) -> gr.BarPlot:
    """An empty plot of probabilities; bars stand in `order`."""
    return gr.BarPlot(
        x="x",
        y="y",
        color="part",
        title=title,
        x_title="token",
        y_title="probability",
        color_title=" ",
        color_map=colours,
        sort=order,
        x_label_angle=-45,
        y_lim=[0, None],
        height=260,
        elem_id=name,
    )


def shown(plot: gr.LinePlot | gr.BarPlot, rows: Sequence[tuple[Any, Any, str]]) -> dict[str, Any]:
    """The value of a plot, from rows (x, y, part): what gradio makes of a data frame."""
    mark = plot.get_mark()
    return {
        "columns": ["x", "y", "part"],
        "data": [[*(round(at, 4) if isinstance(at, float) else at for at in place), part] for *place, part in rows],
        "datatypes": {"x": "nominal" if mark == "bar" else "quantitative", "y": "quantitative", "part": "nominal"},
        "mark": mark,
    }
