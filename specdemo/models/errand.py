"""Long work in a thread of its own, told about at a humane rate and given up on when nobody waits any more.

Whoever wants the work done goes through `progress`, an iterator that may be closed at any time. There are two kinds:
work that leaves the device alone (a download) goes on while its owner does other things; work on the device (loading
weights) runs only while its owner waits, and is parked in between, so that one thread at a time has the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

EVERY_S = 0.1  # between two pieces of news: soon enough for the eye, and whoever shares the thread waits no longer


@dataclass(frozen=True)
class News:
    """What is being done, in words, and how far it has come; `total` 0: that cannot be said."""

    text: str
    done: int = 0
    total: int = 0


Tell = Callable[[News], None]


class GivenUp(Exception):
    """Raised in the work itself, at the next thing it tells, once nobody waits for it."""


def quietly(news: News) -> None:
    """Told to nobody."""


class Errand(Generic[T]):
    """`work(tell)` in a thread of its own. `parked`: it runs only while `progress` is being advanced."""

    def __init__(self, work: Callable[[Tell], T], parked: bool = False) -> None:
        self._work, self._parks = work, parked
        self._changed = threading.Condition()
        self._news: News | None = None
        self._waits = self._over = self._given_up = False
        self._due = 0.0
        self._error: BaseException | None = None
        self._result: T | None = None
        self._thread = threading.Thread(target=self._run, name="errand", daemon=True)

    def progress(self) -> Iterator[News]:
        """Start the work; news until it is over. Raises what it raised; closing gives it up."""
        self._thread.start()
        try:
            while True:
                with self._changed:
                    self._waits = False
                    self._changed.notify_all()
                    if self._parks:
                        self._changed.wait_for(lambda: self._waits or self._over)
                    else:
                        self._changed.wait_for(lambda: self._over, EVERY_S)
                    news, over = self._news, self._over
                if over:
                    break
                if news is not None:
                    yield news
        finally:
            with self._changed:
                self._given_up = True
                self._changed.notify_all()
            if self._parks:
                self._thread.join()  # it has the device until it ends
        if self._error is not None:
            raise self._error

    @property
    def result(self) -> T:
        """What the work returned, once `progress` has come to its end."""
        assert self._over and self._error is None
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._work(self._tell)
        except BaseException as error:  # raised again where the work is waited for
            self._error = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _tell(self, news: News) -> None:
        with self._changed:
            if self._given_up:
                raise GivenUp
            self._news = news
            if self._parks and time.monotonic() >= self._due:
                self._waits = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._waits or self._given_up)
                self._due = time.monotonic() + EVERY_S
                if self._given_up:
                    raise GivenUp
