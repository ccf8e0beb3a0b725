"""Drafters for the chat model: table `drafters`.

`python -m benchmarks.chat_drafters --write`. All lanes alternate on the last prompts of each class, which chose no
settings. `c` is the time of a draft token relative to an AR step; `parameters` are those of the head's file, in
millions. An answer loops if it repeats a block of at most 64 tokens three times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from benchmarks.document_tables import last_of_each_class, number, ratio
from benchmarks.runs import traced
from benchmarks.tables import publish, run_study, study_parser
from specdemo.cli.arguments import at_least_one
from specdemo.core.metrics import interval
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.recipe import Recipe
from training.head.checkpoint import trained_tokens
from training.head.conversations import loop_start

TABLES = {"drafters": "docs/heads.md"}
POSITIONS = 4
GAMMA = 4
LANES: Mapping[str, Mapping[str, Any]] = {
    "AR": {"method": "ar"},
    "n-grams (nasd)": {"method": "nasd"},
    "lookup": {"method": "lookup"},
    "suffix": {"method": "suffix"},
    "head (eagle)": {"method": "eagle"},
    "head, path": {"method": "eagle", "policy": "path"},
    "suffix or head (hybrid)": {"method": "hybrid"},
    "suffix or head, path: the default": {"method": "hybrid", "policy": "path"},
}
COLUMNS = {
    "drafter": "{lane}",
    "parameters, M": "{parameters}",
    "training tokens, M": "{trained}",
    "temperature": "{temperature:g}",
    "c": "{c}",
    **{f"accepted at {i}": f"{{accepted[{i - 1}]}}" for i in range(1, POSITIONS + 1)},
    "tokens/pass": "{per_pass}",
    "speed-up": "{speedup}",
    "tokens/pass without loops": "{per_pass_without}",
    "speed-up without loops": "{speedup_without}",
}


@dataclass(frozen=True)
class Run:
    """Figures of a run, and whether its answer loops."""

    metrics: Mapping[str, Any]
    loops: bool


def with_heads(folders: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the lanes with further heads for the target, each with its own method."""
    lanes = dict(LANES)
    for folder in folders:
        architecture = json.loads((Path(folder) / "config.json").read_text("utf-8")).get("architectures")
        kind = {"BlockHead": "block", "LlamaForCausalLMEagle3": "eagle"}.get((architecture or [""])[0], "medusa")
        lanes[f"head ({kind}), path"] = {"method": kind, "head": folder, "policy": "path"}
    return lanes


def parameters(recipe: Recipe) -> str:
    """Return the millions of parameters in the head's file."""
    if recipe.head_spec is None:
        return ""
    with safe_open(Path(recipe.head_spec.name) / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name not in ("d2t", "t2d")]
        return f"{sum(prod(file.get_slice(name).get_shape()) for name in names) / 1e6:.1f}"


def trained(recipe: Recipe) -> str:
    """Return the millions of tokens that the head has seen, if known."""
    tokens = trained_tokens(Path(recipe.head_spec.name)) if recipe.head_spec else 0
    return f"{tokens / 1e6:.1f}" if tokens else ""


def measured(recipes: Mapping[str, Recipe], prompts: Sequence[str]) -> dict[str, list[Run]]:
    """Run all recipes in turn on each prompt, after a warm-up."""
    runs: dict[str, list[Run]] = {lane: [] for lane in recipes}
    pool = ModelPool()
    for prompt in (prompts[0], *prompts):
        for lane, recipe in recipes.items():
            trace = traced(recipe, prompt, pool)
            tokens = np.array(trace.tokens)
            runs[lane].append(Run(trace.metrics, loop_start(tokens) < len(tokens)))
    return {lane: found[1:] for lane, found in runs.items()}


def table_rows(
    runs: Mapping[str, Sequence[Run]], recipes: Mapping[str, Recipe], temperature: float
) -> list[dict[str, Any]]:
    """Return a row per drafter, compared with AR decoding."""
    baseline = runs["AR"]
    step_s = statistics.median(run.metrics["verify_s"] / run.metrics["target_passes"] for run in baseline)
    rows = []
    for lane, found in runs.items():
        if lane == "AR":
            continue
        pairs = list(zip(found, baseline, strict=True))
        drafted = sum(run.metrics["drafted"] for run in found)
        rows.append(
            {
                "lane": lane,
                "parameters": parameters(recipes[lane]),
                "trained": trained(recipes[lane]),
                "temperature": temperature,
                "c": number(sum(run.metrics["draft_s"] for run in found) / drafted / step_s),
                "accepted": [number(share) for share in acceptance(found)],
                "per_pass": per_pass(found),
                "speedup": speedup(pairs),
                "per_pass_without": per_pass([run for run in found if not run.loops]),
                "speedup_without": speedup([pair for pair in pairs if not pair[0].loops and not pair[1].loops]),
            }
        )
    return rows


def acceptance(runs: Sequence[Run]) -> list[float | None]:
    """Return the share of accepted tokens at each position among the tested ones."""
    counts = []
    for name in ("accepted_by_position", "tested_by_position"):
        padded = [(list(run.metrics[name]) + [0] * POSITIONS)[:POSITIONS] for run in runs]
        counts.append([sum(column) for column in zip(*padded, strict=True)])
    return [accepted / tested if tested else None for accepted, tested in zip(*counts, strict=True)]


def per_pass(runs: Sequence[Run]) -> str:
    """Return tokens per target pass over all runs."""
    passes = sum(run.metrics["target_passes"] for run in runs)
    tokens = sum(run.metrics["tokens_per_target_pass"] * run.metrics["target_passes"] for run in runs if passes)
    return number(tokens / passes if passes else None)


def speedup(pairs: Sequence[tuple[Run, Run]]) -> str:
    """Return the median of paired speeds with its interval."""
    ratios = [run.metrics["tokens_per_second"] / ar.metrics["tokens_per_second"] for run, ar in pairs]
    return ratio(statistics.median(ratios), interval(ratios)) if ratios else "-"


def study(options: argparse.Namespace) -> None:
    """Measure and publish the table."""
    for name in ("prompts", "max_tokens"):
        at_least_one(name, getattr(options, name))
    prompts = [prompt.text for prompt in last_of_each_class(options.prompts)]
    top_p = PAIRS[CHAT_PAIR].settings["top_p"]
    rows: list[dict[str, Any]] = []
    for temperature in options.temperature:
        common = {"chat": True, "gamma": GAMMA, "temperature": temperature, "max_tokens": options.max_tokens}
        common["top_p"] = top_p if temperature < 1 else 1.0
        base = Recipe(pair=CHAT_PAIR, method="ar", device="cpu")
        recipes = {lane: replace(base, **common, **values) for lane, values in with_heads(options.head).items()}
        rows += table_rows(measured(recipes, prompts), recipes, temperature)
    publish(options, "drafters", COLUMNS, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(str(Path(__file__)), __doc__, TABLES)
    parser.add_argument("--prompts", type=int, default=5, help="prompts of each class")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--head", action="append", default=[], help="directory of a further head; repeatable")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.2])
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
