"""Conversations of visitors: messages in clean text with the speed of each answer, and what their runs keep."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from specdemo.core.formats import percent
from specdemo.models.tokenizer import ChatMessage
from specdemo.pipeline import CONVERSATION, Stores, stored_bytes
from specdemo.ui.frames import Run
from specdemo.ui.lane import Lane
from specdemo.ui.run_figures import lane_speedup, ratio_text

REMEMBERED = 256  # visitors with stored n-grams and conversations
MAX_STORED_BYTES = 512 << 20  # n-grams and suffixes of all visitors
T = TypeVar("T")


def shown_messages(messages: Sequence[ChatMessage], footers: Sequence[str]) -> list[Any]:
    """Return the messages; each answer ends with its footer."""
    shown: list[Any] = []
    for i, message in enumerate(messages):
        footer = footers[i // 2] if i % 2 and i // 2 < len(footers) else ""
        text = f"{message['content'].strip()}\n\n*{footer}*" if footer else message["content"].strip()
        shown.append({"role": message["role"], "content": text})
    return shown


def answer_footer(lanes: Mapping[str, Lane]) -> str:
    """Return the speed, the acceptance rate and the speed-up of the first lane."""
    name, lane = next(iter(lanes.items()))
    ratio = lane_speedup(lanes, name)
    accepted = f"{percent(lane.metrics.acceptance_rate)} accepted" if lane.metrics.drafted else ""
    speedup = "" if ratio is None else f"{ratio_text(ratio)}× the baseline"
    return " · ".join(filter(None, (lane.rate, accepted, speedup)))


class Conversations:
    """Messages, n-grams and suffixes of the last visitors."""

    def __init__(self) -> None:
        self._messages: OrderedDict[str, list[ChatMessage]] = OrderedDict()
        self._footers: OrderedDict[str, list[str]] = OrderedDict()  # one per answer of a conversation
        self._began: OrderedDict[str, datetime] = OrderedDict()  # time that chat templates read
        self._stores: OrderedDict[str, dict[str, Stores]] = OrderedDict()

    def shown(self, visitor: str) -> list[Any]:
        """Return the messages of a visitor as the page shows them."""
        return shown_messages(self._messages.get(visitor, []), self._footers.get(visitor, []))

    def began(self, visitor: str) -> datetime:
        """Return the time of the first turn."""
        return _kept(self._began, visitor, datetime.now()) if visitor else datetime.now()

    def history(self, visitor: str, prompt: Any, turn: str) -> list[ChatMessage]:
        """Return the messages before a turn: none, all, or those before the last turn if it had the same prompt."""
        if turn == "new":
            self._began.pop(visitor, None)
        earlier = self._messages.get(visitor, []) if turn != "new" else []
        if turn == "repeat":
            return earlier[:-2] if earlier and earlier[-2]["content"] == prompt else []
        return [*earlier]

    def last_message(self, visitor: str) -> str:
        """Return the visitor's last message of the conversation, or an empty text."""
        earlier = self._messages.get(visitor, [])
        return earlier[-2]["content"] if len(earlier) > 1 else ""

    def remember(self, visitor: str, prompt: str, run: Run) -> None:
        """Store the run's history and the first lane's turn as the visitor's conversation."""
        lane = run.lanes[run.plan[0]]
        if lane.recipe.get("chat") and run.phase[0] == "done":
            answer = "".join(event.text for event in lane.steps)
            turn: list[ChatMessage] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            _kept(self._messages, visitor, list[ChatMessage]())[:] = [*run.history, *turn]
            notes = _kept(self._footers, visitor, list[str]())
            notes[:] = [*notes[: len(run.history) // 2], answer_footer(run.lanes)]

    def stores_of(self, visitor: str) -> dict[str, Stores]:
        stores = _kept(self._stores, visitor, dict[str, Stores]())
        sizes = {name: sum(map(stored_bytes, list(lanes.values()))) for name, lanes in [*self._stores.items()]}
        excess = sum(sizes.values()) - MAX_STORED_BYTES
        for name, size in sizes.items():
            if size and excess > 0 and name != visitor:
                self._stores.pop(name, None)  # another thread may have removed it
                excess -= size
        return stores

    def forget(self, visitor: str) -> None:
        """End the visitor's conversation. A run under way keeps its stores, and releases them."""
        lanes = self._stores.get(visitor, {})
        for lane, stores in list(lanes.items()):  # a job may add lanes
            remaining = stores.copy()
            remaining.pop(CONVERSATION, None)
            lanes[lane] = remaining
        self._messages.pop(visitor, None)
        self._footers.pop(visitor, None)

    def leave(self, visitor: str) -> None:
        """Release the data of a session; its run ends separately."""
        self._stores.pop(visitor, None)
        self.forget(visitor)


def _kept(table: OrderedDict[str, T], visitor: str, new: T) -> T:
    value = table.setdefault(visitor, new)
    table.move_to_end(visitor)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
    return value
