"""Time of a run over a link, by activity.

The delay per direction cannot be measured: it is split evenly around the cloud's pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specdemo.core.link_stats import LinkStats
from specdemo.core.step import Step

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


def link_seconds(step: Step) -> float:
    return sum(seconds for activity, seconds in verification(step) if activity in LINK)
