"""Colours, Gradio theme and launch options of the page. Colours meet WCAG contrast in both themes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from specdemo.models.zoo import ASSETS

LIGHT = {
    "ink": "#1c2430", "quiet": "#566173", "line": "#dfe3e9", "paper": "#ffffff", "ground": "#f6f7f9",
    "button": "#e9edf2",
    "accepted": "#d6f2df", "accepted-ink": "#0c4526",
    "rejected": "#fbe0de", "rejected-ink": "#8f1d18",
    "ignored": "#eceff3", "ignored-ink": "#566173",
    "correction": "#dbe8fd", "correction-ink": "#123a8c",
    "bonus": "#e8f1fe", "bonus-ink": "#123a8c",
    "unseen": "#ece3f8", "unseen-ink": "#4c2a80",
    "tip": "#10151c", "tip-ink": "#eef1f5", "tip-label": "#aab4c2", "tip-text": "#cdd5df",
    "curve-1": "#8a95a6", "curve-2": "#67789a", "curve-3": "#41547a", "curve-5": "#2f7a73", "curve-4": "#a38b5d",
    "curve-baseline": "#b9c1cd", "curve-set": "#1c2430", "dot-set": "#1c2431", "dot-run": "#c2410c",
    "bar-accepted": "#2f8f5b", "bar-correction": "#3b6fd4", "bar-rejected": "#c2413a",
    "link-up": "#c47f00", "link-delay": "#9aa6b6", "link-verify": "#3b6fd4", "link-down": "#c2577b",
    "link-wait": "#7a8698",
}  # fmt: skip
DARK = {
    "ink": "#e4e8ee", "quiet": "#9aa6b6", "line": "#2a3340", "paper": "#151b23", "ground": "#0d1117",
    "button": "#1d2530",
    "accepted": "#12402a", "accepted-ink": "#b5efcb",
    "rejected": "#4d1d1f", "rejected-ink": "#ffc4bf",
    "ignored": "#252d38", "ignored-ink": "#a5b0bf",
    "correction": "#1b3a70", "correction-ink": "#cfe1ff",
    "bonus": "#1a2c4d", "bonus-ink": "#cfe1ff",
    "unseen": "#382a55", "unseen-ink": "#e0d0ff",
    "tip": "#2a3340",
    "curve-1": "#6f7b8d", "curve-2": "#8799b3", "curve-3": "#abbedb", "curve-5": "#6fc2b8", "curve-4": "#b79c68",
    "curve-baseline": "#4a5666", "curve-set": "#f1f4f8", "dot-set": "#f1f4f9", "dot-run": "#fb923c",
    "bar-accepted": "#3fa873", "bar-correction": "#6f9cf2", "bar-rejected": "#e0695f",
}  # fmt: skip

# Blue and orange are distinguishable with every type of colour blindness.
SAFE_LIGHT = {
    "accepted": "#cfe6f7", "accepted-ink": "#0b3c5d",
    "rejected": "#fbd9b5", "rejected-ink": "#7a3300",
    "correction": "#fdf0a8", "correction-ink": "#4d3f00",
    "bonus": "#fdf7d3", "bonus-ink": "#4d3f00",
}  # fmt: skip
SAFE_DARK = {
    "accepted": "#0d3a5c", "accepted-ink": "#bfe1fb",
    "rejected": "#5c2f08", "rejected-ink": "#ffd3a6",
    "correction": "#4a3f06", "correction-ink": "#ffef9c",
    "bonus": "#35300f", "bonus-ink": "#fff0ad",
}  # fmt: skip

CATEGORIES = (
    "#7a8698", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6d31", "#6a51a3",
)  # fmt: skip  # grey, the palette of Okabe and Ito, and two more


def palette() -> str:
    """Return the colours as variables, for pages that follow the colour scheme of the system."""
    light, dark = _variables(LIGHT), _variables(DARK)
    return (
        f":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )


def stylesheet() -> str:
    blocks = ((":root", LIGHT), (".dark", DARK), (".cockpit.safe", SAFE_LIGHT), (".dark .cockpit.safe", SAFE_DARK))
    return "".join(f"{selector} {{ {_variables(colours)} }}\n" for selector, colours in blocks)


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


_FOLDER = Path(__file__).parent
# Gradio keeps 440 kB per browser session, for up to 10,000 sessions (4.4 GB). 64 match run store and event queue.
# Without `gr.State`, Gradio recreates evicted sessions from the defaults.
SESSION_CAPACITY = 64


# Variables of gradio's theme: a name in the palette, or a light and a dark colour.
_VARIABLES: dict[str, str | tuple[str, str]] = {
    "body_background_fill": "ground",
    "body_text_color": "ink",
    "body_text_color_subdued": "quiet",
    "background_fill_primary": "paper",
    "background_fill_secondary": "ground",
    "block_background_fill": "ground",
    "block_border_color": "line",
    "border_color_primary": "line",
    "link_text_color": "ink",
    "link_text_color_hover": "ink",
    "link_text_color_active": "ink",
    "link_text_color_visited": "ink",
    "block_label_text_color": ("#3c4757", "#b9c3d0"),
    "block_title_text_color": ("#3c4757", "#b9c3d0"),
    "input_background_fill": ("#ffffff", "#0d1117"),
    "input_border_color": ("#c9d0da", "#3a4553"),
    "slider_color": ("#3c4757", "#b9c3d0"),
    "button_primary_background_fill": "ink",
    "button_primary_background_fill_hover": ("#323d4d", "#ffffff"),
    "button_primary_text_color": ("#ffffff", "#10151c"),
    "button_primary_border_color": "ink",
    "button_secondary_background_fill": ("#e9edf2", "#1d2530"),
    "button_secondary_background_fill_hover": ("#dde3ea", "#2a3340"),
    "button_secondary_text_color": "ink",
    "button_secondary_border_color": ("#c9d0da", "#3a4553"),
    "checkbox_background_color_selected": ("#1c2430", "#3a4553"),
    "checkbox_border_color": ("#7a8698", "#7a8698"),
    "checkbox_border_color_selected": ("#1c2430", "#9aa6b6"),
}


_TEXT_SIZES = gr.themes.Size("12px", "12px", "14px", "14px", "17px", "22px", "22px", name="specdemo")


def theme() -> gr.themes.Base:
    """Return a neutral theme. Only token outcomes are coloured, and the page has its own fonts."""
    colours: dict[str, Any] = {}
    for name, colour in _VARIABLES.items():
        pair = (LIGHT[colour], DARK[colour]) if isinstance(colour, str) else colour
        colours |= zip((name, f"{name}_dark"), pair, strict=True)
    return gr.themes.Base(
        primary_hue="slate",
        secondary_hue="slate",
        neutral_hue="slate",
        radius_size="md",
        text_size=_TEXT_SIZES,
        font=["Inter", "ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["JetBrains Mono", "ui-monospace", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"],
    ).set(
        **colours,
        block_title_text_weight="600",
        block_border_width="0px",
        block_shadow="none",
        button_border_width="0px",
        input_border_width="1px",
        input_shadow="none",
    )


def launch_options(routes: list[Any], middleware: list[Any]) -> dict[str, Any]:
    """Return the arguments of `Blocks.launch`: theme, styles, routes, no telemetry."""
    return {
        "app_kwargs": {"routes": routes, "middleware": middleware},
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
