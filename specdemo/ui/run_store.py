"""Recent runs, bounded in number and size, and the cockpit's queries about them."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from specdemo.core.errors import UserError
from specdemo.models.zoo import ASSETS
from specdemo.ui import step_views
from specdemo.ui.frames import Run, read_traces
from specdemo.ui.lane import Lane

RECORDED = ASSETS / "traces"


class RunStore:
    """Store of the most recently used runs, and always of the newest.

    Arguments of queries are lists, as the browser sends them.
    """

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

    @property
    def queries(self) -> list[Callable[[Any], str | None]]:
        lanes = [self.trace, self.csv, self.svg, self.round, self.figures]
        return [*lanes, self.trace_since, self.import_trace, self.recorded, self.stop_run]

    def trace_since(self, query: Any) -> str | None:
        """Return the frame after `[run id, number of records received]`."""
        run_id, count = query if isinstance(query, list) and len(query) == 2 else (None, 0)
        run = self.get(run_id)
        if run is None or not isinstance(count, int) or count < 0:
            return None
        run.seen = time.monotonic()
        return run.frame(count)

    def trace(self, query: Any) -> str | None:
        """Return the trace of `[run id, lane]`; of all lanes if the lane is "all"."""
        run, lane = self._run_and_lane(query)
        if run is None:
            return None
        return "".join(filter(None, map(run.trace, run.plan))) if lane == "all" else run.trace(lane)

    def csv(self, query: Any) -> str | None:
        """Return the table of steps of `[run id, lane]`."""
        lane = self._begun(query)
        return step_views.as_csv(lane) if lane else None

    def svg(self, query: Any) -> str | None:
        """Return the SVG export of `[run id, lane]`."""
        lane = self._begun(query)
        return step_views.as_svg(lane) if lane else None

    def round(self, query: Any) -> str | None:
        """Return a step in detail, as JSON: `[run id, lane, number]`."""
        if not isinstance(query, list) or len(query) != 3 or type(query[2]) is not int:
            return None
        lane = self._begun(query[:2])
        view = step_views.step_picture(lane, query[2]) if lane else None
        return _json(view) if view else None

    def figures(self, query: Any) -> str | None:
        """Return table and chart data of `[run id, lane]`, as JSON."""
        lane = self._begun(query)
        return _json(step_views.figures(lane)) if lane else None

    def import_trace(self, text: Any) -> str:
        """Return a frame that shows the traces of a file, or `{"refused": cause}`."""
        try:
            run = read_traces(text)
        except UserError as error:
            return _json({"refused": str(error)})
        self.keep(run)
        return run.frame(0)

    def recorded(self, name: Any) -> str | None:
        """Return names and titles of the bundled traces as JSON; given a name, a frame that shows that trace."""
        paths = {path.stem: path for path in sorted(RECORDED.glob("*.jsonl"))}
        if not name:
            return _json([[stem, stem.replace("-", " ")] for stem in paths])
        return self.import_trace(paths[name].read_text("utf-8")) if name in paths else None

    def stop_run(self, run_id: Any) -> None:
        """Stop a run. Its frames continue until the end, so no tokens are lost."""
        if run := self.get(run_id):
            run.stop()

    def _run_and_lane(self, query: Any) -> tuple[Run | None, str]:
        run_id, lane = query if isinstance(query, list) and len(query) == 2 else (None, "")
        return self.get(run_id), lane if isinstance(lane, str) else ""

    def _begun(self, query: Any) -> Lane | None:
        run, name = self._run_and_lane(query)
        lane = run.lanes.get(name) if run else None
        return lane if lane and lane.begun else None


def _json(value: Any) -> str:
    """Compact JSON that cannot be parsed as markup."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
