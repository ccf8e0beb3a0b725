"""Ledger of a run in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TextIO

from specdemo.core.events import End, Event, Header, StepEvent
from specdemo.core.formats import percent
from specdemo.core.ledger import Ledger, LedgerEntry, TimeCause, one_row_seconds
from specdemo.core.step import Step

_NAMES: Mapping[TimeCause, str] = {
    TimeCause.PROMPT: "prefill",
    TimeCause.PASS: "fixed time per step",
    TimeCause.ROW: "verified rows",
    TimeCause.DRAFT: "drafted tokens",
    TimeCause.COMMIT: "committed tokens",
    TimeCause.LINK: "link",
    TimeCause.OUTSIDE: "outside the loop",
}


class LedgerTable:
    """View that splits the wall time by cause, after the last event."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._steps: list[Step] = []

    def show(self, event: Event) -> None:
        match event:
            case Header():
                self._environment = event.environment
            case StepEvent():
                self._steps.append(event.step)
            case End():
                ledger = Ledger.of(self._steps, one_row_seconds(self._steps, self._environment))
                print("\n".join(_lines(ledger)), file=self._file, flush=True)


def _lines(ledger: Ledger | None) -> Iterator[str]:
    if ledger is None:
        yield "no ledger: the durations of the steps are unknown"
        return
    yield f"wall time {1000 * ledger.wall_s:.1f} ms"
    for entry in ledger.entries:
        share = percent(ledger.share(entry.cause))
        yield f"  {_name(entry, ledger):<24}{1000 * entry.seconds:9.1f} ms {share:>5}{_units(entry)}"
    if loss := ledger.largest_loss:
        yield f"each step lost most to {_name(loss, ledger)}: {1000 * loss.seconds / ledger.steps:.2f} ms"


def _name(entry: LedgerEntry, ledger: Ledger) -> str:
    unsplit = entry.cause is TimeCause.PASS and not ledger.split
    return "steps and verified rows" if unsplit else _NAMES[entry.cause]


def _units(entry: LedgerEntry) -> str:
    return (
        ""
        if entry.unit_s is None or entry.cause is TimeCause.PROMPT
        else f"  {entry.count} x {1000 * entry.unit_s:.3f} ms"
    )
