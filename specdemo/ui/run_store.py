"""Store of active and recent runs, bounded per visitor and in total, with the cockpit's queries about them."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdemo.core.errors import UserError
from specdemo.core.trace import MAX_CHARACTERS
from specdemo.models.zoo import ASSETS
from specdemo.remote.connections import network_of
from specdemo.ui.frames import Run, read_traces

RECORDED = ASSETS / "traces"
_RUN_CHARACTERS = 4_000  # memory of a run without its text, in characters
_ID = re.compile(r"[\w-]{16,64}", re.ASCII)
_MOST_STOPPED = 1024


@dataclass(eq=False)
class RunStore:
    """Store of all active runs and a bounded number of finished runs. A visitor is an address.

    Arguments of queries are lists, as the browser sends them.
    """

    per_visitor: int = 64
    max_characters: int = 256_000_000
    max_trace: int | None = None
    admit: Callable[[str], None] = lambda address: None

    def __post_init__(self) -> None:
        self._runs: OrderedDict[str, Run] = OrderedDict()  # least recently used first
        self._owners: dict[str, str] = {}  # run id -> visitor
        self._latest: dict[str, str] = {}  # session -> run id
        self._stopped: OrderedDict[str, None] = OrderedDict()  # ids of runs that were stopped before they began
        self._lock = threading.Lock()

    def new(self, session: str, plan: tuple[str, ...], address: str = "", run_id: Any = None) -> Run:
        """Create a run and stop the previous run of a known session. Raises `UserError` for a bad `run_id`."""
        run = Run(plan) if run_id is None else Run(plan, run_id)
        if not _is_id(run.id) or self.get(run.id):
            raise UserError("the id of a run must be new, with 16 to 64 letters, digits, _ or -: reload the page")
        if session:
            self.leave(session)
            with self._lock:
                self._latest[session] = run.id
        self.keep(run, address)
        if run.id in self._stopped:
            run.stop()
        return run

    def keep(self, run: Run, address: str = "") -> None:
        with self._lock:
            self._runs[run.id], self._owners[run.id] = run, network_of(address)
            while (dropped := self._surplus(run)) is not None:
                del self._runs[dropped], self._owners[dropped]
                self._latest = {session: run_id for session, run_id in self._latest.items() if run_id != dropped}

    def _surplus(self, newest: Run) -> str | None:
        """Return a run to drop: of this visitor if above a limit, else of the visitor with most characters."""
        sizes: Counter[str] = Counter()
        counts = Counter(self._owners.values())
        for run_id, run in self._runs.items():
            sizes[self._owners[run_id]] += run.size + _RUN_CHARACTERS
        owner = self._owners[newest.id]
        if counts[owner] > self.per_visitor or sizes[owner] > self.max_characters // 2:
            owners = [owner]
        elif sizes.total() > self.max_characters:
            owners = [name for name, _ in sizes.most_common()]
        else:
            return None
        for name in owners:
            finished = [run for run_id, run in self._runs.items() if self._owners[run_id] == name and run.over]
            # Refused requests go first, since they have no text.
            for run in sorted(finished, key=lambda run: bool(run.records)):
                if run is not newest:
                    return run.id
        return None

    def get(self, run_id: object) -> Run | None:
        with self._lock:
            if not isinstance(run_id, str) or run_id not in self._runs:
                return None
            self._runs.move_to_end(run_id)
            return self._runs[run_id]

    def latest(self, session: str) -> Run | None:
        with self._lock:
            return self._runs.get(self._latest.get(session, ""))

    def leave(self, session: str) -> None:
        with self._lock:
            run = self._runs.get(self._latest.pop(session, ""))
        if run is not None:
            run.stop()

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def queries(self) -> list[Callable[[Any], str | None]]:
        return [self.trace, self.recorded]

    def trace(self, query: Any) -> str | None:
        """Return the trace of `[run id, lane or "all"]`."""
        run_id, lane = query if isinstance(query, list) and len(query) == 2 else (None, "")
        run = self.get(run_id)
        if run is None or not isinstance(lane, str):
            return None
        return "".join(filter(None, map(run.trace, run.plan))) if lane == "all" else run.trace(lane)

    def import_trace(self, text: Any, address: str = "") -> str:
        """Return a frame that shows the traces of a file, or `{"refused": cause}`."""
        try:
            self.admit(address)
        except UserError as error:
            return _json({"refused": str(error)})
        return self._opened(text, address, min(self.max_trace or MAX_CHARACTERS, MAX_CHARACTERS))

    def _opened(self, text: Any, address: str, max_characters: int) -> str:
        try:
            run = read_traces(text, max_characters)
        except UserError as error:
            return _json({"refused": str(error)})
        self.keep(run, address)
        return run.frame(0)

    def recorded(self, name: Any, address: str = "") -> str | None:
        """Return names and titles of bundled traces, or a frame with the named trace."""
        paths = {path.stem: path for path in sorted(RECORDED.glob("*.jsonl"))}
        if not name:
            return _json([[stem, stem.replace("-", " ")] for stem in paths])
        if not isinstance(name, str) or name not in paths:
            return _json({"refused": "there is no recorded trace of this name: choose one of the list"})
        return self._opened(paths[name].read_text("utf-8"), address, MAX_CHARACTERS)

    def stop_run(self, run_id: Any) -> None:
        """Stop a run, also before it begins. Its frames continue until the end, so no tokens are lost."""
        if run := self.get(run_id):
            run.stop()
        elif _is_id(run_id):
            with self._lock:
                self._stopped[run_id] = None
                while len(self._stopped) > _MOST_STOPPED:
                    self._stopped.popitem(last=False)


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
