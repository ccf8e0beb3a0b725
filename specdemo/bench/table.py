"""From runs to a table: medians over prompts, intervals, and whether the theory accounts for what was measured.

A speed-up is a ratio of two runs on one prompt; what is quoted is the median over prompts with a bootstrap interval.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdemo.bench.baselines import BASELINES
from specdemo.bench.measure import recipe_label
from specdemo.core.intervals import interval
from specdemo.core.theory import speedup, walltime_improvement
from specdemo.recipe import Recipe


@dataclass(frozen=True)
class Row:
    """One lane on one class of prompts; medians over prompts, intervals of 95 %. None where it cannot be known."""

    kind: str
    lane: str
    prompts: int
    tokens_per_second: float
    speedup: float | None  # over our own plain decoding
    interval: tuple[float, float] | None
    over_fixed: tuple[float, float, float] | None  # a policy over the best fixed gamma: paired ratio and its interval
    slower: tuple[str, ...]  # prompts on which it lost to that
    same_text: int | None  # prompts on which its greedy text is that of plain decoding
    acceptance_rate: float | None  # accepted / drafted
    alpha: float | None  # mean sum min(p, q)
    tokens_per_pass: float | None
    c: float | None  # a drafted token's time over a plain pass
    v: float | None  # a verifying pass's time over a plain pass
    o: float | None  # everything else in a round, over a plain pass
    theory: float | None  # Theorem 3.8 with this alpha and c
    realised: float | None  # measured / Theorem 3.8
    explained: float | None  # measured / cost model; far from 1, a cost is unaccounted for
    ttft_s: float
    held_bytes: float | None  # weights, keys and values
    bandwidth: float | None  # bytes of weights read per second over the machine's copy bandwidth


def table(
    recipes: Sequence[Recipe], records: Iterable[dict[str, Any]], peers: Sequence[str] = (), bandwidth: float = 0.0
) -> list[Row]:
    """A row per class and lane, in the order of `measure`. Comparisons are with the plain recipe of that temperature.

    Of a family of peers only the fastest setting is kept: the one with the best median speed.
    """
    records = list(records)
    plain = {recipe.temperature: i for i, recipe in enumerate(recipes) if recipe.method == "ar"}
    rows = []
    for kind in dict.fromkeys(record["kind"] for record in records):
        some = [record for record in records if record["kind"] == kind]
        for i, recipe in enumerate(recipes):
            base = plain.get(recipe.temperature)
            row = _row(kind, recipe_label(recipe), some, i, base, recipe, bandwidth)
            rows.append(replace(row, over_fixed=_over_fixed(recipes, i, some)))
        first = len(recipes)
        for temperature, base in plain.items():
            best: dict[str, Row] = {}
            for i, peer in enumerate(peers, first):
                name = f"transformers {peer} T={temperature:g}"
                row = _row(kind, name, some, i, base, None, bandwidth)
                family = BASELINES[peer].family
                if family not in best or row.tokens_per_second > best[family].tokens_per_second:
                    best[family] = row
            rows += best.values()
            first += len(peers)
    return rows


def _row(
    kind: str,
    name: str,
    records: list[dict[str, Any]],
    i: int,
    base: int | None,
    recipe: Recipe | None,
    bandwidth: float,
) -> Row:
    runs = [record["runs"][i] for record in records]
    pairs = [
        (run, record["runs"][base], record["name"])
        for run, record in zip(runs, records, strict=True)
        if base is not None
    ]
    timed = [pair for pair in pairs if pair[0]["wall_s"] and pair[1]["wall_s"] and pair[0]["tokens_per_second"]]
    ratios = [(_speed(run) / _speed(plain), prompt) for run, plain, prompt in timed]
    compared = base not in (i, None)
    costs = [
        _costs(run, plain, recipe) for run, plain, _ in timed if recipe and run["steps"] > 1 and plain["steps"] > 1
    ]

    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def cost(name: str) -> float | None:
        return middle(one[name] for one in costs)

    return Row(
        kind=kind,
        lane=name,
        prompts=len(records),
        tokens_per_second=middle(_speed(run) for run in runs if run["tokens_per_second"]) or 0.0,
        speedup=middle(ratio for ratio, _ in ratios) if compared else None,
        interval=interval([ratio for ratio, _ in ratios]) if compared and ratios else None,
        over_fixed=None,
        slower=tuple(f"{name} ({ratio:.2f}x)" for ratio, name in sorted(ratios) if ratio < 1) if compared else (),
        same_text=sum(run["text"] == plain["text"] for run, plain, _ in pairs)
        if compared and name.endswith(" T=0")
        else None,
        acceptance_rate=middle(run.get("acceptance_rate") for run in runs),
        alpha=middle(run.get("mean_beta") for run in runs),
        tokens_per_pass=middle(run["tokens_per_target_pass"] for run in runs),
        c=cost("c"),
        v=cost("v") if compared else None,
        o=cost("o"),
        theory=cost("theory"),
        realised=cost("realised"),
        explained=cost("explained") if compared else None,
        ttft_s=middle(run["ttft_s"] for run in runs) or 0.0,
        held_bytes=middle(run.get("held_bytes") for run in runs),
        bandwidth=middle(run["bytes_read"] / run["wall_s"] / bandwidth for run, _, _ in timed if "bytes_read" in run)
        if bandwidth
        else None,
    )


def _over_fixed(recipes: Sequence[Recipe], i: int, records: list[dict[str, Any]]) -> tuple[float, float, float] | None:
    """A policy's speed over that of the best fixed gamma with the same method: paired median, and its interval.

    For each prompt that gamma is the one with the best median speed on all other prompts: chosen by the very runs that
    it is then compared with, the luckiest would win.
    """
    if recipes[i].method == "ar" or recipes[i].policy == "fixed":
        return None

    def alike(recipe: Recipe) -> Recipe:
        return replace(recipe, policy="fixed", gamma=1, gamma_min=None, gamma_max=None)

    fixed = [j for j, one in enumerate(recipes) if one.policy == "fixed" and alike(one) == alike(recipes[i])]
    if not fixed:
        return None
    timed = [record for record in records if all(record["runs"][j]["wall_s"] for j in (i, *fixed))]

    def median_speed(j: int, some: Sequence[dict[str, Any]]) -> float:
        return statistics.median(_speed(record["runs"][j]) for record in some)

    ratios = []
    for name in dict.fromkeys(record["name"] for record in timed):
        others = [record for record in timed if record["name"] != name] or timed
        best = max(fixed, key=lambda j, others=others: median_speed(j, others))
        ratios += [
            _speed(record["runs"][i]) / _speed(record["runs"][best]) for record in timed if record["name"] == name
        ]
    return (statistics.median(ratios), *interval(ratios)) if ratios else None


def _speed(run: dict[str, Any]) -> float:
    """Tokens per second on the wall, after those of the first pass."""
    if "decode_tokens" in run:
        return run["decode_tokens"] / run["wall_s"]
    return run["tokens_per_second"]


def _costs(run: dict[str, Any], plain: dict[str, Any], recipe: Recipe | None) -> dict[str, float | None]:
    """The cost model's terms, in plain passes, and what it and Theorem 3.8 make of them."""
    assert recipe is not None
    rounds, steps = run["steps"] - 1, plain["steps"] - 1
    unit = plain["verify_s"] / steps
    measured = _speed(run) / _speed(plain)
    c = run["draft_s"] / run["drafted"] / unit if run["drafted"] else None
    v, o = run["verify_s"] / rounds / unit, run["host_s"] / rounds / unit
    drafted = run["drafted"] / rounds
    expected = speedup(run["tokens_per_target_pass"], drafted, c or 0.0, v, o) * (1 + plain["host_s"] / steps / unit)
    theory = None
    if run["drafted"] and run["mean_beta"] is not None and c is not None:
        theory = walltime_improvement(run["mean_beta"], recipe.gamma if recipe.policy == "fixed" else drafted, c)
    return {
        "c": c,
        "v": v,
        "o": o,
        "theory": theory,
        "realised": measured / theory if theory else None,
        "explained": measured / expected,
    }


COLUMNS = (
    "class", "lane", "tokens/s", "speed-up", "95 %", "over best fixed", "same text", "acc/drafted", "alpha",
    "tokens/pass", "c", "v", "o", "Thm 3.8", "realised", "explained", "first ms", "MB", "bandwidth", "slower on",
)  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """The table, readable as it is and as Markdown."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    cells = [
        (
            row.kind,
            row.lane,
            number(row.tokens_per_second, 1),
            number(row.speedup),
            "-" if row.interval is None else f"{row.interval[0]:.2f}-{row.interval[1]:.2f}",
            "-" if row.over_fixed is None else "{:.2f} [{:.2f}, {:.2f}]".format(*row.over_fixed),
            "-" if row.same_text is None else f"{row.same_text} of {row.prompts}",
            number(row.acceptance_rate),
            number(row.alpha),
            number(row.tokens_per_pass),
            number(row.c),
            number(row.v),
            number(row.o),
            number(row.theory),
            number(row.realised),
            number(row.explained),
            number(1000 * row.ttft_s, 0),
            "-" if row.held_bytes is None else number(row.held_bytes / 1e6, 0),
            "-" if row.bandwidth is None else f"{row.bandwidth:.0%}",
            "-" if row.speedup is None else f"{len(row.slower)} of {row.prompts}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (COLUMNS, *cells)
    ]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def as_json(rows: Sequence[Row]) -> str:
    """All rows in one line."""
    return json.dumps({"bench": [asdict(row) for row in rows]})
