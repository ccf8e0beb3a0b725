"""Source of a verdict, and measurements of the link between drafter and target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any


class Source(StrEnum):
    """Component or fallback that decided about the draft of a step."""

    TARGET = "target"
    GATE = "gate"
    PROVISIONAL = "provisional"
    ALONE = "alone"  # the mode is edge_only, or the connection was lost
    LATE = "late"  # response to an earlier request
    UNREPORTED = "unreported"  # another engine, which does not report whether the token was drafted

    @property
    def by_target(self) -> bool:
        return self in (Source.TARGET, Source.LATE, Source.UNREPORTED)


_FLAGS: Mapping[Source, Mapping[str, float]] = {
    Source.TARGET: {"escalated": 1.0},
    Source.GATE: {"escalated": 0.0},
    Source.PROVISIONAL: {"escalated": 1.0, "provisional": 1.0},
    Source.ALONE: {"escalated": 0.0, "edge": 1.0},
    Source.LATE: {"escalated": 1.0},
    Source.UNREPORTED: {},
}


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Measurements of a step over a link, in seconds; None: not measured.

    `switched` is 1 if another service continued, after `gap_s`; `numerics` is 1 if it rounds differently.
    `confirmed` counts the provisional tokens that a late response contains; `overruled` is 1 if it contradicts them.
    """

    hard_ratio: float | None = None
    cloud_s: float | None = None
    rtt_s: float | None = None  # excludes `cloud_s` and `gap_s`
    sent: int | None = None  # number of messages with repetitions
    rows: int | None = None  # draft distributions that the server requested
    confirmed: int | None = None
    overruled: int | None = None
    lost: int | None = None  # 1 if the connection was lost in this step
    switched: int | None = None
    numerics: int | None = None
    gap_s: float | None = None
    reread: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    up_s: float | None = None
    down_s: float | None = None

    @classmethod
    def of(cls, remote: Mapping[str, float]) -> LinkStats:
        """Read the frozen keys, ignoring others."""
        values: dict[str, Any] = {name: remote[name] for name in _NAMES if name in remote}
        return cls(**values)

    def as_dict(self, source: Source, request_sent: bool) -> dict[str, float]:
        """Return the frozen keys of a step, as floats; a measure that is None has no key."""
        waiting = {"pending": 1.0} if source is Source.PROVISIONAL and not request_sent else {}
        measures = {name: float(value) for name in _NAMES if (value := getattr(self, name)) is not None}
        return {**_FLAGS[source], **waiting, **measures}


_NAMES = tuple(field.name for field in fields(LinkStats))


def source_of(remote: Mapping[str, float], has_choices: bool) -> tuple[Source, bool]:
    """Return source and `request_sent`; late responses lack choices."""
    if remote.get("provisional"):
        return Source.PROVISIONAL, not remote.get("pending")
    if remote.get("edge"):
        return Source.ALONE, False
    if remote.get("escalated") == 0:
        return Source.GATE, False
    late = "confirmed" in remote and not has_choices
    return (Source.LATE, False) if late else (Source.TARGET, True)
