"""What a browser may ask of the runs that were made: frames it missed, rounds in detail, files to take home.

Whoever knows a run's unguessable id may ask, so whatever arrives is judged: nonsense is answered with nothing. Knows no
gradio and no models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specdemo.core.errors import UserError
from specdemo.models.zoo import ASSETS
from specdemo.ui import step_views as rounds
from specdemo.ui.frames import Run
from specdemo.ui.labels import Lane
from specdemo.ui.run_store import RunStore
from specdemo.ui.svg_export import as_svg
from specdemo.ui.trace_import import read_traces

RECORDED = ASSETS / "traces"


class Archive:
    """Answers for the cockpit, about `runs`."""

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs

    @property
    def answers(self) -> list[Callable[[Any], str | None]]:
        """All that may be asked."""
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

    def trace_since(self, asked: Any) -> str | None:
        """For a browser that missed frames: `[run id, how many records it has]`."""
        run_id, have = asked if isinstance(asked, list) and len(asked) == 2 else (None, 0)
        run = self._runs.get(run_id)
        return run.frame(have) if run and isinstance(have, int) and have >= 0 else None

    def trace(self, asked: Any) -> str | None:
        """The trace to save: `[run id, lane]`; all lanes, one after the other, if the lane is "all"."""
        run, lane = self._lane(asked)
        if run is None:
            return None
        return "".join(filter(None, map(run.trace, run.plan))) if lane == "all" else run.trace(lane)

    def csv(self, asked: Any) -> str | None:
        """The table of rounds to save: `[run id, lane]`."""
        lane = self._begun(asked)
        return rounds.as_csv(lane) if lane else None

    def svg(self, asked: Any) -> str | None:
        """The token stream as a picture to save: `[run id, lane]`."""
        lane = self._begun(asked)
        return as_svg(lane) if lane else None

    def round(self, asked: Any) -> str | None:
        """One round in detail, as JSON: `[run id, lane, number]`."""
        if not isinstance(asked, list) or len(asked) != 3 or type(asked[2]) is not int:
            return None
        lane = self._begun(asked[:2])
        found = rounds.picture(lane, asked[2]) if lane else None
        return _json(found) if found else None

    def figures(self, asked: Any) -> str | None:
        """All rounds of a lane as a table, and what its charts show, as JSON: `[run id, lane]`."""
        lane = self._begun(asked)
        return _json(rounds.figures(lane)) if lane else None

    def import_trace(self, text: Any) -> str:
        """A frame that shows recorded traces, or `{"refused": a sentence}`."""
        try:
            run = read_traces(text)
        except UserError as error:
            return _json({"refused": str(error)})
        self._runs.keep(run)
        return run.frame(0)

    def recorded(self, name: Any) -> str | None:
        """The names and titles of the recorded traces, as JSON; with a name, a frame that shows that one."""
        known = {path.stem: path for path in sorted(RECORDED.glob("*.jsonl"))}
        if not name:
            return _json([[stem, stem.replace("-", " ")] for stem in known])
        return self.import_trace(known[name].read_text("utf-8")) if name in known else None

    def _lane(self, asked: Any) -> tuple[Run | None, str]:
        run_id, lane = asked if isinstance(asked, list) and len(asked) == 2 else (None, "")
        return self._runs.get(run_id), lane if isinstance(lane, str) else ""

    def _begun(self, asked: Any) -> Lane | None:
        """The lane `[run id, lane]`, if it has begun."""
        run, name = self._lane(asked)
        lane = run.lanes.get(name) if run else None
        return lane if lane and lane.recipe else None

    def stop_run(self, run_id: Any) -> None:
        """Stop, which knows the run by its unguessable id. The frames go on to the end, so the tail is not lost."""
        if run := self._runs.get(run_id):
            run.stop()


def _json(value: Any) -> str:
    """As the page takes it: nothing on the way is to take a model's text for markup."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
