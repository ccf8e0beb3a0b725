"""Conversation of a visitor in clean text."""

from typing import Any
from unittest.mock import Mock

from fakes.trace_records import PREFILL, absorb, end, header, step

from specdemo.models.chat_caches import Conversation
from specdemo.stores import Stores
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC
from specdemo.ui.visitors import Visitor, Visitors


def answered(history: Any = (), how: str = "length") -> Run:
    run = Run((SPEC,), history=history)
    made = header()
    made["recipe"] = made["recipe"] | {"chat": True}
    drafted = step(1, pieces=["x", "y"], draft=("x", "z"), accepted=(0,), tested=2, verify_s=0.01)
    absorb(run, SPEC, made, PREFILL, drafted, end(how))
    run.finish()
    return run


def test_turns_and_footers_of_a_conversation_end_together() -> None:
    ann = Visitor()
    ann.remember("Hello", answered())
    ann.remember("Go on", answered(history=ann.begin_turn("Go on", "next")))
    assert ann.last_message == "Go on" and (len(ann.messages), len(ann.footers)) == (4, 2)
    assert ann.begin_turn("Go on", "repeat") == ann.messages[:2] and ann.begin_turn("Other", "repeat") == []
    ann.remember("New", answered(history=ann.begin_turn("New", "new")))
    assert ann.last_message == "New" and (len(ann.messages), len(ann.footers)) == (2, 1)
    ann.remember("Stopped", answered(history=ann.begin_turn("Stopped", "next"), how="cancelled"))
    assert ann.last_message == "Stopped" and (len(ann.messages), len(ann.footers)) == (4, 2)
    ann.remember("Failed", answered(history=ann.begin_turn("Failed", "next"), how="error"))
    assert ann.last_message == "Stopped"
    kept = ann.stores[SPEC] = Stores(Conversation(), {"ngrams": object()})
    ann.end_conversation()
    assert ann.last_message == "" and not ann.messages and not ann.footers
    assert ann.stores == {SPEC: Stores(drafts=kept.drafts)}
    assert kept.conversation is not None  # a run uses it


def test_a_visitor_who_leaves_is_forgotten_and_the_bench_ends() -> None:
    visitors, bench = Visitors(), Mock()
    ann = visitors.enter("ann")
    ann.bench = bench
    assert visitors.find("ann") is visitors.enter("ann") is ann
    visitors.leave("ann")
    visitors.leave("nobody")
    assert visitors.find("ann") is not ann and bench.stop.call_count == 1
    assert visitors.find("ann") is not visitors.find("ann")  # a look keeps nothing
    assert visitors.enter("") is not visitors.enter("")
