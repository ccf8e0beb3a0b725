"""A bench in a file: what was run, on what, the table, and where it lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdemo.bench.table import Row, markdown
from specdemo.recipe import Recipe

METHOD = (
    "Every recipe continues every prompt, one right after the other in a shuffled order, after each has run once to "
    "warm up. A speed-up is the speed over that of plain decoding on the same prompt, the prefill apart; quoted is the "
    "median over the prompts of a class, with a bootstrap interval of 95 %."
)


def slower(rows: Sequence[Row]) -> list[str]:
    """A line for every lane that lost somewhere: on which prompts, and by how much."""
    return [f"slower than plain: {row.lane} on {', '.join(row.slower)}" for row in rows if row.slower]


def disturbed(records: Sequence[dict[str, Any]], share: float = 0.05) -> int:
    """How many runs stood still for more than this share of their time, while the device did something else."""
    runs = [run for record in records for run in record["runs"]]
    return sum(run.get("paused_s", 0.0) > share * run["wall_s"] for run in runs)


def report(recipes: Sequence[Recipe], prompts: int, records: Sequence[dict[str, Any]], rows: Sequence[Row]) -> str:
    """The whole bench as Markdown; `records` may be fewer than `prompts`, of which there is at least one."""
    first, where = recipes[0], records[0]["runs"][0]["environment"]
    models = f"target {first.target}, drafter {first.drafter}" if first.target else f"pair {first.pair or 'bundled'}"
    drafter = next((recipe.drafter_quantization for recipe in recipes if recipe.drafter_spec), "none")
    lines = [
        "# Speculative against plain decoding",
        "",
        f"- Models: {models}; quantisation of the target {first.quantization}, of the drafter {drafter}",
        f"- Machine: {where['processor']}; {where['device']}, {where['dtype']}, threads: {where['threads']}",
        f"- Software: engine {where['engine']}, Python {where['python']}, torch {where['torch']}, "
        f"transformers {where['transformers']}",
        f"- Runs: {len(recipes)} recipes on {len(records)} prompts, at most {first.max_tokens} tokens each, "
        f"seed {first.seed}",
    ]
    if len(records) < prompts:
        lines.append(f"- **Partial**: stopped after {len(records)} of {prompts} prompts")
    if count := disturbed(records):
        lines.append(f"- **Disturbed**: other runs took turns with {count} of these")
    lines += ["", markdown(rows), "", *(f"- {line}" for line in slower(rows)), "", METHOD, ""]
    return "\n".join(lines)
