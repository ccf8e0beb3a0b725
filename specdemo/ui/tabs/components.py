"""Components shared by tabs: plots of rows (x, y, series), and the panel of a measurement."""

from __future__ import annotations

import asyncio
import html
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui.api import address_of
from specdemo.ui.service import Service
from specdemo.ui.streams import drain, reason
from specdemo.ui.sweep import Sweep, SweepResult
from specdemo.worker import WorkerBusy


def line_plot(
    title: str, x: str, y: str, colours: dict[str, str], legend: Sequence[str], elem_id: str, legend_title: str = " "
) -> gr.LinePlot:
    about = {"color_title": legend_title, "colors_in_legend": list(legend), "elem_classes": "curves"}
    return _plot(gr.LinePlot, title, x, y, colours, elem_id, height=300, min_width=300, **about)


def probability_plot(title: str, colours: dict[str, str], order: list[str], elem_id: str) -> gr.BarPlot:
    about = {"color_title": " ", "sort": order, "x_label_angle": -45, "y_lim": [0, None]}
    return _plot(gr.BarPlot, title, "token", "probability", colours, elem_id, height=260, **about)


def _plot(kind: Any, title: str, x: str, y: str, colours: dict[str, str], elem_id: str, **about: Any) -> Any:
    titles = {"title": title, "x_title": x, "y_title": y}
    return kind(x="x", y="y", color="part", color_map=colours, elem_id=elem_id, **titles, **about)


def plot_value(plot: gr.LinePlot | gr.BarPlot, rows: Sequence[tuple[Any, Any, str]]) -> dict[str, Any]:
    """Rows in gradio's serialized form of a data frame."""
    mark = plot.get_mark()
    return {
        "columns": ["x", "y", "part"],
        "data": [[*(round(v, 4) if isinstance(v, float) else v for v in point), part] for *point, part in rows],
        "datatypes": {"x": "nominal" if mark == "bar" else "quantitative", "y": "quantitative", "part": "nominal"},
        "mark": mark,
    }


Rows = TypeVar("Rows")

UNPROCESSED: dict[str, Any] = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
_PROGRESS_CSS = """progress { width: 100%; height: 8px; border-radius: 4px; overflow: hidden; background: var(--line) }
progress::-webkit-progress-bar { background: var(--line) }
progress::-webkit-progress-value { background: var(--ink) }
progress::-moz-progress-bar { background: var(--ink) }
p { margin: 4px 0 }"""


class MeasurementPanel:
    """Buttons, status line and hidden results column; element ids start with `name`."""

    def __init__(self, service: Service, name: str):
        self._service = service
        with gr.Row():
            self._run = gr.Button("Measure", variant="primary", elem_id=f"{name}-run", scale=0)
            self._stop = gr.Button("Stop", interactive=False, elem_id=f"{name}-stop", scale=0)
        self._status = gr.HTML(elem_id=f"{name}-status", css_template=_PROGRESS_CSS)
        self.results = gr.Column(visible=False)

    def connect(
        self,
        inputs: Sequence[gr.components.Component],
        outputs: Sequence[gr.components.Component],
        make_sweep: Callable[[str, tuple[Any, ...]], Sweep],
        compute_rows: Callable[[SweepResult], Rows],
        show_rows: Callable[[SweepResult, Rows], dict[Any, Any]],
    ) -> None:
        """Wire the buttons. `make_sweep(session, values)` validates raw inputs.

        `compute_rows` runs in a thread after the last measurement, because bootstrapping intervals would disturb the
        timings; `show_rows` returns the values of `outputs`.
        """

        async def measure(request: gr.Request, *values: Any) -> AsyncIterator[dict[Any, Any]]:
            session = request.session_hash or ""
            hidden = {self.results: gr.Column(visible=False)}
            try:
                result = SweepResult(make_sweep(session, values))
                recipes, prompts = result.sweep.recipes, result.sweep.prompts
                stream = self._service.bench(recipes, prompts, session, address_of(request))
            except (UserError, WorkerBusy) as error:
                yield {self._status: f"<p role='status'>{html.escape(reason(error))}</p>"} | hidden
                return
            yield self._buttons(running=True) | hidden
            began, status = 0.0, ""
            async with aclosing(drain(stream)) as batches:
                async for batch in batches:
                    for item in batch:
                        result.absorb(item)
                    began = began or (time.monotonic() if result.timing else 0.0)
                    progress = result.progress(time.monotonic() - began, self._service.worker.ahead(stream))
                    if progress != status:
                        yield {self._status: progress}
                        status = progress
            yield {self._status: result.ending(reason(stream.error) if stream.error else "")}
            shown = {}
            if result.records:
                rows = await asyncio.to_thread(compute_rows, result)
                shown = show_rows(result, rows) | {self.results: gr.Column(visible=True)}
            yield self._buttons(running=False) | shown

        def stop(request: gr.Request) -> None:
            self._service.stop_bench(request.session_hash or "")

        updated = [self._run, self._stop, self._status, self.results, *outputs]
        self._run.click(measure, list(inputs), updated, concurrency_limit=None, trigger_mode="once", **UNPROCESSED)
        self._stop.click(stop, None, None, queue=False, **UNPROCESSED)

    def _buttons(self, running: bool) -> dict[Any, Any]:
        return {self._run: gr.Button(interactive=not running), self._stop: gr.Button(interactive=running)}
