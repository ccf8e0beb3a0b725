"""Panel of a measurement: its buttons, progress and results. A timer requests them, so no message can be lost."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from specdemo.bench.measure import BenchProgress
from specdemo.core.errors import UserError
from specdemo.preflight import PreflightProgress
from specdemo.ui.limits import address_of
from specdemo.ui.service import Service, error_sentence
from specdemo.ui.settings_form import SEND_JS
from specdemo.ui.tabs.components import UNPROCESSED, Components
from specdemo.worker import Stream, WorkerBusy

Outputs = dict[Any, Any]
INTERVAL_S = 1.0  # between requests
_ANNOUNCED = ' role="status"'  # screen readers announce it


@dataclass(frozen=True)
class PanelMeasurement:
    """Measurement of a panel. The items of its job are progress and results."""

    job: Callable[[], Iterator[Any]]
    show: Callable[[list[Any]], Outputs]  # of results so far; empty if nothing is measured
    count: Callable[[list[Any]], tuple[int, int]] = lambda results: (len(results), 1)  # measured of all
    unit: str = "pairs"


@dataclass
class _Started:
    measurement: PanelMeasurement
    stream: Stream[Any]
    began: float | None = None  # time of the first progress

    def stop(self) -> None:
        self.stream.stop()

    @property
    def results(self) -> list[Any]:
        return [item for item in self.stream.items if not _is_progress(item)]

    def progress(self) -> str:
        stage = next((item for item in reversed(self.stream.items) if _is_progress(item)), None)
        if stage is None:
            ahead = self.stream.worker.ahead(self.stream)
            return _progress_bar(0, f"queued: {ahead} ahead" if ahead else "waiting for the device")
        words, now = str(stage), time.monotonic()
        self.began = self.began or now
        if now > self.began and stage.share > 0:
            words += f" · about {duration((now - self.began) / stage.share * (1 - stage.share))} to go"
        return _progress_bar(stage.share, words)

    def ending(self) -> str:
        done, total = self.measurement.count(self.results)
        outcome = "stopped: " if self.stream.stopping else "done: "
        if self.stream.error:
            outcome = f"failed: {error_sentence(self.stream.error)}; "
        words = f"{outcome}{done} of {total} {self.measurement.unit} are measured"
        return _progress_bar(done / total, words, _ANNOUNCED)


def _is_progress(item: Any) -> bool:
    return isinstance(item, (BenchProgress, PreflightProgress))


def _progress_bar(share: float, words: str, attributes: str = "") -> str:
    progress = f'<progress class="measured" value="{share}" aria-label="how much is measured"></progress>'
    return f"{progress}<p{attributes}>{html.escape(words)}</p>"


def duration(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


@dataclass(eq=False)  # a key of the measurements of a visitor
class MeasurementPanel:
    """Buttons for start and stop of a measurement, its status line, and its results, hidden meanwhile.

    `failures` shows refusals and failures instead of the status line, which is empty at the end.
    """

    service: Service
    buttons: Sequence[gr.Button]
    status: gr.HTML
    stop_button: gr.Button | None = None
    results: gr.Column | None = None
    failures: gr.Markdown | None = None

    def __post_init__(self) -> None:
        self._timer = gr.Timer(INTERVAL_S, active=False)

    @classmethod
    def create(
        cls, service: Service, name: str, title: str = "Measure", action: str = "run"
    ) -> tuple[MeasurementPanel, gr.Column]:
        """Lay out the parts; return the panel and its results. Element ids start with `name`."""
        with gr.Row():
            run = gr.Button(title, variant="primary", elem_id=f"{name}-{action}", scale=0)
            stop = gr.Button("Stop", interactive=False, elem_id=f"{name}-stop", scale=0)
        status = gr.HTML(elem_id=f"{name}-status")
        results = gr.Column(visible=False)
        return cls(service, [run], status, stop, results), results

    def connect(
        self,
        inputs: Components,
        outputs: Components,
        prepare: Callable[[str, tuple[Any, ...]], PanelMeasurement],
        js: str = SEND_JS,
    ) -> Any:
        """Return the event of new outputs.

        `prepare(session, values)` validates the raw values of `inputs`; the measurement returns values of `outputs`.
        """
        self._prepare = prepare
        changed = [*self.buttons, self.stop_button, self.status, self.results, self.failures, self._timer]
        shown = [part for part in changed if part is not None]
        unqueued: dict[str, Any] = {"queue": False, **UNPROCESSED}
        for button in self.buttons:
            button.click(self._measure, list(inputs), shown, js=js, trigger_mode="once", **unqueued)
        if self.stop_button is not None:
            self.stop_button.click(self._stop, None, None, **unqueued)
        return self._timer.tick(self._show, None, list(dict.fromkeys([*shown, *outputs])), **unqueued)

    def _measure(self, request: gr.Request, *values: Any) -> Outputs:
        session = request.session_hash or ""
        measurements = self.service.visitors.get_or_add(session).measurements
        earlier = measurements.get(self)
        try:
            measurement = self._prepare(session, values)
            replaced = earlier.stream if earlier else None
            stream = self.service.measure(measurement.job, address_of(request), session, replaced)
        except (UserError, WorkerBusy) as error:
            return self._show_results(visible=False) | self._failure(error_sentence(error))
        if earlier:
            earlier.stop()
        started = measurements[self] = _Started(measurement, stream)
        return self._controls(running=True) | self._show_results(visible=False) | {self.status: started.progress()}

    def _show(self, request: gr.Request) -> Outputs:
        """Return progress or results; they are computed after the last measurement, not to disturb timings."""
        measurements = self.service.visitors.find(request.session_hash or "").measurements
        started = measurements.get(self)
        if started is None:
            return self._controls(running=False)
        if not started.stream.done:
            return {self.status: started.progress()}
        del measurements[self]  # an error ends the requests
        shown = self._controls(running=False) | {self.status: "" if self.failures else started.ending()}
        if results := started.measurement.show(started.results):
            shown |= results | self._show_results(visible=True)
        elif started.stream.error and self.failures:
            shown |= self._failure(error_sentence(started.stream.error))
        measurements[self] = started  # a lost response is repeated
        return shown

    def _stop(self, request: gr.Request) -> None:
        if started := self.service.visitors.find(request.session_hash or "").measurements.get(self):
            started.stop()

    def _failure(self, text: str) -> Outputs:
        if self.failures:
            return {self.status: "", self.failures: f"**No prediction:** {html.escape(text)}"}
        return {self.status: f"<p{_ANNOUNCED}>{html.escape(text)}</p>"}

    def _show_results(self, visible: bool) -> Outputs:
        # A plot may be drawing, so the results stay mounted.
        return {self.results: gr.Column(visible=visible or "hidden")} if self.results else {}

    def _controls(self, running: bool) -> Outputs:
        buttons: Outputs = {button: gr.Button(interactive=not running) for button in self.buttons}
        if self.stop_button is not None:
            buttons[self.stop_button] = gr.Button(interactive=running)
        return buttons | {self._timer: gr.Timer(active=running)}
