"""Forward passes that several jobs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

PASS_ROWS = 256
_TEXT_ROWS = 64  # longer texts share no pass

RunEntries: TypeAlias = Callable[[list[Any]], list[Any]]


@dataclass(eq=False)
class PassRequest:
    """Rows of a text for `run`, which returns a result per entry."""

    run: RunEntries
    entry: Any
    rows: int
    result: Any = None
    seconds: float = 0.0
    done: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        self.alone = self.rows > _TEXT_ROWS


@dataclass(frozen=True)
class SharedPassRecord:
    """A shared pass, `between_s` after the previous pass."""

    texts: int
    rows: int
    seconds: float
    between_s: float


def choose_requests(first: PassRequest, others: Iterable[PassRequest], most: int) -> list[PassRequest]:
    """Return at most `most` requests for a pass with `first`."""
    chosen, rows = [first], first.rows
    for other in others if not first.alone else ():
        if len(chosen) < most and other.run == first.run and not other.alone and rows + other.rows <= PASS_ROWS:
            chosen.append(other)
            rows += other.rows
    return chosen
