"""Components shared by tabs."""

from __future__ import annotations

from typing import Any

import gradio as gr

# Handlers receive raw values: gradio would raise an error for an incomplete number.
UNPROCESSED: dict[str, Any] = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
# Replace the first input by the id of the displayed run.
SHOWN_RUN_JS = """(...values) => [document.querySelector("[data-run]")?.dataset.run ?? "", ...values.slice(1)]"""


def chart_view(elem_id: str) -> gr.HTML:
    """Create the component of a chart."""
    return gr.HTML(elem_id=elem_id, elem_classes="curves", apply_default_css=False, min_width=300)
