"""Summarise benchmark records as a table, JSON line or report."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

from specdemo.bench.measure import (
    BASELINES,
    CONFIDENCES,
    TEXT_LENGTHS,
    Acceptance,
    AcceptanceCount,
    Counts,
    recipe_label,
)
from specdemo.core.formats import NOTHING, percent
from specdemo.core.formats import number as format_number
from specdemo.core.metrics import cluster_interval
from specdemo.core.rules import RULES
from specdemo.core.theory import STAGES, CostTerms, speedup, walltime_improvement
from specdemo.recipe import Recipe, plan_run

LEAST_PROMPTS = 5
MAP_LEGEND = "±: the 95 % interval includes 1"
ALL = "all"  # categories
_GAMMA = re.compile(r" gamma=(\d+)")


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


Record = dict[str, Any]  # yielded by `bench.measure`
RunFigures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """Medians of a lane over a class of prompts, with 95 % bootstrap intervals from `LEAST_PROMPTS`.

    Costs are relative to an AR target pass on the same prompt; None if not applicable.
    """

    kind: str  # class of prompts
    lane: str  # recipe or baseline
    prompts: int
    tokens_per_second: float  # decoding speed, without the prefill
    speedup: float | None  # ratio to AR decoding
    interval: tuple[float, float] | None  # bounds of the speed-up
    over_fixed: tuple[float, float | None, float | None] | None = None  # ratio to the best fixed gamma, interval
    slower: tuple[str, ...]  # prompts with a speed-up below 1
    same_text: int | None  # prompts with AR's greedy text
    acceptance_rate: float | None  # accepted / drafted
    alpha: float | None  # accepted / tested, None for rule `block`
    mean_beta: float | None  # mean overlap, sum min(p, q)
    tokens_per_pass: float | None
    c: float | None = None  # cost of a draft token
    v: float | None = None  # cost of a verification pass
    o: float | None = None  # host overhead per step
    theory: float | None = None  # Theorem 3.8 of 2211.17192
    realised: float | None = None  # measured speed-up / theory
    explained: float | None = None  # measured speed-up / cost model
    ttft_s: float
    held_bytes: float | None  # weights and KV cache
    bandwidth: float | None  # weight bytes per second / copy bandwidth
    acceptance: Acceptance


def table(
    recipes: Sequence[Recipe], records: Iterable[Record], baselines: Sequence[str] = (), bandwidth: float = 0.0
) -> list[BenchRow]:
    """Return a row per class and lane, compared with AR decoding at the same temperature.

    Includes only the fastest setting of each family of `baselines`. `bandwidth`: copied bytes per second, 0 if unknown.
    """
    records = list(records)
    ar = {recipe.temperature: i for i, recipe in enumerate(recipes) if plan_run(recipe).baseline}
    rows = []
    for kind in dict.fromkeys(record["kind"] for record in records):
        of_kind = [record for record in records if record["kind"] == kind]
        for i, recipe in enumerate(recipes):
            base = ar.get(recipe.temperature)
            row = _row(of_kind, i, base, recipe_label(recipe), recipe.temperature, bandwidth)
            costs = _median_costs(of_kind, i, base, recipe)
            alpha = None if RULES[recipe.rule].chains_only else row.alpha
            rows.append(replace(row, alpha=alpha, over_fixed=_over_fixed(recipes, i, of_kind), **costs))
        first = len(recipes)
        for temperature, base in ar.items():
            fastest: dict[str, BenchRow] = {}
            for i, baseline in enumerate(baselines, first):
                name = f"transformers {baseline} T={temperature:g}"
                row = _row(of_kind, i, base, name, temperature, bandwidth)
                family = BASELINES[baseline].family
                if family not in fastest or row.tokens_per_second > fastest[family].tokens_per_second:
                    fastest[family] = row
            rows += fastest.values()
            first += len(baselines)
    return rows


def _row(
    records: Sequence[Record], index: int, base: int | None, lane: str, temperature: float, bandwidth: float
) -> BenchRow:
    runs = [record["runs"][index] for record in records]
    timed = _timed_pairs(records, index, base)
    compared = base not in (index, None)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for run, ar, prompt in timed if compared else ():
        ratios[prompt].append(run_speed(run) / run_speed(ar))
    medians = sorted((statistics.median(values), prompt) for prompt, values in ratios.items())
    reads = [run["bytes_read"] / run["wall_s"] / bandwidth for run, _, _ in timed if "bytes_read" in run and bandwidth]
    same_text = None
    names = {record["name"] for record in records}
    if base is not None and compared and not temperature:
        texts = [(record["name"], record["runs"][index]["text"], record["runs"][base]["text"]) for record in records]
        same_text = len(names.difference(name for name, text, ar_text in texts if text != ar_text))
    return BenchRow(
        kind=records[0]["kind"],
        lane=lane,
        prompts=len(names),
        tokens_per_second=_median(run_speed(run) for run in runs if run["tokens_per_second"]) or 0.0,
        speedup=_median(chain.from_iterable(ratios.values())),
        interval=_interval(ratios),
        slower=tuple(f"{prompt} ({ratio:.2f}x)" for ratio, prompt in medians if ratio < 1),
        same_text=same_text,
        acceptance_rate=_median(run.get("acceptance_rate") for run in runs),
        alpha=_median(run.get("alpha") for run in runs),
        mean_beta=_median(run.get("mean_beta") for run in runs),
        tokens_per_pass=_median(run["tokens_per_target_pass"] for run in runs),
        ttft_s=_median(run["ttft_s"] for run in runs) or 0.0,
        held_bytes=_median(run.get("held_bytes") for run in runs),
        bandwidth=_median(reads),
        acceptance=Acceptance.total(run["acceptance"] for run in runs if "acceptance" in run),
    )


def _interval(ratios: Mapping[str, Sequence[float]]) -> tuple[float, float] | None:
    return cluster_interval([*ratios.values()]) if len(ratios) >= LEAST_PROMPTS else None


def _timed_pairs(records: Sequence[Record], index: int, base: int | None) -> list[tuple[RunFigures, RunFigures, str]]:
    if base is None:
        return []
    pairs = [(record["runs"][index], record["runs"][base], record["name"]) for record in records]
    return [(run, ar, name) for run, ar, name in pairs if run["wall_s"] and ar["wall_s"] and run["tokens_per_second"]]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def run_speed(run: RunFigures) -> float:
    if "decode_tokens" in run:
        return run["decode_tokens"] / run["wall_s"]
    return run["tokens_per_second"]


def _over_fixed(
    recipes: Sequence[Recipe], index: int, records: Sequence[Record]
) -> tuple[float, float | None, float | None] | None:
    """Return median and interval of a policy's speed relative to the best fixed gamma of its method.

    Gamma is selected on the other prompts, to avoid selection bias.
    """
    if recipes[index].method == "ar" or recipes[index].policy == "fixed":
        return None

    def without_length(recipe: Recipe) -> Recipe:
        return replace(recipe, policy="fixed", gamma=1, gamma_min=None, gamma_max=None)

    similar = without_length(recipes[index])
    fixed = [i for i, other in enumerate(recipes) if other.policy == "fixed" and without_length(other) == similar]
    if not fixed:
        return None
    timed = [record for record in records if all(record["runs"][i]["wall_s"] for i in (index, *fixed))]

    def median_speed(subset: Sequence[Record], i: int) -> float:
        return statistics.median(run_speed(record["runs"][i]) for record in subset)

    ratios = {}
    for name in dict.fromkeys(record["name"] for record in timed):
        others = [record for record in timed if record["name"] != name] or timed
        best = max(fixed, key=partial(median_speed, others))
        ratios[name] = [
            run_speed(record["runs"][index]) / run_speed(record["runs"][best])
            for record in timed
            if record["name"] == name
        ]
    if not ratios:
        return None
    return (statistics.median(chain.from_iterable(ratios.values())), *(_interval(ratios) or (None, None)))


def _median_costs(records: Sequence[Record], index: int, base: int | None, recipe: Recipe) -> dict[str, Any]:
    costs = [
        _costs(run, ar, recipe)
        for run, ar, _ in _timed_pairs(records, index, base)
        if run["steps"] > 1 and ar["steps"] > 1 and run["verify_s"] is not None
    ]
    names = ("c", "o", "theory", "realised") if base == index else ("c", "v", "o", "theory", "realised", "explained")
    return {name: _median(terms[name] for terms in costs) for name in names}


def _costs(run: RunFigures, ar: RunFigures, recipe: Recipe) -> dict[str, float | None]:
    pass_s = ar["verify_s"] / (ar["steps"] - 1)
    terms, ar_terms = (
        CostTerms.of(
            *(figures[name] for name in STAGES), drafted=figures["drafted"], steps=figures["steps"] - 1, pass_s=pass_s
        )
        for figures in (run, ar)
    )
    measured, drafted = run_speed(run) / run_speed(ar), terms.drafted
    expected = speedup(run["tokens_per_step"], drafted, terms.c, terms.v, terms.o) * (1 + ar_terms.o)
    theory = None
    if drafted and run["mean_beta"] is not None:
        gamma = recipe.gamma if recipe.policy == "fixed" else drafted
        theory = walltime_improvement(run["mean_beta"], gamma, terms.c)
    return {
        "c": terms.c if drafted else None,
        "v": terms.v,
        "o": terms.o,
        "theory": theory,
        "realised": measured / theory if theory else None,
        "explained": measured / expected,
    }


def ratio_with_interval(value: float | None, limits: Sequence[float | None] | None) -> str:
    low, high = limits or (None, None)
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return format_number(value, missing="-") + interval


def row_cells(row: BenchRow) -> dict[str, str]:
    """Return the fields of a row as texts, with `ratio`, the speed-up with its interval."""
    number = partial(format_number, missing="-")
    figures = {field.name: getattr(row, field.name) for field in fields(row)}
    over_fixed, *limits = row.over_fixed or (None, None, None)
    return {
        **{name: number(value) for name, value in figures.items() if value is None or isinstance(value, float)},
        "kind": row.kind,
        "lane": row.lane,
        "prompts": str(row.prompts),
        "tokens_per_second": number(row.tokens_per_second, 0),
        "ratio": ratio_with_interval(row.speedup, row.interval),
        "interval": "-" if row.interval is None else f"{row.interval[0]:.2f}-{row.interval[1]:.2f}",
        "over_fixed": ratio_with_interval(over_fixed, limits),
        "same_text": "-" if row.same_text is None else f"{row.same_text} of {row.prompts}",
        "ttft_ms": number(1000 * row.ttft_s, 0),
        "megabytes": number(row.held_bytes and row.held_bytes / 1e6, 0),
        "bandwidth": percent(row.bandwidth, "-", ""),
        "slower": "-" if row.speedup is None else f"{len(row.slower)} of {row.prompts}",
    }


_COLUMNS = {
    "class": "kind",
    "lane": "lane",
    "tokens/s": "tokens_per_second",
    "speed-up": "speedup",
    "95 %": "interval",
    "over best fixed": "over_fixed",
    "same text": "same_text",
    "acc/drafted": "acceptance_rate",
    "alpha": "alpha",
    "mean overlap": "mean_beta",
    "tokens/pass": "tokens_per_pass",
    "c": "c",
    "v": "v",
    "o": "o",
    "Thm 3.8": "theory",
    "realised": "realised",
    "explained": "explained",
    "first ms": "ttft_ms",
    "MB": "megabytes",
    "bandwidth": "bandwidth",
    "slower on": "slower",
}


def markdown(rows: Sequence[BenchRow]) -> str:
    cells = map(row_cells, rows)
    return markdown_table([*_COLUMNS], ([texts[name] for name in _COLUMNS.values()] for texts in cells))


def acceptance(rows: Sequence[BenchRow]) -> dict[str, Acceptance]:
    """Return the counts of each lane over all classes."""
    lanes = dict.fromkeys(row.lane for row in rows)
    return {lane: Acceptance.total(row.acceptance for row in rows if row.lane == lane) for lane in lanes}


def acceptance_markdown(rows: Sequence[BenchRow]) -> str:
    """Return the tables that have rows: a row per lane, a column per position or interval."""
    tables = []
    for name, (title, labels) in _TABLES.items():
        counts: dict[str, Counts] = {lane: getattr(of_lane, name) for lane, of_lane in acceptance(rows).items()}
        keys = sorted({key for row in counts.values() for key in row})
        head = ["recipe", *(labels[key] if labels else str(key) for key in keys)]
        cells = [[lane, *(_acceptance_cell(row.get(key), name) for key in keys)] for lane, row in counts.items() if row]
        if cells:
            tables.append(f"{title}:\n\n{markdown_table(head, cells)}")
    return "\n\n".join(tables)


def _acceptance_cell(count: AcceptanceCount | None, name: str) -> str:
    if count is None:
        return "-"
    estimate = f"{count.confidence / count.tested:.2f} → " if name == "confidence" else ""
    return f"{estimate}{count.share:.2f} of {count.tested:,}"


def _intervals(*edges: float) -> list[str]:
    return [*(f"{low:g} to {high:g}" for low, high in pairwise(edges)), f"from {edges[-1]:g}"]


_TABLES = {
    "position": ("Accepted / tested by position in the draft", None),
    "text_length": ("Accepted / tested by length of the text in tokens", _intervals(0, *TEXT_LENGTHS)),
    "confidence": ("Mean confidence (or q) → accepted / tested, by confidence", _intervals(0, *CONFIDENCES)),
}


@dataclass(frozen=True)
class SpeedupMap:
    """Speed-ups: a row per recipe, a column per class of prompts, or per draft length within a class."""

    across: str  # title of the columns
    columns: Sequence[str]
    recipes: Mapping[str, Mapping[str, BenchRow]]


def speedup_map(rows: Sequence[BenchRow]) -> SpeedupMap | None:
    """Return the map of at least two recipes and two columns, None without."""
    compared = [row for row in rows if row.speedup is not None]
    if len({row.kind for row in compared}) > 1:
        across, places = "class", [(row.lane, row.kind, row) for row in compared]
    else:
        lengths = [(row, length[1]) for row in compared if (length := _GAMMA.search(row.lane))]
        across, places = "γ", [(_GAMMA.sub("", row.lane), length, row) for row, length in lengths]
    recipes: dict[str, dict[str, BenchRow]] = {}
    for recipe, column, row in places:
        recipes.setdefault(recipe, {})[column] = row
    columns = list(dict.fromkeys(column for _, column, _ in places))
    return SpeedupMap(across, columns, recipes) if min(len(recipes), len(columns)) > 1 else None


def speedup_text(row: BenchRow | None) -> str:
    """Return a speed-up, marked if it may be none."""
    if row is None or row.speedup is None:
        return NOTHING
    uncertain = row.interval is not None and row.interval[0] <= 1 <= row.interval[1]
    return f"{row.speedup:.2f}×" + (" ±" if uncertain else "")


def map_markdown(rows: Sequence[BenchRow]) -> str:
    """Return the table of a map of speed-ups, empty without a map."""
    if (speedups := speedup_map(rows)) is None:
        return ""
    head = f"recipe, {speedups.across}", *speedups.columns
    cells = ((name, *map(speedup_text, map(row.get, speedups.columns))) for name, row in speedups.recipes.items())
    return f"Speed-up over AR decoding ({MAP_LEGEND}):\n\n{markdown_table(head, cells)}"


def category_table(recipes: Sequence[Recipe], records: Sequence[Record]) -> str:
    """Return mean accepted tokens per step and speed-up by category: ratios of sums, without the prefill."""
    categories = [*dict.fromkeys(record["kind"] for record in records), ALL]
    ar = {recipe.temperature: i for i, recipe in enumerate(recipes) if recipe.method == "ar"}
    rows = []
    for i, recipe in enumerate(recipes):
        if recipe.method != "ar":
            base = ar[recipe.temperature]
            cells = (_category_cell([r for r in records if name in (r["kind"], ALL)], i, base) for name in categories)
            rows.append((recipe_label(recipe), *cells))
    table = markdown_table(("lane", *categories), rows)
    return f"Mean accepted tokens per step and speed-up, by category:\n\n{table}"


def _category_cell(records: Iterable[Record], index: int, base: int) -> str:
    pairs = [(record["runs"][index], record["runs"][base]) for record in records]
    timed = [(run, ar) for run, ar in pairs if run["wall_s"] and ar["wall_s"] and run["steps"] > 1]
    if not timed:
        return "-"
    tokens, steps, wall = (sum(run[name] for run, _ in timed) for name in ("decode_tokens", "steps", "wall_s"))
    ar_tokens, ar_wall = (sum(ar[name] for _, ar in timed) for name in ("decode_tokens", "wall_s"))
    return f"{tokens / (steps - len(timed)):.2f}, {(tokens / wall) / (ar_tokens / ar_wall):.2f}x"


def as_json(rows: Sequence[BenchRow]) -> str:
    return json.dumps({"bench": [asdict(row) for row in rows]})


_METHOD = (
    "Every recipe decodes every prompt, in shuffled order, after one warm-up run. A speed-up is the ratio of speeds "
    "of a recipe and of AR decoding on the same prompt, without the prefill. The table contains the median over the "
    f"prompts of a class and, from {LEAST_PROMPTS} prompts, its 95 % bootstrap interval, which resamples prompts."
)


def slower(rows: Sequence[BenchRow]) -> list[str]:
    """Return a line per lane that was slower than AR decoding, with the prompts."""
    return [f"slower than AR decoding: {row.lane} on {', '.join(row.slower)}" for row in rows if row.slower]


def disturbed(records: Sequence[Record], share: float = 0.05) -> int:
    """Count the runs paused for more than `share` of their time."""
    runs = [run for record in records for run in record["runs"]]
    return sum(run.get("paused_s", 0.0) > share * run["wall_s"] for run in runs)


def report(recipes: Sequence[Recipe], prompts: int, records: Sequence[Record], rows: Sequence[BenchRow]) -> str:
    """Return a Markdown report; `records` may be fewer than `prompts`."""
    first, environment = recipes[0], records[0]["runs"][0]["environment"]
    models = f"target {first.target}" if first.target else f"pair {first.pair or 'bundled'}"
    if first.target or first.drafter:
        models += f", drafter {first.drafter}"
    drafter = next((recipe.drafter_quantization for recipe in recipes if plan_run(recipe).drafter), "none")
    machine = "{processor}; {device}, {dtype}, threads: {threads}".format(**environment)
    software = "engine {engine}, Python {python}, torch {torch}, transformers {transformers}".format(**environment)
    lines = [
        "# Speculative against AR decoding",
        "",
        f"- Models: {models}; quantization: target {first.quantization}, drafter {drafter}",
        f"- Machine: {machine}",
        f"- Software: {software}",
        f"- Runs: {len(recipes)} recipes on {len(records)} prompts, at most {first.max_tokens} tokens each, "
        f"seed {first.seed}",
    ]
    if len(records) < prompts:
        lines.append(f"- **Partial**: stopped after {len(records)} of {prompts} prompts")
    if count := disturbed(records):
        lines.append(f"- **Disturbed**: the device ran other jobs during {count} of these runs")
    lines += ["", markdown(rows), "", *(f"- {line}" for line in slower(rows)), "", _METHOD, ""]
    lines += ["\n\n".join(filter(None, (map_markdown(rows), acceptance_markdown(rows)))), ""]
    return "\n".join(lines)
