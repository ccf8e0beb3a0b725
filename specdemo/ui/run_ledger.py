"""Ledger of a lane on the page: a table of causes with their times, and the largest loss in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specdemo.core.formats import percent
from specdemo.core.ledger import Ledger, LedgerEntry, TimeCause, one_row_seconds
from specdemo.ui.lane import Lane
from specdemo.ui.run_estimate import comparable


class CauseWords(NamedTuple):
    """Name of a cause, and of its unit."""

    name: str
    unit: str


_WORDS: Mapping[TimeCause, CauseWords] = {
    TimeCause.PROMPT: CauseWords("until the first token", ""),
    TimeCause.PASS: CauseWords("writing a token", "check"),
    TimeCause.ROW: CauseWords("checking the guesses", "guess"),
    TimeCause.DRAFT: CauseWords("guessing", "guess"),
    TimeCause.COMMIT: CauseWords("the rest", "token"),
    TimeCause.LINK: CauseWords("the link", "step"),
    TimeCause.OUTSIDE: CauseWords("between the steps", "step"),
}
_NOT_SPLIT = CauseWords("checking", "check")


def lane_ledger(lane: Lane, baseline: Lane | None = None) -> Ledger | None:
    """Return the ledger of a lane; passes of `baseline` split its passes if the targets are equal."""
    if not lane.timed:
        return None
    steps = [event.step for event in lane.steps]
    compared = baseline if baseline is not None and comparable(lane, baseline) else None
    plain = [event.step for event in compared.steps] if compared else []
    return Ledger.of(steps, one_row_seconds(steps, lane.environment, plain))


def ledger_rows(lane: Lane, baseline: Lane | None) -> dict[str, Any] | None:
    """Return the wall time in words, and a row per cause: name, share from 0 to 1, and cells."""
    ledger = lane_ledger(lane, baseline)
    if ledger is None:
        return None
    rows = [_row(entry, ledger) for entry in ledger.entries]
    return {"words": f"{ledger.wall_s:.3f} s from the start to the last token", "rows": rows}


def _row(entry: LedgerEntry, ledger: Ledger) -> list[Any]:
    unsplit = entry.cause is TimeCause.PASS and not ledger.split
    name, unit = _NOT_SPLIT if unsplit else _WORDS[entry.cause]
    units = ""
    if unit and entry.unit_s is not None:
        name = f"{name}, per {unit}"
        units = f"{entry.count} × {1000 * entry.unit_s:.3f} ms"
    share = ledger.share(entry.cause)
    return [name, share, [f"{1000 * entry.seconds:.1f} ms", percent(share), units]]


def loss_sentence(lane: Lane, baseline: Lane | None, steps: str) -> str:
    """Name the largest loss of `steps`, compared with writing a token; empty if it is unknown."""
    ledger = lane_ledger(lane, baseline)
    loss = ledger.largest_loss if ledger else None
    if ledger is None or loss is None:
        return ""
    return f"{steps} lost most to {_WORDS[loss.cause].name}: {1000 * loss.seconds / ledger.steps:.2f} ms."
