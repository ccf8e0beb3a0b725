"""Estimates of preflight against measurements: table `preflight_accuracy` in docs/preflight.md.

`python -m benchmarks.preflight_accuracy --write` compares speed-ups of draft lengths and prompts that were held out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.runs import traced
from benchmarks.tables import Study, publish, study_command
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR
from specdemo.pipeline import build_pipeline
from specdemo.plan import plan_run
from specdemo.preflight import (
    HeldOut,
    compare_held_out,
    decoded_runs,
    fixed_length,
    halves,
    held_out_runs,
    load_comparable,
    measure_costs,
    preflight,
    prompt_cost,
    shorter_drafts,
    text_of_run,
    texts_for,
)
from specdemo.prompts import CONTINUATION_FILE, RECORDED_TEMPERATURES, load_prompts
from specdemo.recipe import Recipe

TABLES = {"preflight_accuracy": "docs/preflight.md"}
CONTINUATION_TOKENS = 136
GAMMAS = (1, 2, 3, 5, 7)
DECODED_GAMMA = 8  # of the runs from which shorter drafts are predicted
TEXTS = 20  # prompts of each class, of which half are held out
REPEATS = 10
COLUMNS = {
    "pair": "{pair}",
    "class": "{kind}",
    **{f"γ {gamma}": f"{{gamma {gamma}}}" for gamma in GAMMAS},
    "mean error": "{error:.2f}",
    "mean half-width": "{half_width:.2f}",
    "most beyond": "{beyond:.2f}",
}


def replayed_rows(kind: str, pool: ModelPool) -> Iterator[HeldOut]:
    """Yield each draft length of the bundled pair, predicted without steps of this length."""
    for gamma in GAMMAS:
        recipe = Recipe(pair="bundled", method="draft", gamma=gamma, temperature=0.0, max_tokens=CONTINUATION_TOKENS)
        held_out = preflight(recipe, texts_for(recipe, [kind])[:TEXTS], pool).held_out
        assert held_out is not None
        yield held_out


def decoded_rows(kind: str, pool: ModelPool) -> Iterator[HeldOut]:
    """Yield each draft length of the head of the chat pair, predicted from runs with `DECODED_GAMMA`."""
    recipe = Recipe(pair=CHAT_PAIR, chat=True, method="eagle", gamma=DECODED_GAMMA, temperature=0.0, max_tokens=64)
    target, head, pipeline = load_comparable(recipe, pool)
    known, others = halves(texts_for(recipe, [kind])[:TEXTS])
    with pipeline:
        context = pipeline.shared_context
        runs = [*decoded_runs(recipe, target, head, known, context, seconds=math.inf)]
        texts = [text_of_run(run) for run in runs]
        timed = partial(build_pipeline, plan_run(recipe), target, head)
        costs = measure_costs(timed, texts, DECODED_GAMMA, REPEATS)
        opening = prompt_cost(pipeline, texts[0], costs)
    for gamma in GAMMAS:
        others_timed = replace(costs, v={rows: cost for rows, cost in costs.v.items() if rows != gamma + 1})
        predicted = shorter_drafts(recipe, runs, others_timed, opening)[gamma - 1].speedup
        drafting = fixed_length(recipe, gamma)
        measured = held_out_runs(drafting, target, head, others, context)
        held_out = compare_held_out(f"gamma {gamma}", predicted, gamma, measured)
        assert held_out is not None
        yield held_out


def held_out_record(pair: str, kind: str, rows: Sequence[HeldOut]) -> dict[str, Any]:
    """Return the cells of a class: prediction and measurement by length, and means over the lengths."""
    widths = [(row.measured.high - row.measured.low) / 2 for row in rows]
    errors = [abs(row.error) for row in rows]
    beyond = max(error - width for error, width in zip(errors, widths, strict=True))
    cells = {
        row.setting: f"{row.predicted:.2f}, {row.measured.speedup:.2f} ± {width:.2f}"
        for row, width in zip(rows, widths, strict=True)
    }
    return {
        "pair": pair,
        "kind": kind,
        **cells,
        "error": statistics.mean(errors),
        "half_width": statistics.mean(widths),
        "beyond": max(0.0, beyond),
    }


def held_out_records(pool: ModelPool, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the cells of each class of both pairs, or of the classes `kinds`."""
    for pair, chat, predict in (("bundled", False, replayed_rows), (CHAT_PAIR, True, decoded_rows)):
        for kind in dict.fromkeys(prompt.kind for prompt in load_prompts(chat=chat)):
            if not kinds or kind in kinds:
                yield held_out_record(pair, kind, [*predict(kind, pool)])


def record_texts(pool: ModelPool) -> None:
    """Replace the recorded continuations by texts of the bundled target."""
    recipe = Recipe(pair="bundled", method="ar", top_p=1.0, max_tokens=CONTINUATION_TOKENS)
    classes: dict[str, list[dict[str, Any]]] = json.loads(CONTINUATION_FILE.read_text("utf-8"))
    for entries in classes.values():
        for seed, entry in enumerate(entries):
            for temperature in RECORDED_TEMPERATURES:
                ar = replace(recipe, temperature=temperature, seed=seed)
                entry[f"{temperature:g}"] = "".join(event.text for event in traced(ar, entry["prompt"], pool).steps)
    CONTINUATION_FILE.write_text(json.dumps(classes, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def study(options: argparse.Namespace) -> None:
    """Predict, measure and publish the table."""
    pool = ModelPool()
    if options.record_texts:
        record_texts(pool)
        return
    publish(options, "preflight_accuracy", COLUMNS, [*held_out_records(pool, options.kind)])


OPTIONS = {
    "kind": {"nargs": "+", "default": [], "help": "classes of prompts (default: all)"},
    "record_texts": {"action": "store_true", "help": "replace the recorded texts of the target"},
}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
