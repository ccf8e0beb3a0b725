"""Cockpit of the page: status, tiles, lanes, replay and step inspector, drawn in the browser from JSON frames."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from specdemo.ui.api import address_of

_FOLDER = Path(__file__).parent
# These files share one scope, in order of dependency.
_SCRIPTS = ("lanes", "pace", "socket", "tiles", "tooltip", "replay", "charts", "inspector", "page_actions")


def cockpit(server_functions: list[Callable], max_trace: int) -> gr.HTML:
    """Create the component; the browser calls `server_functions` by name with one argument."""

    def copy(function: Callable) -> Callable:
        with_address = "address" in inspect.signature(function).parameters

        def call(argument: Any, request: gr.Request) -> Any:
            return function(argument, address_of(request)) if with_address else function(argument)

        call.__name__ = function.__name__
        return call

    return gr.HTML(
        html_template=(_FOLDER / "cockpit.html").read_text(encoding="utf-8"),
        js_on_load="\n".join(_text(name) for name in _SCRIPTS),
        apply_default_css=False,
        server_functions=[copy(function) for function in server_functions],
        elem_id="cockpit",
        max_trace=max_trace,
    )


def script(name: str, data: dict[str, Any]) -> str:
    """Return a JavaScript function that calls the function in `name`.js with `data`, then with its own arguments."""
    return f"(...values) => ({_text(name)})({json.dumps(data)}, ...values)"


def _text(name: str) -> str:
    return (_FOLDER / f"{name}.js").read_text(encoding="utf-8")
