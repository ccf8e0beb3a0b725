"""Time limit of all requests of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from specdemo.core.errors import UserError

READ_S = 0.1  # additional time per token
_LEAST_S = 0.1


class ConnectionLost(UserError):
    """A step took longer than its `StepDeadline`."""


@dataclass(eq=False)
class StepDeadline:
    """Limit: `lost_s` without progress; in total `lost_s` plus `READ_S` per unread token.

    Progress is a larger prefill position.
    """

    lost_s: float
    unread: int = 0
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._start = self._progress = self.clock()
        self._lost_s, self._position = max(self.lost_s, _LEAST_S), 0

    def reread(self, count: int) -> None:
        """Allow for another prefill of `count` tokens, whose positions start at 0."""
        self.unread, self._position = max(self.unread, count), 0

    def report(self, position: int, length: int) -> bool:
        """Record a prefill position in a text of `length` tokens; return True if it is progress."""
        if not self._position < position <= length:
            return False
        self._position, self._progress = position, self.clock()
        return True

    def remaining(self) -> float:
        return min(self._progress, self._start + READ_S * self.unread) + self._lost_s - self.clock()

    def check(self, url: str, cause: object, advice: str) -> None:
        if self.remaining() <= 0:
            elapsed = self.clock() - self._progress
            raise ConnectionLost(f"the cloud at {url} has made no progress for {elapsed:.0f} s ({cause}): {advice}")
