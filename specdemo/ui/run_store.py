"""Store of active and recent runs, bounded per network and in total, with the cockpit's queries about them."""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from specdemo.core.errors import UserError
from specdemo.core.trace import MAX_CHARACTERS
from specdemo.models.zoo import ASSETS
from specdemo.remote.admission import network_of
from specdemo.ui.frames import Run, read_traces
from specdemo.ui.visitors import Visitors

RECORDED = ASSETS / "traces"
_RUN_CHARACTERS = 4_000  # memory of a run without its text, in characters


class RunStore:
    """Store of all active runs and a bounded number of finished runs, limited by the networks of visitors."""

    def __init__(
        self,
        visitors: Visitors | None = None,
        per_network: int = 64,
        max_characters: int = 256_000_000,
        max_trace: int | None = None,
        admit: Callable[[str], None] = lambda address: None,
    ) -> None:
        self.visitors = visitors if visitors is not None else Visitors()
        self._per_network, self._max_characters = per_network, max_characters
        self._max_trace, self._admit = min(max_trace or MAX_CHARACTERS, MAX_CHARACTERS), admit
        self._runs: OrderedDict[str, Run] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def new(self, visitor: str, plan: tuple[str, ...], address: str = "", run_id: str = "") -> Run:
        """Create a run and stop the visitor's previous run. Raises `UserError` for a known `run_id`."""
        if self.get(run_id):
            raise UserError("the id of a run must be new: reload the page")
        run = Run(plan, run_id, visitor=visitor)
        if (previous := self.latest(visitor)) is not None:
            previous.stop()
        self.visitors.get_or_add(visitor).run = run.id
        self.keep(run, address)
        return run

    def keep(self, run: Run, address: str = "") -> None:
        run.network = network_of(address)
        with self._lock:
            self._runs[run.id] = run
            while (dropped := self._surplus(run)) is not None:
                del self._runs[dropped.id]

    def _surplus(self, newest: Run) -> Run | None:
        """Return a run to drop: of this network if above a limit, else of the network with most characters."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for run in self._runs.values():
            counts[run.network] += 1
            sizes[run.network] += run.size + _RUN_CHARACTERS
        finished = [run for run in self._runs.values() if run.over and run is not newest]
        if counts[newest.network] > self._per_network or sizes[newest.network] > self._max_characters // 2:
            finished = [run for run in finished if run.network == newest.network]
        elif sizes.total() <= self._max_characters:
            return None
        # First refused requests, which have no text.
        return min(finished, key=lambda run: (-sizes[run.network], bool(run.records)), default=None)

    def get(self, run_id: object) -> Run | None:
        with self._lock:
            if not isinstance(run_id, str) or run_id not in self._runs:
                return None
            self._runs.move_to_end(run_id)
            return self._runs[run_id]

    def latest(self, visitor: str) -> Run | None:
        return self.get(self.visitors.find(visitor).run)

    def __len__(self) -> int:
        return len(self._runs)

    def import_trace(self, text: Any, address: str = "") -> str:
        """Return a frame that shows the traces of a file, or `{"refused": cause}`."""
        try:
            self._admit(address)
            return self._open(text, address, self._max_trace)
        except UserError as error:
            return json.dumps({"refused": str(error)})

    def _open(self, text: Any, address: str, max_characters: int = MAX_CHARACTERS) -> str:
        run = read_traces(text, max_characters)
        self.keep(run, address)
        return run.frame(0)

    def recorded(self, name: Any, address: str = "") -> str:
        """Return a frame that shows a bundled trace, or `{"refused": cause}`."""
        if name not in recordings():
            return json.dumps({"refused": "there is no recorded trace of this name: choose one of the list"})
        return self._open((RECORDED / f"{name}.jsonl").read_text("utf-8"), address)


def recordings() -> list[str]:
    """Return the names of bundled traces."""
    return sorted(path.stem for path in RECORDED.glob("*.jsonl"))
