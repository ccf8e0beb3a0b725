"""Panel of a measurement: its buttons, progress and results."""

from __future__ import annotations

import html
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui.api import address_of
from specdemo.ui.service import Service
from specdemo.ui.streams import drain, reason
from specdemo.ui.tabs.components import UNPROCESSED
from specdemo.ui.visitors import REMEMBERED
from specdemo.worker import Stream, WorkerBusy

Result = TypeVar("Result", bound="PanelMeasurement")
Rows = TypeVar("Rows")
Outputs = dict[Any, Any]
RESULTS_S = 1.0  # interval of requests for results
ANNOUNCED = ' role="status"'  # screen readers announce it


class PanelMeasurement(ABC):
    """Settings of a measurement with its items so far."""

    @property
    def timing(self) -> bool:
        """True once timed runs have begun."""
        return False

    @property
    @abstractmethod
    def is_empty(self) -> bool: ...

    @abstractmethod
    def start(self, service: Service, session: str, address: str) -> Stream[Any]: ...

    @abstractmethod
    def fresh(self) -> Self:
        """Return a copy without items."""

    @abstractmethod
    def absorb(self, item: Any) -> None: ...

    @abstractmethod
    def progress(self, seconds: float, ahead: int = 0) -> str:
        """Return the status, `seconds` after the first timed run and with `ahead` jobs in the queue."""

    @abstractmethod
    def ending(self, error: str = "") -> str:
        """Return the last status."""


def waiting(ahead: int) -> str:
    return f"queued: {ahead} ahead" if ahead else "waiting for the device"


@dataclass
class _Started:
    result: PanelMeasurement
    stream: Stream[Any]
    shown: str | None = None  # last status, repeated once: a late message of the event can replace it


@dataclass(frozen=True)
class PanelParts:
    """Buttons that start and stop a measurement, its status line, and results that are hidden meanwhile."""

    buttons: tuple[gr.Button, ...]
    status: gr.HTML
    stop: gr.Button | None = None
    results: gr.Column | None = None

    @classmethod
    def laid_out(cls, name: str, title: str = "Measure", action: str = "run") -> tuple[PanelParts, gr.Column]:
        """Lay out all parts; return them and the results. Element ids start with `name`."""
        with gr.Row():
            run = gr.Button(title, variant="primary", elem_id=f"{name}-{action}", scale=0)
            stop = gr.Button("Stop", interactive=False, elem_id=f"{name}-stop", scale=0)
        status = gr.HTML(elem_id=f"{name}-status")
        results = gr.Column(visible=False)
        return cls((run,), status, stop, results), results


class MeasurementPanel:
    """Stream the progress by an event; a timer requests the results, which a lost message cannot delay."""

    def __init__(
        self, service: Service, parts: PanelParts, show_failure: Callable[[str], Outputs] | None = None
    ) -> None:
        """`show_failure` shows failures without results, by default in the status."""
        self._service, self._parts = service, parts
        self._show_failure = show_failure
        self._started: OrderedDict[str, _Started] = OrderedDict()  # keys are sessions
        self._timer = gr.Timer(RESULTS_S, active=False)

    def connect(
        self,
        inputs: Sequence[gr.components.Component],
        outputs: Sequence[gr.components.Component],
        make_result: Callable[[str, tuple[Any, ...]], Result],
        compute_rows: Callable[[Result], Rows],
        show_rows: Callable[[Result, Rows], Outputs],
        js: str | None = None,
    ) -> None:
        """Wire the buttons. `make_result(session, values)` validates raw inputs.

        `compute_rows` runs in a thread after the last measurement, not to disturb timings; `show_rows` returns the
        values of `outputs`.
        """
        parts = self._parts

        async def measure(request: gr.Request, *values: Any) -> AsyncIterator[Outputs]:
            session = request.session_hash or ""
            try:
                result = make_result(session, values)
                stream = result.start(self._service, session, address_of(request))
            except (UserError, WorkerBusy) as error:
                yield self._refusal(reason(error)) | self._hidden()
                return
            self._remember(session, _Started(result, stream))
            yield self._controls(running=True) | self._hidden()
            async with aclosing(_statuses(result.fresh(), stream)) as statuses:
                async for status in statuses:
                    yield {parts.status: status}

        def show_results(request: gr.Request) -> Outputs:
            return self._results(request.session_hash or "", compute_rows, show_rows)

        controls = [*parts.buttons, parts.stop, self._timer, parts.results]
        updated = [parts.status, *(part for part in controls if part is not None)]
        for button in parts.buttons:
            button.click(
                measure,
                list(inputs),
                [*updated, *(outputs if self._show_failure else [])],
                js=js,
                concurrency_limit=None,
                trigger_mode="once",
                **UNPROCESSED,
            )
        self._timer.tick(show_results, None, [*updated, *outputs], queue=False, **UNPROCESSED)
        if parts.stop is not None:
            parts.stop.click(self._stop, None, None, queue=False, **UNPROCESSED)

    def _remember(self, session: str, started: _Started) -> None:
        self._started[session] = started
        self._started.move_to_end(session)
        while len(self._started) > REMEMBERED:
            self._started.popitem(last=False)

    def _stop(self, request: gr.Request) -> None:
        if started := self._started.get(request.session_hash or ""):
            started.stream.stop()

    def _results(
        self, session: str, compute_rows: Callable[[Any], Rows], show_rows: Callable[[Any, Rows], Outputs]
    ) -> Outputs:
        """Return the outputs of the timer."""
        started = self._started.get(session)
        if started is None:
            return self._controls(running=False)
        if not started.stream.done:
            return {self._timer: gr.skip()}
        if started.shown is not None:
            self._started.pop(session, None)
            return self._controls(running=False) | {self._parts.status: started.shown}
        result = started.result.fresh()
        for item in started.stream.items:
            result.absorb(item)
        error = reason(started.stream.error) if started.stream.error else ""
        started.shown = result.ending(error)
        shown: Outputs = {self._parts.status: started.shown}
        if not result.is_empty:
            shown |= show_rows(result, compute_rows(result)) | self._hidden(False)
        elif error and self._show_failure:
            shown |= self._show_failure(error)
        return shown

    def _refusal(self, text: str) -> Outputs:
        if self._show_failure:
            return {self._parts.status: ""} | self._show_failure(text)
        return {self._parts.status: f"<p{ANNOUNCED}>{html.escape(text)}</p>"}

    def _hidden(self, hidden: bool = True) -> Outputs:
        if self._parts.results is None:
            return {}
        return {self._parts.results: gr.Column(visible="hidden" if hidden else True)}  # a plot may be drawing

    def _controls(self, running: bool) -> Outputs:
        stop = [] if self._parts.stop is None else [self._parts.stop]
        return {
            **{button: gr.Button(interactive=not running) for button in self._parts.buttons},
            **{button: gr.Button(interactive=running) for button in stop},
            self._timer: gr.Timer(active=running),
        }


async def _statuses(result: PanelMeasurement, stream: Stream[Any]) -> AsyncGenerator[str]:
    """Yield changes of the progress. Closing the iterator cancels the job."""
    began, status = 0.0, ""
    async with aclosing(drain(stream)) as batches:
        async for batch in batches:
            for item in batch:
                result.absorb(item)
            began = began or (time.monotonic() if result.timing else 0.0)
            progress = result.progress(time.monotonic() - began, stream.worker.ahead(stream))
            if progress != status and not stream.done:
                yield progress
                status = progress
