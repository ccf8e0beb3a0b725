"""Drafters of the chat model: table `drafters` in docs/heads.md.

`python -m benchmarks.chat_model --write`. All lanes decode the last prompts of each class, which chose no settings. An
answer loops if it repeats a block of at most 64 tokens three times.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from benchmarks.document_tables import Record, measured, of_each_class, pooled
from benchmarks.tables import Study, publish, study_command
from specdemo.bench import table
from specdemo.core.formats import number
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from training.head.conversations import loop_start
from training.head.eagle3 import trained_tokens

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


def has_loop(run: Mapping[str, Any]) -> bool:
    tokens = np.array(run["text"])
    return loop_start(tokens) < len(tokens)


def compared(recipes: Sequence[Recipe], records: Sequence[Record]) -> table.BenchRow | None:
    """Return the figures of the second recipe relative to the first, if there are records."""
    return table.table(recipes, pooled(records))[1] if records else None


def figures(recipes: Sequence[Recipe], records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of AR decoding and a drafter for all answers, and for those without loops."""
    row = compared(recipes, records)
    without = compared(recipes, [record for record in records if not any(map(has_loop, record["runs"]))])
    assert row is not None
    shares = {position: number(count.share) for position, count in row.acceptance.position.items()}
    return {
        "c": number(row.c, missing="-"),
        "accepted": [shares.get(position, "-") for position in range(1, POSITIONS + 1)],
        "per_pass": number(row.tokens_per_pass),
        "speedup": table.ratio_with_interval(row.speedup, row.interval),
        "per_pass_without": number(without and without.tokens_per_pass),
        "speedup_without": table.ratio_with_interval(without and without.speedup, without and without.interval),
    }


def drafters(options: argparse.Namespace) -> None:
    prompts = of_each_class(load_prompts(chat=True), slice(-options.prompts, None))
    rows: list[dict[str, Any]] = []
    for temperature in options.temperature:
        top_p = PAIRS[CHAT_PAIR].settings["top_p"] if temperature < 1 else 1.0
        common = {"chat": True, "gamma": GAMMA, "top_p": top_p, "temperature": temperature}
        base = replace(Recipe(pair=CHAT_PAIR, method="ar", device="cpu"), max_tokens=options.max_tokens, **common)
        recipes = {lane: replace(base, **values) for lane, values in with_heads(options.head).items()}
        records = measured(list(recipes.values()), prompts)
        for i, (lane, recipe) in enumerate(recipes.items()):
            if lane != "AR":
                pairs = [{**record, "runs": [record["runs"][0], record["runs"][i]]} for record in records]
                row = {"lane": lane, "temperature": temperature, **head_sizes(recipe)}
                rows.append(row | figures([base, recipe], pairs))
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
