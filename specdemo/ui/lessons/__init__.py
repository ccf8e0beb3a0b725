"""Five lessons on recorded runs: a page that needs no model."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import gradio as gr

from specdemo.core.step import Outcome, Step
from specdemo.core.theory import expected_tokens
from specdemo.core.theory import speedup as cost_model
from specdemo.core.trace import read
from specdemo.models.zoo import ASSETS
from specdemo.ui.frames import Run, run_of_traces
from specdemo.ui.lane import PLAIN, SPEC, Lane
from specdemo.ui.page_files import mount_module
from specdemo.ui.run_estimate import cost_terms
from specdemo.ui.run_figures import lane_speedup, typical_passes

_FOLDER = Path(__file__).parent
PATH = "/lessons"
SAMPLED, GREEDY = ASSETS / "traces" / "draft, temperature 0.7.jsonl", ASSETS / "traces" / "hybrid, short answer.jsonl"
COPIED = ASSETS / "lessons" / "n-grams.jsonl"


def lessons_page(blocks: gr.Blocks) -> None:
    """Add the page of the lessons."""
    with blocks.route("Lessons", PATH, show_in_navbar=False):
        gr.HTML(
            html_template=lessons_markup(),
            js_on_load=mount_module("lessons"),
            apply_default_css=False,
            elem_id="lessons",
            lessons=lesson_data(),
        )


def lessons_markup() -> str:
    """Return the lessons with the figures of the recorded runs."""
    data, lanes = lesson_data(), _lanes(GREEDY)
    spec, plain = lanes[SPEC], lanes[PLAIN]
    passes, costs = data["passes"], data["costs"]
    survive = data["survive"][-1]["step"]
    texts = {
        "one_ms": f"{1000 * passes['single']:.2f}",
        "several_ms": f"{1000 * passes['several']:.2f}",
        "rows": passes["rows"],
        "ratio": f"{passes['several'] / passes['single']:.2f}",
        "tokens": spec.metrics.tokens,
        "text": html.escape("".join(event.text for event in spec.steps).strip()),
        "passes": spec.metrics.target_passes,
        "baseline_passes": plain.metrics.target_passes,
        "guesses": len(survive["draft"]),
        "survivors": len(survive["accepted"]),
        **{name: f"{value:.2f}" for name, value in costs.items()},
        "conclusion": _conclusion(costs["predicted"], costs["measured"]),
    }
    return Template(_text("lessons.html")).substitute(texts)


@cache
def lesson_data() -> dict[str, Any]:
    """Return records of steps, times and costs of the recorded runs."""
    sampled, greedy = _lanes(SAMPLED), _lanes(GREEDY)
    passes = typical_passes(sampled)
    assert passes is not None
    return {
        "passes": {"single": passes.single_s, "several": passes.several_s, "rows": passes.rows},
        "race": [(name, [event.metrics.decode_s for event in greedy[key].steps]) for name, key in _RACE],
        "survive": _records_until(SAMPLED, _instructive),
        "copied": _records_until(COPIED, _copied),
        "costs": _costs(sampled),
    }


_RACE = (("speculative", SPEC), ("one by one", PLAIN))


def _costs(lanes: Mapping[str, Lane]) -> dict[str, float]:
    terms, alpha = cost_terms(lanes[SPEC].metrics, lanes[PLAIN].metrics), lanes[SPEC].acceptance
    measured = lane_speedup(lanes)
    assert terms is not None and alpha is not None and measured is not None
    predicted = cost_model(expected_tokens(alpha, terms.drafted), terms.drafted, terms.c, terms.v, terms.o)
    values = {"alpha": alpha, "gamma": terms.drafted, "c": terms.c, "v": terms.v, "o": terms.o}
    return values | {"predicted": predicted, "measured": measured}


def _conclusion(predicted: float, measured: float) -> str:
    if (predicted > 1) != (measured > 1):
        return "They disagree about a gain: repeat such a run before you decide."
    return "Guesses paid." if measured > 1 else "Guesses cost time."


def _instructive(step: Step) -> bool:
    """Return True for a step with all outcomes, whose rejection depends on the draw."""
    outcomes = [step.outcome(node) for node in range(len(step.draft))]
    bounds = zip(outcomes, step.verdict.bound, strict=False)
    uncertain = any(outcome is Outcome.REJECTED and (bound or 0) > 0.1 for outcome, bound in bounds)
    return {Outcome.ACCEPTED, Outcome.REJECTED, Outcome.IGNORED} <= set(outcomes) and uncertain


def _copied(step: Step) -> bool:
    """Return True for an n-gram of which several tokens were accepted."""
    origin = step.draft.origin
    return bool(origin and origin[0].source == "n-gram" and len(step.verdict.accepted) > 1)


def _records_until(path: Path, wanted: Callable[[Step], bool]) -> list[dict[str, Any]]:
    """Return the records of the header and of the steps up to the first wanted one."""
    run = _run(path)
    last = next(event.step.i for event in run.lanes[SPEC].steps if wanted(event.step))
    records = (json.loads(record.text) for record in run.records)
    return [record for record in records if record["l"] == SPEC][: last + 2]


@cache
def _run(path: Path) -> Run:
    return run_of_traces(read(path.read_text("utf-8")))


def _lanes(path: Path) -> Mapping[str, Lane]:
    return _run(path).lanes


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
