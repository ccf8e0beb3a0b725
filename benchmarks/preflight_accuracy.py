"""Estimates of preflight against measurements: tables `preflight_accuracy`, `preflight_tokens` in docs/preflight.md.

`python -m benchmarks.preflight_accuracy --prompts 40 --write` compares speed-ups, with `--tokens-per-pass` tokens per
pass of all methods. The texts read by preflight share no prompt with the measured runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.runs import traced
from benchmarks.tables import Study, publish, study_command
from specdemo.bench import measure
from specdemo.bench.equality import prompt_prefixes
from specdemo.cli.arguments import at_least_one, given
from specdemo.core.estimate import acceptance_along_text
from specdemo.core.metrics import Metrics, ratio_interval
from specdemo.models.model_pool import ModelPool
from specdemo.preflight import (
    Estimate,
    Preflight,
    decoded_runs,
    is_replayed,
    load_comparable,
    preflight,
    replay,
    texts_for,
    usable_texts,
)
from specdemo.prompts import CONTINUATION_FILE, RECORDED_TEMPERATURES, load_prompts
from specdemo.recipe import METHODS, Recipe

TABLES = {"preflight_accuracy": "docs/preflight.md", "preflight_tokens": "docs/preflight.md"}
CONTINUATION_TOKENS = 136
COLUMNS = {
    "class": "{kind}",
    "recipe": "{lane}",
    "predicted": "{estimate[speedup]:.2f} [{estimate[low]:.2f}, {estimate[high]:.2f}]",
    "measured": "{measured:.2f} [{measured_interval[0]:.2f}, {measured_interval[1]:.2f}]",
    "predicted / measured": "{ratio:.2f}",
    "tokens/pass": "{estimate[tokens_per_pass]:.2f}, {measured_tokens_per_pass:.2f}",
    "step cost": "{estimated_cost:.2f}, {measured_cost:.2f}",
}
TOKEN_COLUMNS = {
    "method": "{method}",
    "T": "{temperature:g}",
    "predicted": "{predicted:.2f} [{predicted_interval[0]:.2f}, {predicted_interval[1]:.2f}]",
    "measured": "{measured:.2f} [{measured_interval[0]:.2f}, {measured_interval[1]:.2f}]",
    "predicted / measured": "{ratio:.2f}",
}


@dataclass(frozen=True)
class Comparison:
    """Estimated and measured speed-up of a recipe over AR decoding on a class of prompts."""

    kind: str
    recipe: Recipe
    estimate: Estimate
    prompts: int
    measured_tokens_per_pass: float
    measured: float
    measured_interval: tuple[float, float]

    def record(self) -> dict[str, Any]:
        """Return all figures as JSON values; costs of a step are in AR passes."""
        return {
            **asdict(self),
            "lane": measure.recipe_label(self.recipe),
            "ratio": self.estimate.speedup / self.measured,
            "estimated_cost": self.estimate.tokens_per_pass / self.estimate.speedup,
            "measured_cost": self.measured_tokens_per_pass / self.measured,
        }


def compare(
    estimates: dict[tuple[str, Recipe], Preflight], recipes: Sequence[Recipe], records: Iterable[dict[str, Any]]
) -> list[Comparison]:
    """Compare preflight results with totals over records of `measure.measure` for AR decoding followed by `recipes`."""
    comparisons, all_records = [], list(records)
    for kind in dict.fromkeys(record["kind"] for record in all_records):
        of_kind = [record["runs"] for record in all_records if record["kind"] == kind]
        for i, recipe in enumerate(recipes, 1):
            pairs = [(runs[0], runs[i]) for runs in of_kind if runs[0]["decode_s"] and runs[i]["decode_s"]]
            if not pairs:
                continue  # every text ended with its first token
            tokens = [run["tokens"] - 1 for _, run in pairs]
            costs = [run["decode_s"] * plain["tokens_per_second"] for plain, run in pairs]  # in AR steps
            per_pass = sum(tokens) / sum(run["target_passes"] for _, run in pairs)
            estimate = next(e for e in estimates[kind, recipe].estimates if e.gamma == recipe.gamma)
            interval = ratio_interval(list(zip(tokens, costs, strict=True)))
            figures = len(pairs), per_pass, sum(tokens) / sum(costs), interval
            comparisons.append(Comparison(kind, recipe, estimate, *figures))
    return comparisons


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
    """Estimate, measure and publish the table; then print the advice for the target as drafter."""
    common = {name: value for name, value in given(options).items() if name not in ("method", "temperature")}
    common["top_p"] = 1.0
    pool = ModelPool()
    if options.record_texts:
        record_texts(Recipe(**common, method="ar"), pool)
        return
    at_least_one("repeat", options.repeat)
    if options.tokens_per_pass:
        kinds = list(dict.fromkeys(prompt.kind for prompt in load_prompts(kinds=options.kind)))
        recipes = [Recipe(**common, method="draft", temperature=t) for t in options.temperature]
        found = [row for recipe in recipes for row in token_accuracy(recipe, kinds, pool, options.prompts or 6)]
        found.sort(key=lambda row: list(METHODS).index(row["method"]))
        publish(options, "preflight_tokens", TOKEN_COLUMNS, found)
        return
    prompts = load_prompts(kinds=options.kind)
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    if options.prompts is not None:
        at_least_one("prompts", options.prompts)
        prompts = [prompt for kind in kinds for prompt in prompt_prefixes(load_prompts(kinds=[kind]), options.prompts)]
    comparisons = []
    for temperature in options.temperature:
        recipes = [Recipe(**common, method=method, temperature=temperature) for method in options.method]
        estimates = {(k, r): preflight(r, texts_for(r, [k]), pool) for k in kinds for r in recipes}
        items = measure.measure([replace(recipes[0], method="ar"), *recipes], prompts, pool, repeat=options.repeat)
        comparisons += compare(estimates, recipes, [item for item in items if isinstance(item, dict)])
    publish(options, "preflight_accuracy", COLUMNS, [comparison.record() for comparison in comparisons])
    target = recipes[0].models[0]
    itself = Recipe(**{**common, "pair": None, "target": target, "drafter": target}, temperature=options.temperature[0])
    print(f"the target as drafter: {preflight(itself, texts_for(itself, kinds[:1]), pool).advice}")


OPTIONS = {
    "method": {"nargs": "+", "default": ["draft", "nasd", "self"], "help": "draft, self, nasd, suffix, lookup"},
    "gamma": 3,
    "temperature": [0.0, 1.0],
    "kind": {"nargs": "+", "default": [], "help": "classes of prompts (default: all)"},
    "max_tokens": 64,
    "repeat": {"type": int, "default": 1, "metavar": "N", "help": "runs per prompt, with different seeds"},
    "prompts": {"type": int, "metavar": "N", "help": "prompts per class: bundled ones, then their prefixes"},
    "tokens_per_pass": {"action": "store_true", "help": "compare tokens per pass of all methods, without timing"},
    "record_texts": {"action": "store_true", "help": "replace the recorded texts of the target"},
}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS, models=True))

if __name__ == "__main__":
    sys.exit(main())
