"""Bench of the page: recipes and prompts from its settings, size limits, progress and table."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from specdemo.bench import BenchProgress, BenchRow, as_json, disturbed, grid, report, slower, table
from specdemo.core.errors import UserError
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import METHODS, Recipe
from specdemo.ui.frames import Run
from specdemo.ui.labels import NOTHING, number, percent

DRAFTING = [name for name, method in METHODS.items() if method.drafts]  # can be faster than AR decoding
MOST_RUNS, MOST_TOKENS = 240, 24_000
ASSUMED = 100.0  # tokens per second before the visitor's first run


@dataclass(frozen=True)
class Sweep:
    """Recipes x prompts; the first recipe is AR decoding."""

    recipes: tuple[Recipe, ...]
    prompts: tuple[Prompt, ...]

    @property
    def runs(self) -> int:
        return len(self.recipes) * len(self.prompts)

    @property
    def tokens(self) -> int:
        return self.runs * self.recipes[0].max_tokens

    def describe(self, latest: Run | None) -> str:
        """Describe the size, and estimate the time from the slowest lane of the visitor's latest run."""
        speeds = [lane.metrics.tokens_per_second for lane in latest.lanes.values()] if latest else []
        measured = min(filter(None, speeds), default=None)
        basis = (
            f"the {measured:.0f} tokens per second of your latest run"
            if measured
            else f"an assumed {ASSUMED:.0f} tokens per second"
        )
        return (
            f"{len(self.recipes)} recipes × {len(self.prompts)} prompts = {self.runs} runs of at most "
            f"{self.recipes[0].max_tokens} tokens, about {duration(self.tokens / (measured or ASSUMED))} at {basis}"
        )


def sweep(
    make: Callable[[dict[str, Any]], Recipe],
    latest: Run | None,
    *,
    methods: Any,
    gammas: Any,
    policies: Any,
    temperatures: Any,
    kinds: Any,
    each: Any,
) -> Sweep:
    """Convert values from the browser. Raises `UserError` if they are invalid or exceed the page's limits.

    `make` converts varying settings (of `bench.grid`) to a recipe. `each` is the number of prompts per class. Classes
    alternate, so that a partial result covers all.
    """
    lists = {
        "method": methods,
        "draft length": gammas,
        "draft-length policy": policies,
        "temperature": temperatures,
        "class of prompts": kinds,
    }
    for name, chosen in lists.items():
        if not isinstance(chosen, list) or not chosen:
            raise UserError(f"choose at least one {name}")
    if isinstance(each, bool) or not isinstance(each, int) or each < 1:
        raise UserError(f"prompts per class must be an integer from 1, not {each!r}")
    varied = list(islice(grid(methods, gammas, policies, temperatures), MOST_RUNS + 1))
    if len(varied) > MOST_RUNS:
        raise UserError(f"that is more than {MOST_RUNS} recipes: choose fewer draft lengths, policies or temperatures")
    by_kind = [load_prompts(kinds=[str(kind)])[:each] for kind in kinds]
    prompts = [group[i] for i in range(max(map(len, by_kind))) for group in by_kind if i < len(group)]
    result = Sweep(tuple(map(make, varied)), tuple(prompts))
    if result.runs > MOST_RUNS or result.tokens > MOST_TOKENS:
        raise UserError(
            f"{result.describe(latest)}: the page measures at most {MOST_RUNS} runs and {MOST_TOKENS:,} "
            "tokens. Reduce the selection, or use the terminal's bench"
        )
    return result


def duration(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


SWEEP_TABLE_HEAD = (
    "class", "recipe", "speed-up", "95 %", "slower on", "tokens/s", "accepted", "α", "tokens/pass", "same text",
)  # fmt: skip


@dataclass
class SweepResult:
    sweep: Sweep
    records: list[dict[str, Any]] = field(default_factory=list)
    turn: BenchProgress | None = None

    def absorb(self, item: BenchProgress | dict[str, Any]) -> None:
        if isinstance(item, BenchProgress):
            self.turn = item
        else:
            self.records.append(item)

    @property
    def timing(self) -> bool:
        return self.turn is not None and self.turn.number > 0

    def progress(self, seconds: float, ahead: int = 0) -> str:
        """Return bar and text; `seconds` since the first timed run, jobs `ahead` in the queue."""
        if self.turn is None:
            return _bar(0, self.sweep.runs, f"queued: {ahead} ahead" if ahead else "waiting for the device")
        over, words = max(self.turn.number - 1, 0), str(self.turn)
        if over:
            words += f" · about {duration(seconds / over * (self.sweep.runs - over))} to go"
        return _bar(over, self.sweep.runs, words)

    def ending(self, error: str = "") -> str:
        done, total = len(self.records), len(self.sweep.prompts)
        if done == total and not error:
            words = f"done: {self.sweep.runs} runs on {done} prompts"
        else:
            part = f"partial, {done} of {total} prompts are measured" if done else "nothing is measured"
            words = f"failed: {error}; {part}" if error else f"stopped: {part}"
        return _bar(done, total, words, ' role="status"')  # announced by screen readers

    def rows(self) -> list[BenchRow]:
        return table(self.sweep.recipes, self.records)

    def notes(self, rows: Sequence[BenchRow]) -> str:
        lines = slower(rows) or ["no recipe was slower than AR decoding on any prompt"]
        if count := disturbed(self.records):
            lines.append(f"other runs interrupted {count} of these, so their figures may be inaccurate")
        return "\n".join(f"- {line}" for line in lines)

    def files(self, rows: Sequence[BenchRow]) -> tuple[str, str]:
        return report(self.sweep.recipes, len(self.sweep.prompts), self.records, rows), as_json(rows) + "\n"


def sweep_cells(rows: Sequence[BenchRow]) -> list[list[str]]:
    return [
        [
            row.kind,
            row.lane,
            "baseline" if row.speedup is None else f"{row.speedup:.2f}×" + (" slower" if row.speedup < 1 else ""),
            NOTHING if row.interval is None or row.prompts < 2 else "{:.2f} to {:.2f}".format(*row.interval),
            NOTHING if row.speedup is None else f"{len(row.slower)} of {row.prompts}",
            number(row.tokens_per_second, 1),
            percent(row.acceptance_rate),
            number(row.alpha, 2),
            number(row.tokens_per_pass, 2),
            NOTHING if row.same_text is None else f"{row.same_text} of {row.prompts}",
        ]
        for row in rows
    ]


PLAIN = "plain decoding"


def bars(rows: Sequence[BenchRow]) -> dict[str, Any]:
    """Return the bar plot of speed-ups: the baseline (1), then a bar per recipe and class."""
    temperatures = {row.lane.rpartition(" ")[2] for row in rows}

    def name(row: BenchRow) -> str:
        lane = row.lane if len(temperatures) > 1 else row.lane.rpartition(" ")[0]
        return f"{lane.replace('gamma=', 'γ ')}, {row.kind}"

    data = [[name(row), row.kind, round(row.speedup, 3)] for row in rows if row.speedup is not None]
    return {
        "columns": ["recipe", "class", "speed-up"],
        "data": [[PLAIN, PLAIN, 1.0], *data],
        "datatypes": {"recipe": "nominal", "class": "nominal", "speed-up": "quantitative"},
        "mark": "bar",
    }


def _bar(over: int, total: int, words: str, attributes: str = "") -> str:
    progress = f'<progress value="{over}" max="{total}" aria-label="how much is measured"></progress>'
    return f"{progress}<p{attributes}>{html.escape(words)}</p>"
