"""Forward passes that several jobs share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
class PassLoad:
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


class Batcher:
    """Measures passes for at most `most_texts` texts and records how many share them. Callers take turns."""

    def __init__(self, most_texts: int, clock: Callable[[], float]) -> None:
        self.most_texts = most_texts
        self.texts_per_pass: Counter[int] = Counter()  # number of passes by texts
        self._clock = clock
        self._last_end = 0.0

    def begin(self) -> None:
        """Start the time between passes: no job shared passes before."""
        self._last_end = self._clock()

    def end(self, requests: Sequence[PassRequest], start: float) -> PassLoad | None:
        """Charge each text the duration of the pass that began at `start`. Return its load, None for a single text."""
        between_s = start - self._last_end
        self._last_end = self._clock()
        seconds = self._last_end - start
        for request in requests:
            request.seconds += seconds
        self.texts_per_pass[len(requests)] += 1
        if len(requests) == 1:
            return None
        return PassLoad(len(requests), sum(request.rows for request in requests), seconds, between_s)
