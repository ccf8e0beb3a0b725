"""Gradio theme and launch options. Colours meet WCAG contrast in the light and the dark theme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from specdemo.models.zoo import ASSETS
from specdemo.ui.palette import stylesheet

_FOLDER = Path(__file__).parent
# Gradio's state of a browser session takes 440 kB and is never freed below its capacity of 10,000 sessions (4.4 GB).
# 64 sessions (28 MB) match the capacity of the run store and of the event queue. The least recently used session is
# evicted; the page has no `gr.State`, so Gradio recreates its state from the defaults at the next event.
SESSION_CAPACITY = 64


def theme() -> gr.themes.Base:
    """Return a neutral theme, in which only token outcomes are coloured; system fonts avoid downloads."""
    return gr.themes.Base(
        primary_hue="slate",
        secondary_hue="slate",
        neutral_hue="slate",
        radius_size="md",
        font=["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"],
    ).set(
        body_background_fill="#f6f7f9",
        body_background_fill_dark="#0d1117",
        body_text_color="#1c2430",
        body_text_color_dark="#e4e8ee",
        body_text_color_subdued="#566173",
        body_text_color_subdued_dark="#9aa6b6",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="#151b23",
        background_fill_secondary="#f6f7f9",
        background_fill_secondary_dark="#0d1117",
        block_background_fill="#ffffff",
        block_background_fill_dark="#151b23",
        block_border_color="#dfe3e9",
        block_border_color_dark="#2a3340",
        border_color_primary="#dfe3e9",
        border_color_primary_dark="#2a3340",
        block_label_text_color="#3c4757",
        block_label_text_color_dark="#b9c3d0",
        block_title_text_color="#3c4757",
        block_title_text_color_dark="#b9c3d0",
        block_title_text_weight="600",
        input_background_fill="#ffffff",
        input_background_fill_dark="#0d1117",
        input_border_color="#c9d0da",
        input_border_color_dark="#3a4553",
        slider_color="#3c4757",
        slider_color_dark="#b9c3d0",
        button_primary_background_fill="#1c2430",
        button_primary_background_fill_hover="#323d4d",
        button_primary_text_color="#ffffff",
        button_primary_background_fill_dark="#e4e8ee",
        button_primary_background_fill_hover_dark="#ffffff",
        button_primary_text_color_dark="#10151c",
        button_secondary_background_fill="#ffffff",
        button_secondary_background_fill_hover="#eef1f5",
        button_secondary_text_color="#1c2430",
        button_secondary_background_fill_dark="#1d2530",
        button_secondary_background_fill_hover_dark="#2a3340",
        button_secondary_text_color_dark="#e4e8ee",
        input_border_width="1px",
        input_shadow="none",
        button_border_width="1px",
        button_primary_border_color="#1c2430",
        button_primary_border_color_dark="#e4e8ee",
        checkbox_background_color_selected="#1c2430",
        checkbox_background_color_selected_dark="#3a4553",
        checkbox_border_color="#7a8698",
        checkbox_border_color_dark="#7a8698",
        checkbox_border_color_selected="#1c2430",
        checkbox_border_color_selected_dark="#9aa6b6",
        button_secondary_border_color="#c9d0da",
        button_secondary_border_color_dark="#3a4553",
    )


def launch_options(page: gr.Blocks) -> dict[str, Any]:
    """Return the keyword arguments of `page.launch`: theme, styles, routes, no telemetry."""
    return {
        "app_kwargs": {"routes": page.routes},
        "favicon_path": ASSETS / "icon.png",
        "pwa": True,
        "theme": theme(),
        "css": stylesheet() + "".join(sheet.read_text(encoding="utf-8") for sheet in sorted(_FOLDER.rglob("*.css"))),
        "footer_links": ["api", "settings"],
        "run_history": False,
        "enable_monitoring": False,
        "max_file_size": "1mb",
        "state_session_capacity": SESSION_CAPACITY,
        "quiet": True,
    }
