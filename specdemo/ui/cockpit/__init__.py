"""Cockpit of the page: status, tiles, lanes, replay and step inspector, drawn in the browser from JSON frames."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gradio as gr

from specdemo.ui import page_files
from specdemo.ui.streams import reason
from specdemo.ui.visitor_sessions import address_of


def cockpit(server_functions: list[Callable[..., Any]], max_trace: int) -> gr.HTML:
    """Create the component; the browser calls `server_functions` by name with one argument."""

    def copy(function: Callable[..., Any]) -> Callable[..., Any]:
        with_address = "address" in inspect.signature(function).parameters

        def call(argument: Any, request: gr.Request) -> Any:
            try:
                return function(argument, address_of(request)) if with_address else function(argument)
            except (TypeError, ValueError, RecursionError) as error:  # values that the page does not send
                reason(error)
                return None

        call.__name__ = function.__name__
        return call

    return gr.HTML(
        html_template=page_files.markup(),
        js_on_load=page_files.mount_module("page"),
        apply_default_css=False,
        server_functions=[copy(function) for function in server_functions],
        elem_id="cockpit",
        max_trace=max_trace,
    )
