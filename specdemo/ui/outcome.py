"""What of a sweep is measured, and how it is told. Every figure comes from the rows of `bench.table`. No gradio."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdemo.bench import Row, Turn, as_json, disturbed, report, slower, table
from specdemo.ui.sweep import Sweep, duration
from specdemo.ui.words import NOTHING, number, percent

HEADERS = (
    "class", "recipe", "speed-up", "95 %", "slower on", "tokens/s", "accepted", "α", "tokens/pass", "same text",
)  # fmt: skip


@dataclass
class Outcome:
    """The records so far, and what is being done."""

    sweep: Sweep
    records: list[dict[str, Any]] = field(default_factory=list)
    turn: Turn | None = None

    def absorb(self, item: Turn | dict[str, Any]) -> None:
        """Take in what `measure` hands out."""
        if isinstance(item, Turn):
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

    def rows(self) -> list[Row]:
        """The table's rows, losing ones included."""
        return table(self.sweep.recipes, self.records)

    def notes(self, rows: Sequence[Row]) -> str:
        """What belongs under the table, as Markdown: where it lost, and what may have disturbed it."""
        lines = slower(rows) or ["no recipe was slower than plain decoding on any prompt"]
        if count := disturbed(self.records):
            lines.append(f"other runs took turns with {count} of these, whose figures may be off")
        return "\n".join(f"- {line}" for line in lines)

    def files(self, rows: Sequence[Row]) -> tuple[str, str]:
        """The report in Markdown, and the line of JSON that the terminal prints."""
        return report(self.sweep.recipes, len(self.sweep.prompts), self.records, rows), as_json(rows) + "\n"


def cells(rows: Sequence[Row]) -> list[list[str]]:
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


def bars(rows: Sequence[Row]) -> dict[str, Any]:
    """The speed-ups as data of a bar plot: plain decoding, which is 1, then a bar per recipe and class."""
    temperatures = {row.lane.rpartition(" ")[2] for row in rows}

    def name(row: Row) -> str:
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
