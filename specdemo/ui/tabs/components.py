"""Components shared by tabs: plots, tables, and a panel that starts and shows measurements."""

from __future__ import annotations

import html
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import gradio as gr

from specdemo.bench.measure import BenchProgress
from specdemo.bench.table import BenchRow, as_json, disturbed, report, slower, table
from specdemo.core.errors import UserError
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe
from specdemo.ui.api import address_of
from specdemo.ui.frames import Run
from specdemo.ui.service import REMEMBERED, Service
from specdemo.ui.streams import drain, reason
from specdemo.worker import Stream, WorkerBusy

Result = TypeVar("Result", bound="SweepResult")
Rows = TypeVar("Rows")

# Handlers receive raw values: gradio would raise an error for an incomplete number.
UNPROCESSED: dict[str, Any] = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
PROGRESS_CSS = """progress { width: 100%; height: 8px; border-radius: 4px; overflow: hidden; background: var(--line) }
progress::-webkit-progress-bar { background: var(--line) }
progress::-webkit-progress-value { background: var(--ink) }
progress::-moz-progress-bar { background: var(--ink) }
p { margin: 4px 0 }"""
# Replace the first input by the id of the displayed run.
SHOWN_RUN_JS = """(...values) => [document.querySelector("[data-run]")?.dataset.run ?? "", ...values.slice(1)]"""
RESULTS_S = 1.0  # interval of requests for results
ASSUMED = 100.0  # tokens per second, assumed before the first run


def chart_view(elem_id: str) -> gr.HTML:
    """Create the component of a `LineChart`."""
    return gr.HTML(elem_id=elem_id, elem_classes="curves", apply_default_css=False, min_width=300)


def save_svg_button(plot_id: str) -> gr.HTML:
    """Create the button that saves a plot of Gradio, which exports PNG only."""
    button = f'<button type="button" class="save-chart" data-save="svg" data-chart="{plot_id}">Save as SVG</button>'
    return gr.HTML(button, apply_default_css=False)


def probability_plot(title: str, colours: dict[str, str], order: list[str], elem_id: str) -> gr.BarPlot:
    return gr.BarPlot(
        x="x",
        y="y",
        color="part",
        color_map=colours,
        color_title=" ",
        title=title,
        x_title="token",
        y_title="probability",
        sort=order,
        x_label_angle=-45,
        y_lim=[0, None],
        height=260,
        buttons=["export"],
        elem_id=elem_id,
    )


def bar_values(rows: Sequence[tuple[str, float, str]]) -> dict[str, Any]:
    """Return rows in gradio's serialized form of a data frame."""
    return {
        "columns": ["x", "y", "part"],
        "data": [[x, round(y, 4), part] for x, y, part in rows],
        "datatypes": {"x": "nominal", "y": "quantitative", "part": "nominal"},
        "mark": "bar",
    }


@dataclass(frozen=True)
class Sweep:
    """Measurement of every recipe on every prompt. The first recipe is AR decoding, the baseline."""

    recipes: tuple[Recipe, ...]
    prompts: tuple[Prompt, ...]

    @property
    def runs(self) -> int:
        return len(self.recipes) * len(self.prompts)

    @property
    def tokens(self) -> int:
        return self.runs * self.recipes[0].max_tokens

    def describe(self, latest: Run | None) -> str:
        """Describe size and estimated time, from the slowest lane of the latest run."""
        speeds = [lane.metrics.tokens_per_second for lane in latest.lanes.values()] if latest else []
        measured = min(filter(None, speeds), default=None)
        basis = (
            f"the {measured:.0f} tokens per second of your latest run"
            if measured
            else f"an assumed {ASSUMED:.0f} tokens per second"
        )
        return (
            f"{len(self.recipes)} recipes × {len(self.prompts)} prompts = {self.runs} runs of at most "
            f"{self.recipes[0].max_tokens} tokens, about {duration(self.tokens / (measured or ASSUMED))} at {basis}"
        )


def duration(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


@dataclass
class SweepResult:
    """Records of a sweep so far, with its current progress."""

    sweep: Sweep
    records: list[dict[str, Any]] = field(default_factory=list)
    turn: BenchProgress | None = None

    def start(self, service: Service, session: str, address: str) -> Stream[Any]:
        return service.bench(self.sweep.recipes, self.sweep.prompts, session, address)

    @property
    def is_empty(self) -> bool:
        return not self.records

    def absorb(self, item: BenchProgress | dict[str, Any]) -> None:
        if isinstance(item, BenchProgress):
            self.turn = item
        else:
            self.records.append(item)

    @property
    def timing(self) -> bool:
        return self.turn is not None and self.turn.number > 0

    def progress(self, seconds: float, ahead: int = 0) -> str:
        """Return the progress bar, `seconds` after the first timed run and with `ahead` jobs in the queue."""
        if self.turn is None:
            return progress_bar(0, self.sweep.runs, f"queued: {ahead} ahead" if ahead else "waiting for the device")
        over, words = max(self.turn.number - 1, 0), str(self.turn)
        if over:
            words += f" · about {duration(seconds / over * (self.sweep.runs - over))} to go"
        return progress_bar(over, self.sweep.runs, words)

    def ending(self, error: str = "") -> str:
        done, total = len(self.records), len(self.sweep.prompts)
        if done == total and not error:
            words = f"done: {self.sweep.runs} runs on {done} prompts"
        else:
            part = f"partial, {done} of {total} prompts are measured" if done else "nothing is measured"
            words = f"failed: {error}; {part}" if error else f"stopped: {part}"
        return progress_bar(done, total, words, ' role="status"')  # announced by screen readers

    def rows(self) -> list[BenchRow]:
        return table(self.sweep.recipes, self.records)

    def notes(self, rows: Sequence[BenchRow]) -> str:
        lines = slower(rows) or ["no recipe was slower than AR decoding on any prompt"]
        if count := disturbed(self.records):
            lines.append(f"other runs interrupted {count} of these, so their figures may be inaccurate")
        return "\n".join(f"- {line}" for line in lines)

    def files(self, rows: Sequence[BenchRow]) -> tuple[str, str]:
        return report(self.sweep.recipes, len(self.sweep.prompts), self.records, rows), as_json(rows) + "\n"


def progress_bar(over: float, total: int, words: str, attributes: str = "") -> str:
    """Return a progress bar with a line below."""
    progress = f'<progress value="{over}" max="{total}" aria-label="how much is measured"></progress>'
    return f"{progress}<p{attributes}>{html.escape(words)}</p>"


@dataclass
class _Started:
    result: SweepResult
    stream: Stream[Any]
    shown: str = ""  # last status, repeated once: a late message of the event can replace it


class MeasurementPanel:
    """Buttons, status line and hidden results column of a measurement. Element ids start with `name`.

    Progress is streamed by an event; a timer requests the results, which a lost message of the stream cannot delay.
    """

    def __init__(self, service: Service, name: str):
        self._service = service
        self._started: OrderedDict[str, _Started] = OrderedDict()  # keys are sessions
        with gr.Row():
            self._run = gr.Button("Measure", variant="primary", elem_id=f"{name}-run", scale=0)
            self._stop = gr.Button("Stop", interactive=False, elem_id=f"{name}-stop", scale=0)
        self._status = gr.HTML(elem_id=f"{name}-status", css_template=PROGRESS_CSS)
        self._timer = gr.Timer(RESULTS_S, active=False)
        self.results = gr.Column(visible=False)

    def connect(
        self,
        inputs: Sequence[gr.components.Component],
        outputs: Sequence[gr.components.Component],
        make_result: Callable[[str, tuple[Any, ...]], Result],
        compute_rows: Callable[[Result], Rows],
        show_rows: Callable[[Result, Rows], dict[Any, Any]],
    ) -> None:
        """Wire the buttons. `make_result(session, values)` validates raw inputs.

        `compute_rows` runs in a thread after the last measurement, not to disturb timings; `show_rows` returns the
        values of `outputs`.
        """

        async def measure(request: gr.Request, *values: Any) -> AsyncIterator[dict[Any, Any]]:
            session = request.session_hash or ""
            hidden = {self.results: gr.Column(visible="hidden")}  # a plot may be drawing
            try:
                result = make_result(session, values)
                stream = result.start(self._service, session, address_of(request))
            except (UserError, WorkerBusy) as error:
                yield {self._status: f"<p role='status'>{html.escape(reason(error))}</p>"} | hidden
                return
            self._started[session] = _Started(result, stream)
            while len(self._started) > REMEMBERED:
                self._started.popitem(last=False)
            yield self._controls(running=True) | hidden
            began, status = 0.0, ""
            async with aclosing(drain(stream)) as batches:
                async for batch in batches:
                    for item in batch:
                        result.absorb(item)
                    began = began or (time.monotonic() if result.timing else 0.0)
                    progress = result.progress(time.monotonic() - began, stream.worker.ahead(stream))
                    if progress != status and not stream.done:
                        yield {self._status: progress}
                        status = progress

        def show_results(request: gr.Request) -> dict[Any, Any]:
            return self._results(request.session_hash or "", compute_rows, show_rows)

        def stop(request: gr.Request) -> None:
            self._service.stop_bench(request.session_hash or "")

        updated = [self._run, self._stop, self._status, self._timer, self.results]
        self._run.click(measure, list(inputs), updated, concurrency_limit=None, trigger_mode="once", **UNPROCESSED)
        self._timer.tick(show_results, None, [*updated, *outputs], queue=False, **UNPROCESSED)
        self._stop.click(stop, None, None, queue=False, **UNPROCESSED)

    def _results(
        self, session: str, compute_rows: Callable[[Any], Rows], show_rows: Callable[[Any, Rows], dict[Any, Any]]
    ) -> dict[Any, Any]:
        """Return the outputs of the timer."""
        started = self._started.get(session)
        if started is None:
            return self._controls(running=False)
        if not started.stream.done:
            return {self._timer: gr.skip()}
        if started.shown:
            del self._started[session]
            return self._controls(running=False) | {self._status: started.shown}
        result = replace(started.result, records=[])
        for item in started.stream.items:
            result.absorb(item)
        started.shown = result.ending(reason(error) if (error := started.stream.error) else "")
        shown: dict[Any, Any] = {self._status: started.shown}
        if not result.is_empty:
            shown |= show_rows(result, compute_rows(result)) | {self.results: gr.Column(visible=True)}
        return shown

    def _controls(self, running: bool) -> dict[Any, Any]:
        return {
            self._run: gr.Button(interactive=not running),
            self._stop: gr.Button(interactive=running),
            self._timer: gr.Timer(active=running),
        }
