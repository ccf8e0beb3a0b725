"""Five lessons on recorded runs: a page that needs no model."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
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
    rejected = _rejected(data["survive"])
    copied = data["copied"][-1]["step"]
    texts = {
        "single_ms": _milliseconds(passes["single"]),
        "rows": passes["rows"],
        "gain": f"{passes['rows'] * passes['single'] / passes['several']:.1f}",
        "tokens": spec.metrics.tokens,
        "text": "".join(event.text for event in spec.steps).strip(),
        "baseline_passes": plain.metrics.target_passes,
        "guess": rejected["text"].strip(),
        "p_percent": f"{100 * rejected['p']:.1f}",
        "q_percent": f"{100 * rejected['q']:.1f}",
        "draw": f"{100 * rejected['draw']:.0f} %",
        "copied": "".join(copied["draft_text"][node] for node in copied["accepted"]).strip(),
        "kept": f"{100 * costs['alpha']:.0f}",
        "guesses": round(costs["gamma"]),
        **{name: f"{value:.2f}" for name, value in costs.items()},
        "conclusion": _conclusion(costs["predicted"], costs["measured"]),
    }
    return Template(_text("lessons.html")).substitute({name: html.escape(str(text)) for name, text in texts.items()})


@cache
def lesson_data() -> dict[str, Any]:
    """Return records of steps, times and costs of the recorded runs."""
    sampled, greedy = _lanes(SAMPLED), _lanes(GREEDY)
    passes = typical_passes(sampled)
    assert passes is not None
    data = {
        "passes": {"single": passes.single_s, "several": passes.several_s, "rows": passes.rows},
        "race": [(name, [event.metrics.decode_s for event in greedy[key].steps]) for name, key in _RACE],
        "survive": _records_until(SAMPLED, _instructive),
        "copied": _records_until(COPIED, _copied),
        "costs": _costs(sampled),
    }
    return {**data, "questions": _questions(data, greedy)}


def _questions(data: Mapping[str, Any], greedy: Mapping[str, Lane]) -> list[dict[str, Any]]:
    """Return the choices of each lesson, and the position of the right one."""
    passes, costs = data["passes"], data["costs"]
    times = (passes["single"], passes["several"], passes["rows"] * passes["single"])
    alone, guessed = (greedy[name].metrics.target_passes for name in (PLAIN, SPEC))
    counts = (alone, (alone + guessed) // 2, guessed)
    bound = _rejected(data["survive"])["bound"]
    least = _least_acceptance(costs)
    shares = [f"If at least {100 * share:.0f} % are kept" for share in (least / 2, least)]
    return [
        {"choices": [f"{_milliseconds(time)} ms" for time in times], "right": 1},
        {"choices": [f"{count} passes" for count in counts], "right": 2},
        {"choices": ["Always", f"In {100 * bound:.0f} % of the draws", "Never"], "right": 1},
        {"choices": ["From the text before", "From a list of frequent words", "From chance"], "right": 0},
        {"choices": ["Always", *shares], "right": 2},
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _rejected(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first rejected guess of the last record."""
    nodes, texts = records[-1]["nodes"], records[-1]["step"]["draft_text"]
    return next({**node, "text": text} for node, text in zip(nodes, texts, strict=True) if node["state"] == "rejected")


def _least_acceptance(costs: Mapping[str, float]) -> float:
    """Return the least acceptance with which guesses pay, in steps of 0.01."""
    gamma = round(costs["gamma"])
    shares = (percent / 100 for percent in range(100))

    def predicted(alpha: float) -> float:
        return cost_model(expected_tokens(alpha, gamma), gamma, costs["c"], costs["v"], costs["o"])

    return next(alpha for alpha in shares if predicted(alpha) > 1)


_RACE = (("with guesses", SPEC), ("alone", PLAIN))


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
    records = map(json.loads, run.records)
    return [record for record in records if record["l"] == SPEC][: last + 2]


@cache
def _run(path: Path) -> Run:
    return run_of_traces(read(path.read_text("utf-8")))


def _lanes(path: Path) -> Mapping[str, Lane]:
    return _run(path).lanes


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
