"""Prediction of the speed-up on the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gradio as gr

from specdemo.core.formats import format_bytes, percent
from specdemo.preflight import Preflight
from specdemo.ui.markdown import figures_table
from specdemo.ui.measurements import prediction_job
from specdemo.ui.service import Service
from specdemo.ui.settings import recipe_of
from specdemo.ui.settings_form import SettingsForm
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, PanelMeasurement

_SEND_JS = "() => { document.body.dataset.estimate = 'current'; return [window.specdemo.settings()]; }"


def connect_prediction(
    service: Service, form: SettingsForm, device: str, panel: MeasurementPanel, estimate: gr.Markdown
) -> None:
    """Wire the buttons of a prediction for the settings and the prompt, shown in `estimate`."""

    def prepare(session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        (sent,) = values
        recipe = replace(recipe_of(form.complete(sent), device), external=None)
        prompt = sent["prompt"] if isinstance(sent.get("prompt"), str) else ""
        return PanelMeasurement(
            job=prediction_job(service, recipe, prompt),
            show=lambda results: {estimate: describe_preflight(results[0])} if results else {},
        )

    panel.connect([form.values], [estimate], prepare, js=_SEND_JS)


def describe_preflight(estimate: Preflight) -> str:
    rows = [
        (estimate.label(row), row.tokens_per_pass, f"{row.speedup:.2f}×", f"{row.low:.2f}–{row.high:.2f}")
        for row in estimate.estimates
    ]
    last = max(estimate.v)
    return (
        f"**Will it pay off?** {estimate.advice[0].upper()}{estimate.advice[1:]}. "
        f"Trial texts: {estimate.texts}, first {estimate.tokens} tokens. {percent(estimate.alpha)} of the checked "
        f"guesses were right. Checking {last} tokens costs {estimate.v[last]:.2f} times the time of writing 1, and a "
        f"guess {estimate.c:.2f} times. "
        f"Weights take {format_bytes(estimate.weight_bytes)}, "
        f"keys and values {format_bytes(estimate.kv_bytes)} per 1,000 tokens.\n\n"
        f"{figures_table(('settings', 'tokens per pass', 'expected speed-up', '95 %'), rows)}"
    )
