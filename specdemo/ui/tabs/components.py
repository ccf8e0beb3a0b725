"""Components shared by tabs."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import gradio as gr

# Handlers receive raw values: gradio would raise an error for an incomplete number.
UNPROCESSED: dict[str, Any] = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
PROGRESS_CSS = """progress { width: 100%; height: 8px; border-radius: 4px; overflow: hidden; background: var(--line) }
progress::-webkit-progress-bar { background: var(--line) }
progress::-webkit-progress-value { background: var(--ink) }
progress::-moz-progress-bar { background: var(--ink) }
p { margin: 4px 0 }"""
# Replace the first input by the id of the displayed run.
SHOWN_RUN_JS = """(...values) => [document.querySelector("[data-run]")?.dataset.run ?? "", ...values.slice(1)]"""


def chart_view(elem_id: str) -> gr.HTML:
    """Create the component of a `LineChart`."""
    return gr.HTML(elem_id=elem_id, elem_classes="curves", apply_default_css=False, min_width=300)


def save_svg_button(plot_id: str, visible: bool = True) -> gr.HTML:
    """Create the button that saves a plot of Gradio, which exports PNG only."""
    button = f'<button type="button" class="save-chart" data-save="svg" data-chart="{plot_id}">Save as SVG</button>'
    return gr.HTML(button, visible=visible, apply_default_css=False)


def probability_plot(title: str, colours: dict[str, str], order: list[str], elem_id: str, **options: Any) -> gr.BarPlot:
    return gr.BarPlot(
        x="x",
        y="y",
        color="part",
        color_map=colours,
        color_title=" ",
        title=title,
        sort=order,
        x_label_angle=-45,
        y_lim=[0, None],
        height=260,
        buttons=["export"],
        elem_id=elem_id,
        **{"x_title": "token", "y_title": "probability", **options},
    )


def bar_values(rows: Sequence[tuple[str, float, str]]) -> dict[str, Any]:
    """Return rows in gradio's serialized form of a data frame."""
    return {
        "columns": ["x", "y", "part"],
        "data": [[x, round(y, 4), part] for x, y, part in rows],
        "datatypes": {"x": "nominal", "y": "quantitative", "part": "nominal"},
        "mark": "bar",
    }


def progress_bar(over: float, total: int, words: str, attributes: str = "") -> str:
    """Return a progress bar with a line below."""
    progress = f'<progress value="{over}" max="{total}" aria-label="how much is measured"></progress>'
    return f"{progress}<p{attributes}>{html.escape(words)}</p>"
