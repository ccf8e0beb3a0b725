"""Time of a run, from the steps of a trace: its wall time by cause, and the time over a link by activity.

The delay per direction cannot be measured: it is split evenly around the cloud's pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from specdemo.core.formats import percent
from specdemo.core.policies import costs_at_load
from specdemo.core.step import LinkStats, Step


class TimeCause(StrEnum):
    """Cause of a part of the wall time, as it is displayed."""

    PROMPT = "until the first token"  # without the link
    PASS = "writing a token"  # fixed time of a target pass: a pass over one row
    ROW = "checking the guesses"  # further rows of the passes
    CHECK = "checking"  # passes of unknown shares
    DRAFT = "guessing"
    COMMIT = "the rest"
    LINK = "the link"
    OUTSIDE = "between the steps"  # texts, display, other runs


# Causes that a step of AR decoding lacks, or has to a smaller extent
LOSSES = (TimeCause.ROW, TimeCause.DRAFT, TimeCause.COMMIT, TimeCause.LINK)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Seconds of a cause, in `count` units."""

    cause: TimeCause
    seconds: float
    count: int = 0
    unit: str = ""

    def cells(self, wall_s: float) -> list[str]:
        """Return cause, time, share and time per unit in words."""
        name = f"{self.cause}, per {self.unit}" if self.count else str(self.cause)
        units = f"{self.count} × {1000 * self.seconds / self.count:.3f} ms" if self.count else ""
        return [name, f"{1000 * self.seconds:.1f} ms", percent(self.seconds / wall_s), units]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Causes with a share in the wall time, from the prompt, which is step 0, to the last of `steps` further steps."""

    entries: tuple[LedgerEntry, ...]
    wall_s: float
    steps: int

    @classmethod
    def of(cls, steps: Sequence[Step], pass_s: float | None = None) -> Ledger | None:
        """Split the passes by `pass_s`, the seconds of a single-row pass. Requires steps with known durations."""
        if not steps or not steps[-1].t or any(None in (step.draft_s, step.verify_s, step.host_s) for step in steps):
            return None
        decoding, wall_s = steps[1:], steps[-1].t
        linked = any(step.verdict.link for step in steps)
        link_s = [
            sum(seconds for activity, seconds in verification(step) if activity in LINK) if linked else 0.0
            for step in steps
        ]
        drafted = sum(step.draft.size for step in decoding)
        passes = sum(step.target_passes for step in decoding)
        target_s = sum(step.seconds.verify for step in decoding) - sum(link_s[1:])
        single_s = target_s if pass_s is None or not drafted else min(target_s, passes * pass_s)
        single = TimeCause.CHECK if pass_s is None and drafted else TimeCause.PASS
        draft_s = sum(step.seconds.draft for step in decoding)
        commit_s = sum(step.seconds.host for step in decoding)
        inside = [
            LedgerEntry(TimeCause.PROMPT, steps[0].t - link_s[0]),
            LedgerEntry(single, single_s, passes, "check"),
            LedgerEntry(TimeCause.ROW, target_s - single_s, drafted, "guess"),
            LedgerEntry(TimeCause.DRAFT, draft_s, drafted, "guess"),
            LedgerEntry(TimeCause.COMMIT, commit_s, sum(len(step.tokens) for step in decoding), "token"),
            LedgerEntry(TimeCause.LINK, sum(link_s), len(decoding), "step"),
        ]
        outside_s = wall_s - sum(entry.seconds for entry in inside)
        entries = [*inside, LedgerEntry(TimeCause.OUTSIDE, outside_s, len(decoding), "step")]
        return cls(tuple(entry for entry in entries if entry.seconds > 0), wall_s, len(decoding))

    def as_dict(self) -> dict[str, Any]:
        rows = [[entry.seconds / self.wall_s, *entry.cells(self.wall_s)] for entry in self.entries]
        return {"wall_s": self.wall_s, "rows": rows}

    def share(self, cause: TimeCause) -> float:
        return sum(entry.seconds for entry in self.entries if entry.cause is cause) / self.wall_s

    @property
    def loss(self) -> str:
        """Largest loss of a step in words, empty if passes of unknown shares took longer."""
        losses = [entry for entry in self.entries if entry.cause in (*LOSSES, TimeCause.CHECK)]
        largest = max(losses, key=lambda entry: entry.seconds, default=None)
        if largest is None or largest.cause is TimeCause.CHECK:
            return ""
        return f"{largest.cause}, {1000 * largest.seconds / self.steps:.2f} ms per step"


def one_row_seconds(
    steps: Sequence[Step], environment: Mapping[str, Any], baseline: Sequence[Step] = ()
) -> float | None:
    """Return the median time of a single-row pass of `baseline`, or of `steps` by the costs measured at load."""
    costs = costs_at_load(environment)
    if baseline:
        seconds = [step.seconds.verify for step in baseline[1:]]
    elif costs:
        seconds = [step.seconds.verify / costs.verify(1 + step.draft.size) for step in steps[1:]]
    else:
        return None
    return statistics.median(seconds) if seconds else None


SLACK = 1.02  # tolerated deviation of the two clocks
LINK = ("up", "way", "down", "gap", "wait")  # activities that no model computes in
Part = tuple[str, float, float]  # activity, start, duration; in seconds


def parts(steps: Sequence[Step]) -> list[list[Part]]:
    """Split each step into idle, draft, gap, up, way, verify, way, down; or into draft, gap and wait.

    Verification is a wait if the cloud's share is unknown.
    """
    result, end = [], 0.0
    for step in steps:
        draft_s = step.seconds.draft
        start = max(end, step.t - draft_s - step.seconds.verify)
        activities: list[Part] = [("idle", end, start - end), ("draft", start, draft_s)]
        begin = start + draft_s
        for activity, seconds in verification(step):
            activities.append((activity, begin, seconds))
            begin += seconds
        result.append([part for part in activities if part[2] > 0])
        end = step.t
    return result


def verification(step: Step) -> Iterator[tuple[str, float]]:
    """Yield the activities of a verification and their seconds."""
    link = step.verdict.link or LinkStats()
    gap = min(link.gap_s or 0.0, step.seconds.verify)
    cloud, verify_s = link.cloud_s, step.seconds.verify - gap
    if gap:
        yield "gap", gap
    up, down = link.up_s or 0.0, link.down_s or 0.0
    if cloud is None or cloud + up + down > verify_s * SLACK:
        yield "wait", verify_s
        return
    way = max(0.0, verify_s - cloud - up - down) / 2
    yield from (("up", up), ("way", way), ("verify", cloud), ("way", way), ("down", down))


def time_shares(steps: Sequence[Step]) -> dict[str, float]:
    """Return the share of each activity in the time of the steps."""
    spent: dict[str, float] = {}
    for activity, _, seconds in (part for step_parts in parts(steps) for part in step_parts):
        spent[activity] = spent.get(activity, 0.0) + seconds
    total = sum(spent.values())
    return {activity: seconds / total for activity, seconds in spent.items()}
