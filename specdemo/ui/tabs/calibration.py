"""Section of the Edge-cloud tab that calibrates gates for the chosen pair and sets their controls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import gradio as gr

from specdemo.bench.calibration import PERCENTILES, Calibration, check_draft_model
from specdemo.bench.measure import BenchProgress
from specdemo.prompts import alternate_classes, load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.markdown import escape_markdown, figures_table
from specdemo.ui.service import Service
from specdemo.ui.settings import recipe_of
from specdemo.ui.tabs.components import progress_bar
from specdemo.ui.tabs.measurement_panel import (
    ANNOUNCED,
    MeasurementPanel,
    PanelMeasurement,
    PanelParts,
    waiting,
)
from specdemo.worker import Stream

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


@dataclass
class CalibrationResult(PanelMeasurement):
    """Calibration of a pair; `known`: thresholds stored by pair before."""

    recipe: Recipe
    settings: Mapping[str, Any]
    known: Any
    stage: BenchProgress | None = None
    measured: Calibration | None = None

    @property
    def is_empty(self) -> bool:
        return self.measured is None

    def start(self, service: Service, session: str, address: str) -> Stream[Any]:
        prompts = alternate_classes(load_prompts((), self.recipe.chat))[:PROMPTS]
        return service.measurements.calibrate(self.recipe, prompts, session, address)

    def fresh(self) -> CalibrationResult:
        return replace(self, stage=None, measured=None)

    def absorb(self, item: BenchProgress | Calibration) -> None:
        if isinstance(item, Calibration):
            self.measured = item
        else:
            self.stage = item

    def progress(self, seconds: float, ahead: int = 0) -> str:
        if self.stage is None:
            return progress_bar(0, PROMPTS, waiting(ahead))
        return progress_bar(self.stage.number - 1, self.stage.total, str(self.stage))

    def ending(self, error: str = "") -> str:
        total = self.stage.total if self.stage else PROMPTS
        words = f"failed: {error}" if error else "stopped: nothing is measured"
        return progress_bar(0, total, words, ANNOUNCED) if self.is_empty else progress_bar(1, 1, "done", ANNOUNCED)


def calibration_section(
    service: Service, controls: Mapping[str, gr.components.Component], stored: gr.BrowserState, device: str
) -> None:
    """Lay out the section; `stored`: thresholds by pair."""
    gates = [controls[f"gate_{name}"] for name in PERCENTILES]
    gr.Markdown(_INTRO)
    parts, results = PanelParts.laid_out("gates", "Calibrate", "calibrate")
    with results:
        table = gr.Markdown(elem_id="gates-thresholds", elem_classes="figures")

    def make_result(session: str, values: tuple[Any, ...]) -> CalibrationResult:
        known, *rest = values
        settings = dict(zip(controls, rest, strict=True))
        return CalibrationResult(calibration_recipe(settings, device), settings, known)

    def show_rows(result: CalibrationResult, measured: Calibration) -> dict[Any, Any]:
        memory = remembered(result.known, result.settings, measured.thresholds)
        set_to = [measured.thresholds.get(name, gr.skip()) for name in PERCENTILES]
        return {table: describe_calibration(measured), stored: memory, **dict(zip(gates, set_to, strict=True))}

    panel = MeasurementPanel(service, parts)
    inputs = [stored, *controls.values()]
    panel.connect(inputs, [table, stored, *gates], make_result, attrgetter("measured"), show_rows)
    models: list[Any] = [controls[name] for name in _PAIR if name in controls]
    if len(models) == len(_PAIR):
        changes = [model.input for model in models]
        gr.on(changes, None, [stored, *models, *gates], gates, js=_REMEMBERED_JS, api_visibility="private")
