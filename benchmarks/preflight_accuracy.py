"""Speed-ups estimated by preflight and measured afterwards: table `preflight_accuracy` in docs/preflight.md.

`python -m benchmarks.preflight_accuracy --prompts 40 --write`. The recorded texts of the bundled
target, read by preflight, share no prompt with the measured runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.runs import traced
from benchmarks.tables import publish, run_study, study_parser
from specdemo import bench
from specdemo.bench.equality import prompt_prefixes
from specdemo.cli.arguments import given
from specdemo.cli.commands import at_least_one
from specdemo.models.model_pool import ModelPool
from specdemo.preflight import Estimate, Preflight, preflight, texts_for
from specdemo.prompts import CONTINUATION_FILE, RECORDED_TEMPERATURES, load_prompts
from specdemo.recipe import Recipe

TABLES = {"preflight_accuracy": "docs/preflight.md"}
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
            "lane": bench.recipe_label(self.recipe),
            "ratio": self.estimate.speedup / self.measured,
            "estimated_cost": self.estimate.tokens_per_pass / self.estimate.speedup,
            "measured_cost": self.measured_tokens_per_pass / self.measured,
        }


def compare(
    estimates: dict[tuple[str, Recipe], Preflight], recipes: Sequence[Recipe], records: Iterable[dict[str, Any]]
) -> list[Comparison]:
    """Compare preflight results with records of `bench.measure` for AR decoding followed by `recipes`."""
    rows = bench.table([replace(recipes[0], method="ar"), *recipes], records)
    comparisons = []
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind][1:]
        for recipe, row in zip(recipes, of_kind, strict=True):
            if row.speedup is None or row.interval is None:
                continue  # every text ended with its first token
            estimate = next(e for e in estimates[kind, recipe].estimates if e.gamma == recipe.gamma)
            figures = (row.prompts, row.tokens_per_pass or 1.0, row.speedup, row.interval)
            comparisons.append(Comparison(kind, recipe, estimate, *figures))
    return comparisons


def record_texts(recipe: Recipe, pool: ModelPool, path: Path = CONTINUATION_FILE) -> None:
    """Replace the continuations in `path` by texts of the recipe's target."""
    classes: dict[str, list[dict[str, Any]]] = json.loads(path.read_text("utf-8"))
    for entries in classes.values():
        for seed, entry in enumerate(entries):
            for temperature in RECORDED_TEMPERATURES:
                ar = replace(recipe, temperature=temperature, top_p=1.0, seed=seed, max_tokens=CONTINUATION_TOKENS)
                entry[f"{temperature:g}"] = "".join(step["text"] for step in traced(ar, entry["prompt"], pool).steps)
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
    prompts = load_prompts(kinds=options.kind)
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    if options.prompts is not None:
        at_least_one("prompts", options.prompts)
        prompts = [prompt for kind in kinds for prompt in prompt_prefixes(load_prompts(kinds=[kind]), options.prompts)]
    comparisons = []
    for temperature in options.temperature:
        recipes = [Recipe(**common, method=method, temperature=temperature) for method in options.method]
        estimates = {(k, r): preflight(r, texts_for(r, [k]), pool) for k in kinds for r in recipes}
        items = bench.measure([replace(recipes[0], method="ar"), *recipes], prompts, pool, repeat=options.repeat)
        comparisons += compare(estimates, recipes, [item for item in items if isinstance(item, dict)])
    publish(options, "preflight_accuracy", COLUMNS, [comparison.record() for comparison in comparisons])
    target = recipes[0].models[0]
    itself = Recipe(**{**common, "pair": None, "target": target, "drafter": target}, temperature=options.temperature[0])
    print(f"the target as drafter: {preflight(itself, texts_for(itself, kinds[:1]), pool).advice}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES, models=True)
    methods = "draft, self, nasd, suffix, lookup"
    parser.add_argument("--method", nargs="+", default=["draft", "nasd", "self"], help=methods)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="runs per prompt, with different seeds")
    prompts = "measured prompts per class: bundled prompts, then their prefixes (default: bundled prompts)"
    parser.add_argument("--prompts", type=int, metavar="N", help=prompts)
    parser.add_argument("--record-texts", action="store_true", help="replace the recorded texts of the target")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
