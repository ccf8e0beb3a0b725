"""Prediction of the speed-up on the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from specdemo.core.formats import format_bytes
from specdemo.preflight import Preflight
from specdemo.recipe import Recipe
from specdemo.ui.markdown import figures_table
from specdemo.ui.service import Service
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, PanelMeasurement, PanelParts

_SEND_JS = "() => { document.body.dataset.estimate = 'current'; return [window.specdemo.settings()]; }"


@dataclass(frozen=True)
class SpeedupPrediction:
    """Recipe and prompt of a prediction."""

    recipe: Recipe
    prompt: str


def connect_prediction(
    service: Service,
    parts: PanelParts,
    estimate: gr.Markdown,
    settings: gr.JSON,
    make: Callable[[Any], SpeedupPrediction],
) -> None:
    """Wire the buttons of a prediction of the sent settings, shown in `estimate`."""

    def prepare(session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        chosen = make(values[0])
        return PanelMeasurement(
            start=lambda session, address: service.measurements.predict(chosen.recipe, chosen.prompt, address),
            show=lambda results: {estimate: describe_preflight(results[0])} if results else {},
        )

    MeasurementPanel(parts, [settings], [estimate], prepare, failures=estimate, js=_SEND_JS)


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
