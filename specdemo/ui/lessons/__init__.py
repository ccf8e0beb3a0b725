"""Five lessons on recorded runs: a page that needs no model. Its figures are text, which a test recomputes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr

from specdemo.core.trace import read
from specdemo.models.zoo import ASSETS
from specdemo.ui.frames import Run, run_of_traces
from specdemo.ui.lane import BASELINE, SPEC
from specdemo.ui.page_files import mount_module
from specdemo.ui.run_figures import cost_terms, typical_passes

PATH = "/lessons"
SAMPLED, GREEDY = ASSETS / "traces" / "draft, temperature 0.7.jsonl", ASSETS / "traces" / "hybrid, short answer.jsonl"
COPIED = ASSETS / "lessons" / "n-grams.jsonl"
# Steps of the players: all outcomes, with a rejection that depends on the draw, and copied guesses.
_SURVIVE_STEP, _COPIED_STEP = 10, 2


def lessons_page(blocks: gr.Blocks) -> None:
    with blocks.route("Lessons", PATH, show_in_navbar=False):
        gr.HTML(
            html_template=lessons_markup(),
            js_on_load=mount_module("lessons"),
            apply_default_css=False,
            elem_id="lessons",
            lessons=lesson_data(),
        )


def lessons_markup() -> str:
    return Path(__file__).with_name("lessons.html").read_text(encoding="utf-8")


@cache
def lesson_data() -> Mapping[str, Any]:
    """Return records of steps, times and costs of the recorded runs."""
    sampled, greedy = _run(SAMPLED).lanes, _run(GREEDY).lanes
    spec, passes = sampled[SPEC], typical_passes(sampled)
    terms = cost_terms(spec.metrics, sampled[BASELINE].metrics)
    assert passes is not None and terms is not None
    race = {"with guesses": greedy[SPEC], "alone": greedy[BASELINE]}
    return {
        "passes": {"single": passes.single_s, "several": passes.several_s, "rows": passes.rows},
        "race": [(name, [event.metrics.decode_s for event in lane.steps]) for name, lane in race.items()],
        "survive": _records_until(SAMPLED, _SURVIVE_STEP),
        "copied": _records_until(COPIED, _COPIED_STEP),
        "costs": {"alpha": spec.acceptance, "gamma": terms.drafted, "c": terms.c, "v": terms.v, "o": terms.o},
    }


def _records_until(path: Path, step: int) -> list[dict[str, Any]]:
    records = map(json.loads, _run(path).records)
    return [record for record in records if record["l"] == SPEC][: step + 2]


def _run(path: Path) -> Run:
    return run_of_traces(read(path.read_text("utf-8")))
