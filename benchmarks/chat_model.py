"""Drafters of the chat model: table `drafters` in docs/heads.md.

`python -m benchmarks.chat_model --write`. All lanes alternate on the last prompts of each class, which chose no
settings; `c` is the time of a draft token relative to an AR step, and an answer loops if it repeats a block of at most
64 tokens three times.
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
from benchmarks.tables import Study, publish, study_command
from specdemo.core.metrics import interval
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.recipe import Recipe
from training.head.checkpoint import trained_tokens
from training.head.conversations import loop_start

TABLES = {"drafters": "docs/heads.md"}
POSITIONS = GAMMA = 4
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
KINDS = {"LlamaForCausalLMEagle3": "eagle", "DFlashDraftModel": "block", "Qwen3DSparkModel": "block"}
DRAFTER_COLUMNS = {
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
        architectures = json.loads((Path(folder) / "config.json").read_text("utf-8")).get("architectures") or [""]
        kind = KINDS.get(architectures[0], "medusa")
        lanes[f"head ({kind}), path"] = {"method": kind, "head": folder, "policy": "path"}
    return lanes


def head_sizes(recipe: Recipe) -> dict[str, str]:
    """Return the millions of parameters in the head's file, and of the tokens that it has seen, if known."""
    if recipe.head_name is None:
        return {"parameters": "", "trained": ""}
    folder = Path(recipe.head_name)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name not in ("d2t", "t2d")]
        count = sum(prod(file.get_slice(name).get_shape()) for name in names)
    tokens = trained_tokens(folder)
    return {"parameters": f"{count / 1e6:.1f}", "trained": f"{tokens / 1e6:.1f}" if tokens else ""}


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


def table_row(runs: Sequence[Run], baseline: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of a drafter, compared with AR decoding."""
    step_s = statistics.median(run.metrics["verify_s"] / run.metrics["target_passes"] for run in baseline)
    drafted = sum(run.metrics["drafted"] for run in runs)
    pairs = list(zip(runs, baseline, strict=True))
    without = [(run, ar) for run, ar in pairs if not run.loops and not ar.loops]
    return {
        "c": number(sum(run.metrics["draft_s"] for run in runs) / drafted / step_s),
        "accepted": [number(share) for share in acceptance(runs)],
        "per_pass": per_pass(runs),
        "speedup": speedup(pairs),
        "per_pass_without": per_pass([run for run in runs if not run.loops]),
        "speedup_without": speedup(without),
    }


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


def drafters(options: argparse.Namespace) -> None:
    """Compare acceptance and speed of drafters for the chat model."""
    prompts = [prompt.text for prompt in last_of_each_class(options.prompts)]
    rows: list[dict[str, Any]] = []
    for temperature in options.temperature:
        top_p = PAIRS[CHAT_PAIR].settings["top_p"] if temperature < 1 else 1.0
        common = {"chat": True, "gamma": GAMMA, "top_p": top_p, "temperature": temperature}
        base = replace(Recipe(pair=CHAT_PAIR, method="ar", device="cpu"), max_tokens=options.max_tokens, **common)
        recipes = {lane: replace(base, **values) for lane, values in with_heads(options.head).items()}
        runs = measured(recipes, prompts)
        for lane, found in runs.items():
            if lane != "AR":
                row = {"lane": lane, "temperature": temperature, **head_sizes(recipes[lane])}
                rows.append(row | table_row(found, runs["AR"]))
    publish(options, "drafters", DRAFTER_COLUMNS, rows)


OPTIONS = {
    "prompts": 5,
    "max_tokens": 128,
    "head": {"action": "append", "default": [], "help": "directory of a further head; repeatable"},
    "temperature": [0.0, 0.2],
}
main = study_command(__file__, __doc__, TABLES, Study(drafters, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
