"""The latest runs by id and by visitor: bounded, so that a page that is up for weeks does not grow."""

from __future__ import annotations

import threading
from collections import OrderedDict

from specdemo.ui.frames import Run


class RunStore:
    """The latest runs by id and by visitor: bounded, so that a page that is up for weeks does not grow."""

    def __init__(self, capacity: int = 64, most_lines: int = 200_000) -> None:
        """At most `capacity` runs, and as many as have `most_lines` trace lines together; always the newest."""
        self._capacity, self._most_lines = capacity, most_lines
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._of: dict[str, str] = {}  # visitor -> id of that visitor's latest run
        self._lock = threading.Lock()

    def new(self, visitor: str, plan: tuple[str, ...]) -> Run:
        """A run for this visitor; the one they still had going is asked to stop."""
        self.leave(visitor)
        run = Run(plan)
        with self._lock:
            self._of[visitor] = run.id
        self.keep(run)
        return run

    def keep(self, run: Run) -> None:
        """Hold this run too; those longest unused are dropped."""
        with self._lock:
            self._runs[run.id] = run
            while len(self._runs) > 1 and (len(self._runs) > self._capacity or self._lines() > self._most_lines):
                # first what never came to anything: refusals push out no text
                empty = (run_id for run_id, old in self._runs.items() if old.over and not old.records)
                gone = next(empty, next(iter(self._runs)))
                del self._runs[gone]
                self._of = {who: what for who, what in self._of.items() if what != gone}

    def _lines(self) -> int:
        return sum(len(lane.lines) for run in self._runs.values() for lane in run.lanes.values())

    def get(self, run_id: object) -> Run | None:
        """The run of that id, which thereby becomes the last to be dropped; None if there is none (any more)."""
        with self._lock:
            if not isinstance(run_id, str) or run_id not in self._runs:
                return None
            self._runs.move_to_end(run_id)
            return self._runs[run_id]

    def latest(self, visitor: str) -> Run | None:
        """This visitor's latest run."""
        with self._lock:
            return self._runs.get(self._of.get(visitor, ""))

    def leave(self, visitor: str) -> None:
        """This visitor has gone or starts anew: stop what they had going."""
        with self._lock:
            run = self._runs.get(self._of.pop(visitor, ""))
        if run is not None:
            run.stop()

    def __len__(self) -> int:
        return len(self._runs)
