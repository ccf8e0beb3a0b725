"""Prediction of the speed-up on the page: its progress bar and its text."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import gradio as gr

from specdemo.core.formats import format_bytes
from specdemo.preflight import Preflight, PreflightProgress
from specdemo.recipe import Recipe
from specdemo.ui.markdown import figures_table
from specdemo.ui.service import Service
from specdemo.ui.tabs.components import progress_bar
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, PanelMeasurement, PanelParts, waiting
from specdemo.worker import Stream

_CURRENT_JS = "(...values) => { document.body.dataset.estimate = 'current'; return values; }"


@dataclass
class SpeedupPrediction(PanelMeasurement):
    """Prediction for a prompt."""

    recipe: Recipe
    prompt: str
    stage: PreflightProgress | None = None
    predicted: Preflight | None = None

    @property
    def is_empty(self) -> bool:
        return self.predicted is None

    def start(self, service: Service, session: str, address: str) -> Stream[Any]:
        return service.measurements.predict(self.recipe, self.prompt, address)

    def fresh(self) -> SpeedupPrediction:
        return replace(self, stage=None, predicted=None)

    def absorb(self, item: PreflightProgress | Preflight) -> None:
        if isinstance(item, Preflight):
            self.predicted = item
        else:
            self.stage = item

    def progress(self, seconds: float, ahead: int = 0) -> str:
        share, words = (self.stage.share, self.stage.stage) if self.stage else (0, waiting(ahead))
        return progress_bar(share, 1, f"predicting: {words}")

    def ending(self, error: str = "") -> str:
        return "" if error or self.predicted else progress_bar(0, 1, "stopped: no prediction")


def connect_prediction(
    service: Service,
    parts: PanelParts,
    estimate: gr.Markdown,
    settings: Sequence[gr.components.Component],
    make_result: Callable[[str, tuple[Any, ...]], SpeedupPrediction],
) -> None:
    """Wire the buttons of a prediction, shown in `estimate`."""

    def show(_: SpeedupPrediction, predicted: Preflight) -> dict[Any, Any]:
        return {estimate: describe_preflight(predicted)}

    def show_failure(error: str) -> dict[Any, Any]:
        return {estimate: f"**No prediction:** {html.escape(error)}"}

    panel = MeasurementPanel(service, parts, show_failure)
    panel.connect(settings, [estimate], make_result, attrgetter("predicted"), show, _CURRENT_JS)


def describe_preflight(estimate: Preflight) -> str:
    rows = [
        (estimate.label(row), row.tokens_per_pass, f"{row.speedup:.2f}×", f"{row.low:.2f}–{row.high:.2f}")
        for row in estimate.estimates
    ]
    last = max(estimate.v)
    return (
        f"**Will it pay off?** {estimate.advice[0].upper()}{estimate.advice[1:]}. "
        f"Texts of the target: {estimate.texts}; α is {estimate.alpha:.2f}. Costs are measured on this machine: "
        f"a draft token costs {estimate.c:.2f} AR steps, a pass over {last} tokens {estimate.v[last]:.2f}. "
        f"Weights take {format_bytes(estimate.weight_bytes)}, "
        f"keys and values {format_bytes(estimate.kv_bytes)} per 1,000 tokens.\n\n"
        f"{figures_table(('settings', 'tokens per pass', 'expected speed-up', '95 %'), rows)}"
    )
