"""Components shared by tabs, and views of the displayed run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from specdemo.ui.frames import Run
from specdemo.ui.run_store import RunStore

# Handlers receive raw values: gradio would raise an error for an incomplete number.
UNPROCESSED: dict[str, Any] = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
_LARGEST = sys.float_info.max
# Replace the first input by the displayed run and the selected tab.
_SHOWN_JS = """(...values) => {
    const run = document.querySelector("[data-run]")?.dataset.run ?? "";
    const tab = document.querySelector("#tabs [aria-selected=true]")?.textContent.trim();
    return [{ run, tab }, ...values.slice(1)];
}"""


def is_number(value: Any, low: float = -_LARGEST, high: float = _LARGEST) -> bool:
    """Return True for a finite number of the browser within bounds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def chart_view(elem_id: str, *names: str) -> gr.HTML:
    """Create the component of a chart, or of several with their element ids."""
    value = "".join(f'<div id="{name}"></div>' for name in names)
    return gr.HTML(value, elem_id=elem_id, elem_classes="curves", apply_default_css=False, min_width=300)


class RunViews:
    """Views of the displayed run, drawn when their tab is selected and when it shows while another run is displayed."""

    def __init__(self, runs: RunStore, tab: gr.Tab, cockpit: gr.HTML) -> None:
        self._runs = runs
        self._tab = tab
        self._cockpit = cockpit
        self._shown = gr.JSON(visible=False)

    def connect(
        self,
        triggers: Sequence[Any],
        view: Callable[..., Any],
        inputs: Sequence[gr.components.Component],
        outputs: Sequence[gr.components.Component],
    ) -> Any:
        """Show the values of `view(run, *values)` after `triggers`; `run` is None before the first run."""

        def draw(request: gr.Request, shown: Any, *values: Any) -> Any:
            return view(self._run(request, shown), *values)

        return self._connect(triggers, draw, inputs, outputs)

    def connect_run(
        self,
        triggers: Sequence[Any],
        view: Callable[..., Any],
        inputs: Sequence[gr.components.Component],
        outputs: Sequence[gr.components.Component],
    ) -> None:
        """Show the values of `view` after `triggers`, for the selected tab, and for another displayed run."""

        def draw_visible(request: gr.Request, shown: Any, *values: Any) -> Any:
            return view(self._run(request, shown), *values) if shown["tab"] == self._tab.label else gr.skip()

        self.connect([self._tab.select, *triggers], view, inputs, outputs)
        self._connect([self._cockpit.change], draw_visible, inputs, outputs)

    def _run(self, request: gr.Request, shown: Any) -> Run | None:
        run: Run | None = self._runs.get(shown["run"]) or self._runs.latest(request.session_hash or "")
        return run

    def _connect(self, triggers: Sequence[Any], draw: Callable[..., Any], inputs: Any, outputs: Any) -> Any:
        latest: dict[str, Any] = {"js": _SHOWN_JS, "trigger_mode": "always_last", "queue": False, **UNPROCESSED}
        return gr.on(list(triggers), draw, [self._shown, *inputs], list(outputs), **latest)
