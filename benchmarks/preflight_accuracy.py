"""Estimates of preflight against measurements: tables `preflight_accuracy`, `preflight_tokens` in docs/preflight.md.

`python -m benchmarks.preflight_accuracy --write` compares speed-ups of draft lengths and prompts that were held out,
with `--tokens-per-pass` tokens per pass of all methods.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.tables import Study, publish, study_command
from specdemo.cli.arguments import given
from specdemo.core.metrics import Metrics, ratio_interval
from specdemo.core.simulate import draft_chances, recorded_steps
from specdemo.core.theory import acceptance_along_text
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR
from specdemo.preflight import (
    MAX_GAMMA,
    DecodedRun,
    HeldOut,
    compare_held_out,
    decoded_runs,
    fixed_length,
    halves,
    has_lengths,
    prediction_of_runs,
)
from specdemo.prompts import Prompt, alternate_classes, load_prompts
from specdemo.recipe import METHODS, Recipe

TABLES = {"preflight_accuracy": "docs/preflight.md", "preflight_tokens": "docs/preflight.md"}
GAMMAS = (1, 2, 3, 5, 7)
TEXTS = 20  # prompts of each class, of which half are held out
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


def held_out_rows(recipe: Recipe, kind: str, pool: ModelPool) -> Iterator[HeldOut]:
    """Yield each draft length, predicted from runs of other prompts with the draft length of `recipe`."""
    known, others = halves(load_prompts([kind])[:TEXTS])
    prediction = prediction_of_runs(recipe, [*decoded_runs(recipe, known, pool, seconds=math.inf)])
    for gamma in GAMMAS:
        measured = [*decoded_runs(fixed_length(recipe, gamma), others, pool)]
        held_out = compare_held_out(f"gamma {gamma}", prediction.estimates[gamma - 1], measured)
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
    recipe = Recipe(method="draft", gamma=MAX_GAMMA, temperature=0.0, max_tokens=64)
    for drafting in (
        replace(recipe, pair="bundled", max_tokens=136),
        replace(recipe, pair=CHAT_PAIR, chat=True, method="eagle"),
    ):
        for kind in dict.fromkeys(prompt.kind for prompt in load_prompts(chat=drafting.chat)):
            if not kinds or kind in kinds:
                yield held_out_record(str(drafting.pair), kind, [*held_out_rows(drafting, kind, pool)])


def token_accuracy(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[dict[str, Any]]:
    """Yield estimated and measured tokens per pass of all methods with the sampling parameters of `recipe`.

    Estimates and runs use halves of `prompts`; estimates of chains use the longest drafts.
    """
    known, others = halves(prompts)
    usable = {None, "model", *(("head",) if recipe.head else ())}
    for method in (name for name, entry in METHODS.items() if entry.predictable and entry.drafter in usable):
        drafting = replace(recipe, method=method)
        runs = [*decoded_runs(fixed_length(drafting, MAX_GAMMA), known, pool, len(known), math.inf)]
        if has_lengths(drafting):
            texts = [draft_chances(recorded_steps(run.steps), MAX_GAMMA) for run in runs]
            expected = [acceptance_along_text(chances)(recipe.gamma) for chances in texts]
            estimated = [(steps.tokens, steps.count) for steps in expected]
        else:
            estimated = _tokens_and_passes(runs)
        measured = _tokens_and_passes([*decoded_runs(drafting, others, pool, len(others), math.inf)])
        totals = [[sum(column) for column in zip(*pairs, strict=True)] for pairs in (estimated, measured)]
        predicted_mean, measured_mean = (tokens / passes for tokens, passes in totals)
        yield {
            "method": method,
            "temperature": recipe.temperature,
            "predicted": predicted_mean,
            "measured": measured_mean,
            "ratio": predicted_mean / measured_mean,
            "predicted_interval": ratio_interval(estimated),
            "measured_interval": ratio_interval(measured),
        }


def _tokens_and_passes(runs: Sequence[DecodedRun]) -> list[tuple[float, float]]:
    return [(metrics.decode_tokens, metrics.target_passes) for metrics in (Metrics.of(run.steps) for run in runs)]


def study(options: argparse.Namespace) -> None:
    common = {name: value for name, value in given(options).items() if name != "temperature"}
    common["top_p"] = 1.0
    pool = ModelPool()
    if options.tokens_per_pass:
        prompts = alternate_classes(load_prompts(options.kind), 2 * options.prompts)
        recipes = [Recipe(**common, method="draft", temperature=t) for t in options.temperature]
        found = [row for recipe in recipes for row in token_accuracy(recipe, prompts, pool)]
        found.sort(key=lambda row: list(METHODS).index(row["method"]))
        publish(options, "preflight_tokens", TOKEN_COLUMNS, found)
        return
    publish(options, "preflight_accuracy", COLUMNS, [*held_out_records(pool, options.kind)])


OPTIONS = {
    "gamma": 3,
    "temperature": [0.0, 1.0],
    "kind": {"nargs": "+", "default": [], "help": "classes of prompts (default: all)"},
    "max_tokens": 64,
    "prompts": {"type": int, "default": 6, "metavar": "N", "help": "held-out prompts per class"},
    "tokens_per_pass": {"action": "store_true", "help": "compare tokens per pass of all methods, without timing"},
}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS, models=True))

if __name__ == "__main__":
    sys.exit(main())
