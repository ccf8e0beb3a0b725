"""Ledger of a run: its wall time as a sum of causes, from the steps of a trace."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from specdemo.core.link_time import link_seconds
from specdemo.core.policies import costs_at_load
from specdemo.core.step import Step


class TimeCause(StrEnum):
    """Cause of a part of the wall time."""

    PROMPT = "prompt"  # until the first token, without the link
    PASS = "pass"  # fixed time of a target pass: a pass over one row
    ROW = "row"  # further rows of the passes
    DRAFT = "draft"
    COMMIT = "commit"  # the rest of the steps
    LINK = "link"
    OUTSIDE = "outside"  # between the steps: texts, display, other runs


# Causes that a step of AR decoding lacks, or has to a smaller extent
LOSSES = (TimeCause.ROW, TimeCause.DRAFT, TimeCause.COMMIT, TimeCause.LINK)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Seconds of a cause, for `count` units: passes, rows, draft tokens, committed tokens, or steps."""

    cause: TimeCause
    seconds: float
    count: int

    @property
    def unit_s(self) -> float | None:
        return self.seconds / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Ledger:
    """Causes with a share in the wall time, which ends with the last step. The prompt is step 0."""

    entries: tuple[LedgerEntry, ...]
    wall_s: float
    steps: int  # after the prompt
    split: bool  # False: the time of a pass over one row is unknown, so further rows are part of the passes

    @classmethod
    def of(cls, steps: Sequence[Step], pass_s: float | None = None) -> Ledger | None:
        """Split the passes by `pass_s`, the seconds of a single-row pass, if it is known; so must be the durations."""
        if not steps or not steps[-1].t or any(None in (step.draft_s, step.verify_s, step.host_s) for step in steps):
            return None
        first, decoding = steps[0], steps[1:]
        wall_s = steps[-1].t
        linked = any(step.verdict.link for step in steps)
        link_s = [link_seconds(step) if linked else 0.0 for step in steps]
        drafted = sum(step.draft.size for step in decoding)
        tokens = sum(len(step.tokens) for step in decoding)
        passes = sum(step.target_passes for step in decoding)
        target_s = sum(step.seconds.verify for step in decoding) - sum(link_s[1:])
        split = pass_s is not None or not drafted
        fixed_s = target_s if pass_s is None or not drafted else min(target_s, passes * pass_s)
        inside = [
            LedgerEntry(TimeCause.PROMPT, first.t - link_s[0], 1),
            LedgerEntry(TimeCause.PASS, fixed_s, passes),
            LedgerEntry(TimeCause.ROW, target_s - fixed_s, drafted),
            LedgerEntry(TimeCause.DRAFT, sum(step.seconds.draft for step in decoding), drafted),
            LedgerEntry(TimeCause.COMMIT, sum(step.seconds.host for step in decoding), tokens),
            LedgerEntry(TimeCause.LINK, sum(link_s), len(decoding)),
        ]
        outside = LedgerEntry(TimeCause.OUTSIDE, wall_s - sum(entry.seconds for entry in inside), len(decoding))
        entries = tuple(entry for entry in (*inside, outside) if entry.seconds > 0)
        return cls(entries, wall_s, len(decoding), split)

    def share(self, cause: TimeCause) -> float:
        return sum(entry.seconds for entry in self.entries if entry.cause is cause) / self.wall_s

    @property
    def largest_loss(self) -> LedgerEntry | None:
        """Largest entry of `LOSSES`, unknown if passes that are not split took longer."""
        compared = LOSSES if self.split else (*LOSSES, TimeCause.PASS)
        largest = max(
            (entry for entry in self.entries if entry.cause in compared), key=lambda entry: entry.seconds, default=None
        )
        return None if largest is None or largest.cause is TimeCause.PASS else largest


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
