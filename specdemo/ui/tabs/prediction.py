"""Prediction of the speed-up on the page, for the settings and for other drafters of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import gradio as gr

from specdemo.bench.table import markdown_table
from specdemo.core.formats import format_bytes, percent
from specdemo.fit import COLUMNS, FitRow, advice, ranked, short_name
from specdemo.preflight import Preflight
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC
from specdemo.ui.run_figures import measured_speedups
from specdemo.ui.service import Service, fit_job, prediction_job
from specdemo.ui.settings import recipe_of
from specdemo.ui.settings_form import SettingsForm
from specdemo.ui.tabs.components import escape_markdown, figures_table
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, PanelMeasurement

_SEND_JS = "() => { document.body.dataset.estimate = 'current'; return [window.specdemo.settings()]; }"


_COMPARED = (
    *("pair", "target", "drafter", "head", "method", "gamma", "policy", "rule", "temperature", "top_k", "top_p"),
    *("quantization", "drafter_quantization", "activations"),
)


@dataclass(frozen=True)
class SpeedupPrediction:
    """Prediction for a recipe and a prompt."""

    recipe: Recipe
    prompt: str
    estimate: Preflight

    def describe(self, run: Run | None) -> str:
        """Return the prediction in words, with a contradiction by `run`."""
        return "\n\n".join(filter(None, (describe_preflight(self.estimate), self.contradiction(run))))

    def contradiction(self, run: Run | None) -> str:
        """Return a sentence for a run of the same settings and prompt outside the interval, otherwise ''."""
        lane = run.lanes.get(SPEC) if run is not None else None
        rows = self.estimate.estimates
        row = next((row for row in rows if row.gamma == self.recipe.gamma and self.recipe.policy == "fixed"), None)
        row = rows[0] if len(rows) == 1 else row
        if run is None or lane is None or lane.header is None or row is None or not self.prompt.strip():
            return ""
        predicted = asdict(self.recipe)
        same = all(lane.recipe.get(name) == predicted[name] for name in _COMPARED)
        ratios = measured_speedups(run.lanes, run.speeds)
        if not (same and ratios and self.prompt.strip() in lane.header.prompt):
            return ""
        value = median(ratios)
        return "" if row.low <= value <= row.high else f"**The last run measured {value:.2f}×, outside this interval.**"


def connect_prediction(
    service: Service, form: SettingsForm, device: str, panel: MeasurementPanel, estimate: gr.Markdown
) -> None:
    """Wire the buttons of a prediction for the settings and the prompt, shown in `estimate`."""

    def prepare(session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        (sent,) = values
        recipe = replace(recipe_of(form.complete(sent), device), external=None)
        prompt = sent["prompt"] if isinstance(sent.get("prompt"), str) else ""

        def show(results: Sequence[Any]) -> dict[Any, str]:
            if not results:
                return {}
            predicted = SpeedupPrediction(recipe, prompt, results[0])
            service.visitors.get_or_add(session).prediction = predicted
            return {estimate: predicted.describe(service.runs.latest(session))}

        return PanelMeasurement(prediction_job(service, recipe, prompt), show)

    panel.connect([form.values], [estimate], prepare, js=_SEND_JS)


def connect_fit(service: Service, form: SettingsForm, device: str) -> None:
    """Lay out and wire the table of drafters for the target; its button is in the settings."""
    with gr.Column(elem_id="fit"):
        panel, results = MeasurementPanel.create(service, "fit", "Which drafter fits?")
        with results:
            table = gr.Markdown(elem_id="fit-table")

    def count(rows: Sequence[FitRow]) -> tuple[int, int]:
        measured = [row.prediction is not None for row in rows if row.recipe is not None]
        return sum(measured), max(1, len(measured))

    def prepare(session: str, values: Sequence[Any]) -> PanelMeasurement:
        job = fit_job(service, recipe_of(form.complete(values[-1]), device))
        return PanelMeasurement(job, lambda rows: {table: describe_fit(rows)} if rows else {}, count, "candidates")

    panel.connect([form.values], [table], prepare)


def describe_fit(results: Sequence[FitRow]) -> str:
    """Return advice, table, reasons and commands in Markdown."""
    rows = ranked(results)
    recommendation = advice(rows)
    parts = [f"**{escape_markdown(recommendation[0].upper() + recommendation[1:])}.**", ""]
    parts += [markdown_table(COLUMNS, [list(map(escape_markdown, row.cells)) for row in rows]), ""]
    for row in rows:
        words = [escape_markdown(text) for text in (short_name(row.candidate), row.reason) if text]
        command = row.command.replace("`", "'")
        parts.append(f"- {': '.join(words)}" + (f"  \n  `{command}`" if command else ""))
    return "\n".join(parts)


def contradicted_prediction(service: Service, run: Run | None) -> Any:
    """Return the latest prediction of a contradicting run."""
    predicted = service.visitors.find(run.visitor).prediction if run is not None else None
    return predicted.describe(run) if predicted and predicted.contradiction(run) else gr.skip()


def describe_preflight(estimate: Preflight) -> str:
    rows = [
        (estimate.label(row), row.tokens_per_pass, f"{row.speedup:.2f}×", f"{row.low:.2f}–{row.high:.2f}")
        for row in estimate.estimates
    ]
    last = max(estimate.v)
    checked = f" Held out, {estimate.held_out}." if estimate.held_out else ""
    return (
        f"**Will it pay off?** {estimate.advice[0].upper()}{estimate.advice[1:]}. "
        f"Trial texts: {estimate.texts}, first {estimate.tokens} tokens. {percent(estimate.alpha)} of the checked "
        f"guesses were right. Checking {last} tokens costs {estimate.v[last]:.2f} times the time of writing 1, and a "
        f"guess {estimate.c:.2f} times. "
        f"Weights take {format_bytes(estimate.weight_bytes)}, "
        f"keys and values {format_bytes(estimate.kv_bytes)} per 1,000 tokens.{checked}\n\n"
        f"{figures_table(('settings', 'tokens per pass', 'expected speed-up', '95 %'), rows)}"
    )
