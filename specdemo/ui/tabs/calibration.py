"""Section of the Edge-cloud tab that calibrates gates for the chosen pair and sets their controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gradio as gr

from specdemo.bench.calibration import Calibration, check_draft_model
from specdemo.prompts import alternate_classes, load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.markdown import escape_markdown, figures_table
from specdemo.ui.service import Service
from specdemo.ui.settings import recipe_of
from specdemo.ui.settings_form import SEND_JS, SettingsForm
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, Outputs, PanelMeasurement, PanelParts

PROMPTS, TOKENS = 12, 48
_INTRO = """### Calibrate gates
Measure thresholds for the chosen pair: the hardest fifth of the tokens goes to the cloud.
The controls under *Edge and cloud* are set, and remembered for this pair."""
_HEAD = ("signal", "percentile", "this pair", "guide")
_SET_JS = "(calibrated) => calibrated && window.specdemo.setGates(calibrated)"


def calibration_recipe(settings: Mapping[str, Any], device: str) -> Recipe:
    """Return the recipe of the settings, verified on this machine."""
    chosen = recipe_of({**settings, "mode": "off", "external": None, "max_tokens": TOKENS}, device)
    check_draft_model(vars(chosen))
    return replace(chosen, method="draft")


def describe_calibration(result: Calibration) -> str:
    missing = f" There is no variance: {escape_markdown(result.missing)}." if result.missing else ""
    return (
        f"{result.tokens} draft tokens of {result.texts} texts.{missing}\n\n{figures_table(_HEAD, result.rows())}\n\n"
        f"In the terminal: `{result.flags}`"
    )


def calibration_section(service: Service, form: SettingsForm, device: str) -> None:
    """Lay out the section. The browser sets the thresholds and remembers them by pair."""
    gr.Markdown(_INTRO)
    parts, results = PanelParts.laid_out("gates", "Calibrate", "calibrate")
    with results:
        table = gr.Markdown(elem_id="gates-thresholds", elem_classes="figures")
    calibrated = gr.JSON(visible=False)

    def prepare(session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        settings = form.complete(values[0])
        recipe = calibration_recipe(settings, device)
        prompts = alternate_classes(load_prompts((), recipe.chat))[:PROMPTS]

        def show(results: list[Calibration]) -> Outputs:
            if not results:
                return {}
            gates = {f"gate_{name}": threshold for name, threshold in results[0].thresholds.items()}
            return {table: describe_calibration(results[0]), calibrated: {"models": settings, "gates": gates}}

        return PanelMeasurement(partial(service.measurements.calibrate, recipe, prompts), show)

    panel = MeasurementPanel(parts, [form.values], [table, calibrated], prepare, js=SEND_JS)
    panel.shown.then(None, calibrated, None, js=_SET_JS, api_visibility="private")
