"""A small bench from the page's settings: which recipes on which prompts, and whether that is too much to ask.

Knows nothing of gradio and measures nothing.
"""

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

DRAFTING = [name for name, method in METHODS.items() if method.drafts]  # what may be faster than plain decoding
MOST_RUNS, MOST_TOKENS = 240, 24_000
ASSUMED = 100.0  # tokens per second, until the visitor has run something


@dataclass(frozen=True)
class Sweep:
    """Recipes x prompts; the first recipe is plain decoding."""

    recipes: tuple[Recipe, ...]
    prompts: tuple[Prompt, ...]

    @property
    def runs(self) -> int:
        """How many runs are timed."""
        return len(self.recipes) * len(self.prompts)

    @property
    def tokens(self) -> int:
        """The most that they can write."""
        return self.runs * self.recipes[0].max_tokens

    def told(self, latest: Run | None) -> str:
        """Its size in words, with a guess at its time from the slower lane of the visitor's latest run."""
        speeds = [lane.metrics.as_dict()["tokens_per_second"] for lane in latest.lanes.values()] if latest else []
        known = min(filter(None, speeds), default=None)
        basis = (
            f"the {known:.0f} tokens per second of your latest run"
            if known
            else f"an assumed {ASSUMED:.0f} tokens per second"
        )
        return (
            f"{len(self.recipes)} recipes × {len(self.prompts)} prompts = {self.runs} runs of at most "
            f"{self.recipes[0].max_tokens} tokens, about {duration(self.tokens / (known or ASSUMED))} at {basis}"
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
    """What raw values from a browser mean; `UserError` if they mean nothing, or more than the page will measure.

    `make` turns the settings that vary (those of `bench.grid`) into a recipe. `kinds` are classes of prompts, of which
    `each` gives so many. Prompts take turns by class, so that a part of them has something of every class.
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
        raise UserError(f"prompts per class must be a whole number from 1 on, not {each!r}")
    varied = list(islice(grid(methods, gammas, policies, temperatures), MOST_RUNS + 1))
    if len(varied) > MOST_RUNS:
        raise UserError(f"that is more than {MOST_RUNS} recipes: choose fewer draft lengths, policies or temperatures")
    by_kind = [load_prompts(kinds=[str(kind)])[:each] for kind in kinds]
    prompts = [some[i] for i in range(max(map(len, by_kind))) for some in by_kind if i < len(some)]
    found = Sweep(tuple(map(make, varied)), tuple(prompts))
    if found.runs > MOST_RUNS or found.tokens > MOST_TOKENS:
        raise UserError(
            f"{found.told(latest)}: too much for the page, which measures up to {MOST_RUNS} runs and {MOST_TOKENS:,} "
            "tokens at a time. Choose less of something, or use the terminal's bench"
        )
    return found


def duration(seconds: float) -> str:
    """Roughly how long that is."""
    return f"{max(seconds, 1):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


HEADERS = (
    "class", "recipe", "speed-up", "95 %", "slower on", "tokens/s", "accepted", "α", "tokens/pass", "same text",
)  # fmt: skip


@dataclass
class SweepResult:
    """The records so far, and what is being done."""

    sweep: Sweep
    records: list[dict[str, Any]] = field(default_factory=list)
    turn: BenchProgress | None = None

    def absorb(self, item: BenchProgress | dict[str, Any]) -> None:
        """Take in what `measure` hands out."""
        if isinstance(item, BenchProgress):
            self.turn = item
        else:
            self.records.append(item)

    @property
    def timing(self) -> bool:
        """Whether the warm-up is over."""
        return self.turn is not None and self.turn.number > 0

    def progress(self, seconds: float, ahead: int = 0) -> str:
        """A bar and a sentence: `seconds` since the first timed run began, or how many jobs are `ahead`."""
        if self.turn is None:
            return _bar(0, self.sweep.runs, f"queued: {ahead} ahead" if ahead else "waiting for the device")
        over, words = max(self.turn.number - 1, 0), str(self.turn)
        if over:
            words += f" · about {duration(seconds / over * (self.sweep.runs - over))} to go"
        return _bar(over, self.sweep.runs, words)

    def ending(self, error: str = "") -> str:
        """The last bar and sentence: all is measured, or a part, or nothing, and why."""
        done, whole = len(self.records), len(self.sweep.prompts)
        if done == whole and not error:
            words = f"done: {self.sweep.runs} runs on {done} prompts"
        else:
            part = f"partial, {done} of {whole} prompts are measured" if done else "nothing is measured"
            words = f"failed: {error}; {part}" if error else f"stopped: {part}"
        return _bar(done, whole, words, ' role="status"')  # the one that is read out

    def rows(self) -> list[BenchRow]:
        """The table's rows, losing ones included."""
        return table(self.sweep.recipes, self.records)

    def notes(self, rows: Sequence[BenchRow]) -> str:
        """What belongs under the table, as Markdown: where it lost, and what may have disturbed it."""
        lines = slower(rows) or ["no recipe was slower than plain decoding on any prompt"]
        if count := disturbed(self.records):
            lines.append(f"other runs took turns with {count} of these, whose figures may be off")
        return "\n".join(f"- {line}" for line in lines)

    def files(self, rows: Sequence[BenchRow]) -> tuple[str, str]:
        """The report in Markdown, and the line of JSON that the terminal prints."""
        return report(self.sweep.recipes, len(self.sweep.prompts), self.records, rows), as_json(rows) + "\n"


def cells(rows: Sequence[BenchRow]) -> list[list[str]]:
    """The table as text, by `HEADERS`. What lost says so in words; one prompt has no interval."""
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


PLAIN, COLOURS = "plain decoding", ("#7a8698", "#0072b2", "#e69f00", "#009e73", "#cc79a7")  # Okabe and Ito's


def bars(rows: Sequence[BenchRow]) -> dict[str, Any]:
    """The speed-ups as data of a bar plot: plain decoding, which is 1, then a bar per recipe and class."""
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
