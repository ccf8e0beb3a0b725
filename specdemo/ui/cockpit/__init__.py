"""Cockpit of the page: status, tiles, lanes, replay and step inspector, drawn in the browser from JSON frames."""

from __future__ import annotations

import gradio as gr

from specdemo.ui import page_files
from specdemo.ui.run_store import recordings


def cockpit(max_trace: int) -> gr.HTML:
    """Create the component."""
    return gr.HTML(
        html_template=page_files.markup(),
        js_on_load=page_files.mount_module("page"),
        apply_default_css=False,
        elem_id="cockpit",
        max_trace=max_trace,
        recordings=recordings(),
    )
