"""Section of the Edge-cloud tab that calibrates gates for the chosen pair and sets their controls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gradio as gr

from specdemo.bench.calibration import PERCENTILES, Calibration, check_draft_model
from specdemo.prompts import alternate_classes, load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.controls import Controls
from specdemo.ui.markdown import escape_markdown, figures_table
from specdemo.ui.service import Service
from specdemo.ui.settings import recipe_of
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, Outputs, PanelMeasurement, PanelParts

PROMPTS, TOKENS = 12, 48
_PAIR = ("pair", "target", "drafter")
_INTRO = """### Calibrate gates
Measure thresholds for the chosen pair. The 80th percentile of NLL, entropy and variance is hard, and the 20th of the
margin. The controls under *Edge and cloud* are set, and remembered for this pair."""
_HEAD = ("signal", "percentile", "this pair", "guide")
_REMEMBERED_JS = """(stored, pair, target, drafter, ...current) =>
  stored?.[JSON.stringify([pair ?? "", target ?? "", drafter ?? ""])] ?? current"""


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


def remembered(stored: Any, settings: Mapping[str, Any], thresholds: Mapping[str, float]) -> dict[str, list[Any]]:
    """Add the thresholds of a calibration to those stored by pair."""
    key = json.dumps([settings.get(name) or "" for name in _PAIR], separators=(",", ":"), ensure_ascii=False)
    known = stored if isinstance(stored, dict) else {}
    return {**known, key: [thresholds.get(name, settings[f"gate_{name}"]) for name in PERCENTILES]}


def calibration_section(service: Service, controls: Controls, stored: gr.BrowserState, device: str) -> None:
    """Lay out the section; `stored`: thresholds by pair."""
    gates = {name: controls[f"gate_{name}"] for name in PERCENTILES}
    gr.Markdown(_INTRO)
    parts, results = PanelParts.laid_out("gates", "Calibrate", "calibrate")
    with results:
        table = gr.Markdown(elem_id="gates-thresholds", elem_classes="figures")

    def prepare(session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        known, *rest = values
        settings = dict(zip(controls, rest, strict=True))
        recipe = calibration_recipe(settings, device)
        prompts = alternate_classes(load_prompts((), recipe.chat))[:PROMPTS]

        def show(results: list[Calibration]) -> Outputs:
            if not results:
                return {}
            thresholds = results[0].thresholds
            shown = {table: describe_calibration(results[0]), stored: remembered(known, settings, thresholds)}
            return shown | {gate: thresholds.get(name, gr.skip()) for name, gate in gates.items()}

        return PanelMeasurement(partial(service.measurements.calibrate, recipe, prompts), show)

    MeasurementPanel(parts, [stored, *controls.values()], [table, stored, *gates.values()], prepare)
    models: list[Any] = [controls[name] for name in _PAIR if name in controls]
    if len(models) == len(_PAIR):
        changes = [model.input for model in models]
        current = [*gates.values()]
        gr.on(changes, None, [stored, *models, *current], current, js=_REMEMBERED_JS, api_visibility="private")
