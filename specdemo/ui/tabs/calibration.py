"""Section of the Edge-cloud tab that calibrates gates for the chosen pair and sets their controls."""

from __future__ import annotations

import html
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import gradio as gr

from specdemo.bench.calibration import PERCENTILES, Calibration, check_draft_model
from specdemo.core.errors import UserError
from specdemo.prompts import alternate_classes, load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.api import address_of
from specdemo.ui.labels import escape_markdown, figures_table
from specdemo.ui.service import Service
from specdemo.ui.settings import recipe_of
from specdemo.ui.streams import drain, reason
from specdemo.ui.tabs.components import UNPROCESSED
from specdemo.worker import WorkerBusy

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


def calibration_section(
    service: Service, controls: Mapping[str, gr.components.Component], stored: gr.BrowserState, device: str
) -> None:
    """Lay out the section; `stored`: thresholds by pair."""
    gates = [controls[f"gate_{name}"] for name in PERCENTILES]
    gr.Markdown(_INTRO)
    run = gr.Button("Calibrate", elem_id="gates-calibrate", scale=0)
    status = gr.HTML(elem_id="gates-status")
    result = gr.Markdown(elem_id="gates-thresholds", elem_classes="figures")

    async def measure(request: gr.Request, known: Any, *values: Any) -> AsyncIterator[dict[Any, Any]]:
        settings = dict(zip(controls, values, strict=True))
        try:
            recipe = calibration_recipe(settings, device)
            prompts = alternate_classes(load_prompts((), recipe.chat))[:PROMPTS]
            stream = service.calibrate(recipe, prompts, request.session_hash or "", address_of(request))
        except (UserError, WorkerBusy) as error:
            yield {status: _status(reason(error))}
            return
        yield {run: gr.Button(interactive=False), status: _status("waiting for the device")}
        measured: Calibration | None = None
        async with aclosing(drain(stream)) as batches:
            async for batch in batches:
                for item in batch[-1:]:
                    measured = item if isinstance(item, Calibration) else None
                    yield {status: _status("done" if measured else str(item))}
        shown: dict[Any, Any] = {}
        if measured is not None:
            memory = remembered(known, settings, measured.thresholds)
            set_to = [measured.thresholds.get(name, gr.skip()) for name in PERCENTILES]
            shown = {result: describe_calibration(measured), stored: memory, **dict(zip(gates, set_to, strict=True))}
        elif stream.error:
            shown = {status: _status(reason(stream.error))}
        yield {run: gr.Button(interactive=True), **shown}

    updated = [run, status, result, stored, *gates]
    inputs = [stored, *controls.values()]
    run.click(measure, inputs, updated, concurrency_limit=None, trigger_mode="once", **UNPROCESSED)
    models: list[Any] = [controls[name] for name in _PAIR if name in controls]
    if len(models) == len(_PAIR):
        changes = [model.input for model in models]
        gr.on(changes, None, [stored, *models, *gates], gates, js=_REMEMBERED_JS, api_visibility="private")


def _status(text: str) -> str:
    return f"<p role='status'>{html.escape(text)}</p>"
