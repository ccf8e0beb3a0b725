"""Estimates of preflight against measurements: tables `preflight_accuracy`, `preflight_tokens` in docs/preflight.md.

`python -m benchmarks.preflight_accuracy --write` compares speed-ups of draft lengths and prompts that were held out,
with `--tokens-per-pass` tokens per pass of all methods.
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
from pathlib import Path
from typing import Any

from benchmarks.runs import traced
from benchmarks.tables import Study, publish, study_command
from specdemo.cli.arguments import given
from specdemo.core.estimate import acceptance_along_text
from specdemo.core.metrics import Metrics, ratio_interval
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
    is_replayed,
    load_comparable,
    measure_costs,
    preflight,
    prompt_cost,
    replay,
    shorter_drafts,
    text_of_run,
    texts_for,
    usable_texts,
)
from specdemo.prompts import CONTINUATION_FILE, RECORDED_TEMPERATURES, load_prompts
from specdemo.recipe import METHODS, Recipe

TABLES = {"preflight_accuracy": "docs/preflight.md", "preflight_tokens": "docs/preflight.md"}
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
TOKEN_COLUMNS = {
    "method": "{method}",
    "T": "{temperature:g}",
    "predicted": "{predicted:.2f} [{predicted_interval[0]:.2f}, {predicted_interval[1]:.2f}]",
    "measured": "{measured:.2f} [{measured_interval[0]:.2f}, {measured_interval[1]:.2f}]",
    "predicted / measured": "{ratio:.2f}",
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


def token_accuracy(recipe: Recipe, kinds: Sequence[str], pool: ModelPool, count: int) -> Iterator[dict[str, Any]]:
    """Yield estimated and measured tokens per pass of all methods with the sampling parameters of `recipe`.

    Estimates use `2 * count` texts of each class, runs `count` other prompts.
    """
    prompts = [prompt for kind in kinds for prompt in texts_for(recipe, [kind])[: 2 * count]]
    held_out = [prompt for kind in kinds for prompt in load_prompts(kinds=[kind])[:count]]
    target, _, pipeline = load_comparable(recipe, pool)
    texts, _ = usable_texts(recipe, target, prompts, pipeline.shared_context, len(prompts), math.inf)
    usable = {None, "model", *(("head",) if recipe.head else ())}
    for method in (name for name, entry in METHODS.items() if entry.preflight and entry.drafter in usable):
        drafting = replace(recipe, method=method)
        target, drafter, pipeline = load_comparable(drafting, pool)
        if is_replayed(drafting):
            chances = [replay(drafting, target, drafter, text) for text in texts]
            expected = [acceptance_along_text(of_text)(recipe.gamma) for of_text in chances]
            estimated = [(steps.tokens, steps.count) for steps in expected]
        else:
            runs = decoded_runs(drafting, target, drafter, prompts, pipeline.shared_context, len(prompts), math.inf)
            estimated = [(m.decode_tokens, m.target_passes) for m in (Metrics.of(run.steps) for run in runs)]
        metrics = [
            traced(replace(drafting, seed=seed), prompt.text, pool).metrics
            for seed, prompt in enumerate(held_out, len(prompts))
        ]
        measured = [(m["tokens"] - 1, m["target_passes"]) for m in metrics if m["target_passes"]]
        yield _token_record(method, recipe.temperature, estimated, measured)


def _token_record(
    method: str, temperature: float, estimated: list[tuple[float, float]], measured: list[tuple[float, float]]
) -> dict[str, Any]:
    totals = [[sum(column) for column in zip(*pairs, strict=True)] for pairs in (estimated, measured)]
    predicted, found = (tokens / passes for tokens, passes in totals)
    return {
        "method": method,
        "temperature": temperature,
        "predicted": predicted,
        "measured": found,
        "ratio": predicted / found,
        "predicted_interval": ratio_interval(estimated),
        "measured_interval": ratio_interval(measured),
    }


def record_texts(recipe: Recipe, pool: ModelPool, path: Path = CONTINUATION_FILE) -> None:
    """Replace the continuations in `path` by texts of the recipe's target."""
    classes: dict[str, list[dict[str, Any]]] = json.loads(path.read_text("utf-8"))
    for entries in classes.values():
        for seed, entry in enumerate(entries):
            for temperature in RECORDED_TEMPERATURES:
                ar = replace(recipe, temperature=temperature, top_p=1.0, seed=seed, max_tokens=CONTINUATION_TOKENS)
                entry[f"{temperature:g}"] = "".join(event.text for event in traced(ar, entry["prompt"], pool).steps)
    path.write_text(json.dumps(classes, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def study(options: argparse.Namespace) -> None:
    """Predict, measure and publish a table."""
    common = {name: value for name, value in given(options).items() if name != "temperature"}
    common["top_p"] = 1.0
    pool = ModelPool()
    if options.record_texts:
        record_texts(Recipe(**common, method="ar"), pool)
        return
    if options.tokens_per_pass:
        kinds = list(dict.fromkeys(prompt.kind for prompt in load_prompts(kinds=options.kind)))
        recipes = [Recipe(**common, method="draft", temperature=t) for t in options.temperature]
        found = [row for recipe in recipes for row in token_accuracy(recipe, kinds, pool, options.prompts)]
        found.sort(key=lambda row: list(METHODS).index(row["method"]))
        publish(options, "preflight_tokens", TOKEN_COLUMNS, found)
        return
    publish(options, "preflight_accuracy", COLUMNS, [*held_out_records(pool, options.kind)])


OPTIONS = {
    "gamma": 3,
    "temperature": [0.0, 1.0],
    "kind": {"nargs": "+", "default": [], "help": "classes of prompts (default: all)"},
    "max_tokens": 64,
    "prompts": {"type": int, "default": 6, "metavar": "N", "help": "prompts per class, with --tokens-per-pass"},
    "tokens_per_pass": {"action": "store_true", "help": "compare tokens per pass of all methods, without timing"},
    "record_texts": {"action": "store_true", "help": "replace the recorded texts of the target"},
}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS, models=True))

if __name__ == "__main__":
    sys.exit(main())
