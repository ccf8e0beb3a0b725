"""Status, tiles, lanes, replay and step inspector, drawn in the browser from JSON frames."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path

import gradio as gr

_FOLDER = Path(__file__).parent
# One scope, in order of dependency.
_SCRIPTS = ("lanes", "socket", "tiles", "tooltip", "replay", "charts", "inspector", "page_actions")


def cockpit(server_functions: list[Callable]) -> gr.HTML:
    """Create the component; the browser calls `server_functions` by name with one argument."""

    def copy(function: Callable) -> Callable:  # gradio sets attributes, which bound methods do not support
        return wraps(function)(lambda argument: function(argument))

    return gr.HTML(
        html_template=(_FOLDER / "cockpit.html").read_text(encoding="utf-8"),
        js_on_load="\n".join(map(script, _SCRIPTS)),
        apply_default_css=False,
        server_functions=[copy(function) for function in server_functions],
        elem_id="cockpit",
    )


def script(name: str, constants: dict[str, str] | None = None) -> str:
    """Read `name`.js and replace each placeholder in `constants` by its JavaScript value."""
    text = (_FOLDER / f"{name}.js").read_text(encoding="utf-8")
    for placeholder, value in (constants or {}).items():
        text = text.replace(placeholder, value)
    return text
