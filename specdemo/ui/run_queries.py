"""Server functions of the cockpit: missed frames, steps in detail, files to save.

Access requires only the unguessable id of a run, so arguments are validated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specdemo.core.errors import UserError
from specdemo.models.zoo import ASSETS
from specdemo.ui import step_views
from specdemo.ui.frames import Run, read_traces
from specdemo.ui.lane import Lane
from specdemo.ui.run_store import RunStore
from specdemo.ui.svg_export import as_svg

RECORDED = ASSETS / "traces"


class Archive:
    """Queries about `runs`. Arguments are lists, as the browser sends them."""

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs

    @property
    def answers(self) -> list[Callable[[Any], str | None]]:
        return [
            self.trace_since,
            self.trace,
            self.csv,
            self.svg,
            self.round,
            self.figures,
            self.import_trace,
            self.recorded,
            self.stop_run,
        ]

    def trace_since(self, query: Any) -> str | None:
        """Return the frame after `[run id, number of records received]`."""
        run_id, count = query if isinstance(query, list) and len(query) == 2 else (None, 0)
        run = self._runs.get(run_id)
        return run.frame(count) if run and isinstance(count, int) and count >= 0 else None

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
        return as_svg(lane) if lane else None

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
        self._runs.keep(run)
        return run.frame(0)

    def recorded(self, name: Any) -> str | None:
        """Return names and titles of the bundled traces as JSON; given a name, a frame that shows that trace."""
        paths = {path.stem: path for path in sorted(RECORDED.glob("*.jsonl"))}
        if not name:
            return _json([[stem, stem.replace("-", " ")] for stem in paths])
        return self.import_trace(paths[name].read_text("utf-8")) if name in paths else None

    def stop_run(self, run_id: Any) -> None:
        """Stop a run. Its frames continue until the end, so no tokens are lost."""
        if run := self._runs.get(run_id):
            run.stop()

    def _run_and_lane(self, query: Any) -> tuple[Run | None, str]:
        run_id, lane = query if isinstance(query, list) and len(query) == 2 else (None, "")
        return self._runs.get(run_id), lane if isinstance(lane, str) else ""

    def _begun(self, query: Any) -> Lane | None:
        run, name = self._run_and_lane(query)
        lane = run.lanes.get(name) if run else None
        return lane if lane and lane.begun else None


def _json(value: Any) -> str:
    """Compact JSON that cannot be parsed as markup."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
