"""Gradio plots of rows (x, y, series). Colours are CSS variables; tabs.css draws curves of one point as dots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr


def line_plot(
    title: str,
    x: str,
    y: str,
    colours: dict[str, str],
    legend_series: Sequence[str],
    elem_id: str,
    legend_title: str = " ",
) -> gr.LinePlot:
    return gr.LinePlot(
        x="x",
        y="y",
        color="part",
        title=title,
        x_title=x,
        y_title=y,
        color_title=legend_title,
        color_map=colours,
        colors_in_legend=list(legend_series),
        height=300,
        min_width=300,
        elem_id=elem_id,
        elem_classes="curves",
    )


def probability_plot(title: str, colours: dict[str, str], order: list[str], elem_id: str) -> gr.BarPlot:
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
        elem_id=elem_id,
    )


def plot_value(plot: gr.LinePlot | gr.BarPlot, rows: Sequence[tuple[Any, Any, str]]) -> dict[str, Any]:
    """Rows in gradio's serialized form of a data frame."""
    mark = plot.get_mark()
    return {
        "columns": ["x", "y", "part"],
        "data": [[*(round(v, 4) if isinstance(v, float) else v for v in point), part] for *point, part in rows],
        "datatypes": {"x": "nominal" if mark == "bar" else "quantitative", "y": "quantitative", "part": "nominal"},
        "mark": mark,
    }
