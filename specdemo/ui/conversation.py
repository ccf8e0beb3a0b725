"""Conversation in clean text: the messages of a visitor, with the speed of each answer below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from specdemo.core.formats import percent
from specdemo.models.tokenizer import ChatMessage
from specdemo.ui.labels import lane_speedup, ratio_text
from specdemo.ui.lane import Lane


def shown_messages(messages: Sequence[ChatMessage], footers: Sequence[str]) -> list[dict[str, str]]:
    """Return the messages; each answer ends with its footer."""
    answers = [message["content"].strip() for message in messages[1::2]]
    shown = []
    for question, answer, footer in zip_longest(messages[::2], answers, footers, fillvalue=""):
        text = f"{answer}\n\n*{footer}*" if footer else answer
        shown += [{"role": "user", "content": question["content"]}, {"role": "assistant", "content": text}]
    return shown


def answer_footer(lanes: Mapping[str, Lane]) -> str:
    """Return the speed, the acceptance rate and the speed-up of the first lane."""
    name, lane = next(iter(lanes.items()))
    ratio = lane_speedup(lanes, name)
    accepted = f"{percent(lane.metrics.acceptance_rate)} accepted" if lane.metrics.drafted else ""
    speedup = "" if ratio is None else f"{ratio_text(ratio)}× the baseline"
    return " · ".join(filter(None, (lane.rate, accepted, speedup)))
