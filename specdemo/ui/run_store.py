"""Recent runs, by id and by visitor, bounded in number and size."""

from __future__ import annotations

import threading
from collections import OrderedDict

from specdemo.ui.frames import Run


class RunStore:
    """Store of the most recently used runs, and always of the newest."""

    def __init__(self, capacity: int = 64, max_characters: int = 256_000_000) -> None:
        self._capacity, self._max_characters = capacity, max_characters
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._latest: dict[str, str] = {}  # visitor -> run id
        self._lock = threading.Lock()

    def new(self, visitor: str, plan: tuple[str, ...]) -> Run:
        """Create a run for this visitor and stop the visitor's previous run."""
        self.leave(visitor)
        run = Run(plan)
        with self._lock:
            self._latest[visitor] = run.id
        self.keep(run)
        return run

    def keep(self, run: Run) -> None:
        with self._lock:
            self._runs[run.id] = run
            while len(self._runs) > 1 and (len(self._runs) > self._capacity or self._size() > self._max_characters):
                # refused requests first: they have no text
                empty = (run_id for run_id, old in self._runs.items() if old.over and not old.records)
                dropped = next(empty, next(iter(self._runs)))
                del self._runs[dropped]
                self._latest = {visitor: run_id for visitor, run_id in self._latest.items() if run_id != dropped}

    def _size(self) -> int:
        return sum(run.size for run in self._runs.values())

    def get(self, run_id: object) -> Run | None:
        with self._lock:
            if not isinstance(run_id, str) or run_id not in self._runs:
                return None
            self._runs.move_to_end(run_id)
            return self._runs[run_id]

    def latest(self, visitor: str) -> Run | None:
        with self._lock:
            return self._runs.get(self._latest.get(visitor, ""))

    def leave(self, visitor: str) -> None:
        with self._lock:
            run = self._runs.get(self._latest.pop(visitor, ""))
        if run is not None:
            run.stop()

    def __len__(self) -> int:
        return len(self._runs)
