"""Components shared by tabs."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr

# Handlers receive raw values: gradio would raise an error for an incomplete number.
UNPROCESSED: dict[str, Any] = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
# Replace the first input by the id of the displayed run.
SHOWN_RUN_JS = """(...values) => [document.querySelector("[data-run]")?.dataset.run ?? "", ...values.slice(1)]"""


def chart_view(elem_id: str) -> gr.HTML:
    """Create the component of a chart."""
    return gr.HTML(elem_id=elem_id, elem_classes="curves", apply_default_css=False, min_width=300)


def progress_bar(over: float, total: int, words: str, attributes: str = "") -> str:
    """Return a progress bar with a line below."""
    progress = f'<progress class="measured" value="{over}" max="{total}" aria-label="how much is measured"></progress>'
    return f"{progress}<p{attributes}>{html.escape(words)}</p>"
