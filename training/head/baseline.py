"""Tokens per pass of the chat pair on prompts of a file: table `head-baseline` in docs/heads.md.

`python -m training.head.baseline --prompts mt-bench.jsonl spec-bench.jsonl --results FILE --write`: lines of JSON with
`set`, `category`, `id` and `text`; greedy answers of 128 tokens. Results are appended to `--results` per prompt, so
that an interrupted command goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.runs import possibly_failed
from benchmarks.tables import Study, publish, study_command
from specdemo.cli.arguments import with_pair_settings
from specdemo.core.metrics import ratio_interval
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

TABLES = {"head-baseline": "docs/heads.md"}
GREEDY = {"temperature": 0.0, "max_tokens": 128}
LANES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "head": {"method": "eagle", "policy": "fixed", "gamma": 4},
}
COLUMNS = {
    "prompts": "{set}",
    "category": "{category}",
    "number": "{number}",
    "default: tokens/pass": "{default}",
    "accepted at 1": "{default_first:.2f}",
    "head alone, gamma 4: tokens/pass": "{head}",
    "head alone: accepted at 1": "{head_first:.2f}",
}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the results of all prompts and lanes, those in the file and further ones."""
    results = [json.loads(line) for line in options.results.open()] if options.results.exists() else []
    done, pool = {(row["set"], row["id"], row["lane"]) for row in results}, ModelPool()
    prompts = [json.loads(line) for path in options.prompts for line in path.read_text("utf-8").split("\n") if line]
    with options.results.open("a", encoding="utf-8") as file:
        for lane, values in LANES.items():
            recipe = replace(Recipe(), **with_pair_settings({**GREEDY, **values}))
            for prompt in prompts:
                key = {name: prompt[name] for name in ("set", "category", "id")} | {"lane": lane}
                if (key["set"], key["id"], lane) not in done:
                    metrics = possibly_failed(recipe, prompt["text"], pool).metrics
                    results.append(key | figures(metrics))
                    file.write(json.dumps(results[-1]) + "\n")
                    file.flush()
    return results


def figures(metrics: Mapping[str, Any]) -> dict[str, int]:
    """Return tokens after the prompt's pass, passes, and accepted and tested first tokens of drafts."""
    passes = metrics["target_passes"]
    first = {name: (metrics[f"{name}_by_position"] or [0])[0] for name in ("accepted", "tested")}
    return {"tokens": round((metrics["tokens_per_target_pass"] or 0) * passes), "passes": passes, **first}


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """Return tokens per pass with the interval over prompts, and acceptance of the first draft token."""
    pairs = [(row["tokens"], row["passes"]) for row in rows]
    low, high = ratio_interval(pairs)
    tokens, passes = map(sum, zip(*pairs, strict=True))
    tested = sum(row["tested"] for row in rows)
    return f"{tokens / passes:.2f} [{low:.2f}, {high:.2f}]", sum(row["accepted"] for row in rows) / tested


def study(options: argparse.Namespace) -> None:
    results, records = measure(options), []
    categories = sorted({(row["set"], name) for row in results for name in ("", row["category"])})
    for name, category in categories:
        record: dict[str, Any] = {"set": name, "category": category or "all"}
        for lane in LANES:
            rows = [row for row in results if row["set"] == name and row["lane"] == lane]
            rows = [row for row in rows if category in ("", row["category"])]
            record["number"] = len(rows)
            record[lane], record[f"{lane}_first"] = summary(rows)
        records.append(record)
    publish(options, "head-baseline", COLUMNS, records)


OPTIONS = {"prompts": {"type": Path, "nargs": "+", "required": True}, "results": {"type": Path, "required": True}}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
