"""Data of the visitors of the page: conversations, learned n-grams, latest runs and measurements."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from specdemo.core.formats import NOTHING, percent
from specdemo.models.chat_caches import Stores
from specdemo.models.tokenizer import ChatMessage
from specdemo.ui.frames import Run
from specdemo.ui.run_figures import Lanes, Speeds, rates, tiles

REMEMBERED = 256  # visitors
MAX_STORED_BYTES = 512 << 20  # n-grams and suffixes of all visitors


@dataclass(eq=False)
class Visitor:
    """Data of a visitor; a message of the user and an answer are a turn of the conversation."""

    messages: list[ChatMessage] = field(default_factory=list)  # clean text
    footers: list[str] = field(default_factory=list)  # one per answer
    began: datetime | None = None  # time of the first turn, which chat templates read
    stores: dict[str, Stores] = field(default_factory=dict)  # by lane
    run: str = ""  # id of the latest run
    measurements: dict[Any, Any] = field(default_factory=dict)  # latest, by panel
    prediction: Any = None  # latest prediction of the speed-up

    def begin_turn(self, prompt: Any, turn: str) -> list[ChatMessage]:
        """Return the messages before a turn: none, all, or those before the last turn if it had the same prompt."""
        if turn == "new" or self.began is None:
            self.began = datetime.now()
        if turn == "next":
            return [*self.messages]
        return self.messages[:-2] if turn == "repeat" and self.last_message == prompt else []

    @property
    def last_message(self) -> str:
        """Last message of the user, or an empty text."""
        return self.messages[-2]["content"] if len(self.messages) > 1 else ""

    def remember(self, prompt: str, run: Run) -> None:
        """Store the run's history and the first lane's turn as the conversation, unless that was ended meanwhile."""
        lane = run.lanes[run.plan[0]]
        if self.began and lane.recipe.get("chat") and lane.steps and run.phase[0] != "failed":
            answer = "".join(event.text for event in lane.steps)
            turn: list[ChatMessage] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            self.messages = [*run.history, *turn]
            self.footers = [*self.footers[: len(run.history) // 2], answer_footer(run.lanes, run.speeds)]

    def end_conversation(self) -> None:
        """Forget the conversation. A run under way keeps its stores, and releases them."""
        for lane, stores in list(self.stores.items()):  # a job may add lanes
            self.stores[lane] = stores.without_conversation()
        self.messages, self.footers = [], []
        self.began = None


class Visitors:
    """The last visitors, by the private names of their sessions. A visitor without a name is not kept."""

    def __init__(self) -> None:
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, name: str) -> Visitor:
        """Return a known visitor, or a new one without keeping it."""
        return self._visitors.get(name) or Visitor()

    def get_or_add(self, name: str) -> Visitor:
        """Return a visitor, kept from now on; the least recent ones above `REMEMBERED` are dropped."""
        if not name:
            return Visitor()
        with self._lock:
            visitor = self._visitors.setdefault(name, Visitor())
            self._visitors.move_to_end(name)
            while len(self._visitors) > REMEMBERED:
                self._visitors.popitem(last=False)
        return visitor

    def end_session(self, name: str) -> None:
        """Release the data of a visitor and stop the measurements; a run ends separately."""
        with self._lock:
            visitor = self._visitors.pop(name, None)
        for started in visitor.measurements.values() if visitor is not None else ():
            started.stop()

    def limit_stores(self, spared: Visitor) -> None:
        """Drop the stores of the least recent visitors above `MAX_STORED_BYTES`, except those of `spared`."""
        with self._lock:
            visitors = [*self._visitors.values()]
        sizes = [sum(stores.size_bytes for stores in list(visitor.stores.values())) for visitor in visitors]
        excess = sum(sizes) - MAX_STORED_BYTES
        for visitor, size in zip(visitors, sizes, strict=True):
            if size and excess > 0 and visitor is not spared:
                visitor.stores = {}  # a run under way keeps its own
                excess -= size


def shown_messages(messages: Sequence[ChatMessage], footers: Sequence[str]) -> list[Any]:
    """Return the messages; each answer ends with its footer."""
    shown: list[Any] = []
    for i, message in enumerate(messages):
        footer = footers[i // 2] if i % 2 and i // 2 < len(footers) else ""
        text = f"{message['content'].strip()}\n\n*{footer}*" if footer else message["content"].strip()
        shown.append({"role": message["role"], "content": text})
    return shown


def answer_footer(lanes: Lanes, speeds: Speeds) -> str:
    """Return the speed, the acceptance rate and the speed-up of the first lane."""
    name, lane = next(iter(lanes.items()))
    accepted = f"{percent(lane.metrics.acceptance_rate)} accepted" if lane.metrics.drafted else ""
    value = tiles(lanes, speeds)["speedup"][0]
    speedup = "" if value == NOTHING else f"{value} the baseline"
    return " · ".join(filter(None, (rates(lanes)[name], accepted, speedup)))
