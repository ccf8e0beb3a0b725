"""Time limits of requests, and of all requests of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from specdemo.core.errors import UserError

MAX_TIMEOUT_S = 8.0  # longest wait for a response to a request
READ_S = 0.1  # additional time of a step per unread token
_READ_TIMEOUT_S = 0.01  # additional timeout of a request per unread token
_LEAST_S = 0.1
_LATE_S = 1.0  # a call that ends this late was interrupted


class ConnectionLost(UserError):
    """A step took longer than its `StepDeadline`."""


@dataclass(frozen=True)
class Deadlines:
    """Time limits; unless `strict`, a token is committed provisionally after `deadline_s`."""

    deadline_s: float = 0.4
    lost_s: float = 30.0
    strict: bool = True

    def first_timeout(self, unread: int) -> float:
        return max(self.deadline_s, min(self.deadline_s + _READ_TIMEOUT_S * unread, MAX_TIMEOUT_S))


@dataclass(eq=False)
class StepDeadline:
    """Limit: `lost_s` without progress; in total `lost_s` plus `READ_S` per unread token.

    Progress is a larger prefill position. The time of a call that took longer than `remaining()` is ignored: the
    process was suspended.
    """

    lost_s: float
    unread: int = 0
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._start = self._progress = self._asked = self.clock()
        self._lost_s = max(self.lost_s, _LEAST_S)
        self._position = 0
        self._left = self._lost_s

    def reread(self, count: int) -> None:
        """Allow for another prefill of `count` tokens, whose positions start at 0."""
        self.unread = max(self.unread, count)
        self._position = 0

    def report(self, position: int, length: int) -> bool:
        """Record a prefill position in a text of `length` tokens; return True if it is progress."""
        if not self._position < position <= length:
            return False
        self._position = position
        self._progress = self.clock()
        return True

    def remaining(self) -> float:
        now = self.clock()
        if (since := now - self._asked) > max(self._left, 0.0) + _LATE_S:
            self._start += since
            self._progress += since
        self._asked = now
        self._left = min(self._progress, self._start + READ_S * self.unread) + self._lost_s - now
        return self._left

    def check(self, url: str, cause: object, advice: str) -> None:
        if self.remaining() <= 0:
            elapsed = self.clock() - self._progress
            raise ConnectionLost(f"the cloud at {url} has made no progress for {elapsed:.0f} s ({cause}): {advice}")
