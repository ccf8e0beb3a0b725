"""Sweeps of recipes over prompts, with their records, progress and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from specdemo.bench.measure import BenchProgress
from specdemo.bench.table import BenchRow, as_json, disturbed, report, slower, table
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.method_names import visible_recipe
from specdemo.ui.service import Service
from specdemo.ui.tabs.components import progress_bar
from specdemo.ui.tabs.measurement_panel import ANNOUNCED, PanelMeasurement, waiting
from specdemo.worker import Stream

ASSUMED = 100.0  # tokens per second, assumed before the first run


@dataclass(frozen=True)
class Sweep:
    """Measurement of every recipe on every prompt. The first recipe is AR decoding, the baseline."""

    recipes: tuple[Recipe, ...]
    prompts: tuple[Prompt, ...]

    @property
    def runs(self) -> int:
        return len(self.recipes) * len(self.prompts)

    @property
    def tokens(self) -> int:
        return self.runs * self.recipes[0].max_tokens

    def describe(self, latest: Run | None) -> str:
        """Describe size and estimated time, from the slowest lane of the latest run."""
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


def duration(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


@dataclass
class SweepResult(PanelMeasurement):
    """Records of a sweep so far, with its current progress."""

    sweep: Sweep
    records: list[dict[str, Any]] = field(default_factory=list)
    turn: BenchProgress | None = None

    def start(self, service: Service, session: str, address: str) -> Stream[Any]:
        return service.measurements.bench(self.sweep.recipes, self.sweep.prompts, session, address)

    @property
    def is_empty(self) -> bool:
        return not self.records

    def fresh(self) -> Self:
        return replace(self, records=[], turn=None)

    def absorb(self, item: BenchProgress | dict[str, Any]) -> None:
        if isinstance(item, BenchProgress):
            self.turn = item
        else:
            self.records.append(item)

    @property
    def timing(self) -> bool:
        return self.turn is not None and self.turn.number > 0

    def progress(self, seconds: float, ahead: int = 0) -> str:
        """Return the progress bar, `seconds` after the first timed run and with `ahead` jobs in the queue."""
        if self.turn is None:
            return progress_bar(0, self.sweep.runs, waiting(ahead))
        over, words = max(self.turn.number - 1, 0), str(self.turn)
        if over:
            words += f" · about {duration(seconds / over * (self.sweep.runs - over))} to go"
        return progress_bar(over, self.sweep.runs, words)

    def ending(self, error: str = "") -> str:
        done, total = len(self.records), len(self.sweep.prompts)
        if done == total and not error:
            words = f"done: {self.sweep.runs} runs on {done} prompts"
        else:
            part = f"partial, {done} of {total} prompts are measured" if done else "nothing is measured"
            words = f"failed: {error}; {part}" if error else f"stopped: {part}"
        return progress_bar(done, total, words, ANNOUNCED)

    def rows(self) -> list[BenchRow]:
        return table(self.sweep.recipes, self.records)

    def notes(self, rows: Sequence[BenchRow]) -> str:
        lines = slower([replace(row, lane=visible_recipe(row.lane)) for row in rows])
        lines = lines or ["no recipe was slower than AR decoding on any prompt"]
        if count := disturbed(self.records):
            lines.append(f"other runs interrupted {count} of these, so their figures may be inaccurate")
        return "\n".join(f"- {line}" for line in lines)

    def files(self, rows: Sequence[BenchRow]) -> tuple[str, str]:
        return report(self.sweep.recipes, len(self.sweep.prompts), self.records, rows), as_json(rows) + "\n"
