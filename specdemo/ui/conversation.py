"""Conversation in clean text: the messages of a visitor, with the speed of each answer below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdemo.core.formats import percent
from specdemo.models.tokenizer import ChatMessage
from specdemo.ui.lane import Lane
from specdemo.ui.summary import lane_speedup, ratio_text


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
