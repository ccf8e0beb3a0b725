"""The cockpit: lanes, tiles, the race, the inspector. Drawn in the browser; here it is only put together."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path

import gradio as gr

HERE = Path(__file__).parent
SCRIPTS = (
    "lanes.js",
    "socket.js",
    "figures.js",
    "tip.js",
    "replay.js",
    "charts.js",
    "inspector.js",
    "whole.js",
)  # one scope, in this order


def cockpit(server_functions: list[Callable]) -> gr.HTML:
    """Lanes, tiles and status, drawn in the browser from JSON strings."""

    def free(method: Callable) -> Callable:  # gradio writes on the functions it is given
        return wraps(method)(lambda asked: method(asked))

    return gr.HTML(
        html_template=(HERE / "cockpit.html").read_text(encoding="utf-8"),
        js_on_load="\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
        apply_default_css=False,
        server_functions=[free(method) for method in server_functions],
        elem_id="cockpit",
    )


def script(name: str, known: dict[str, str]) -> str:
    """One of the page's own functions, with the values that it is to know."""
    text = (HERE / f"{name}.js").read_text(encoding="utf-8")
    for placeholder, value in known.items():
        text = text.replace(placeholder, value)
    return text
