"""Conversation of a visitor in clean text."""

from __future__ import annotations

from typing import Any

from fakes.trace_records import PREFILL, absorb, end, header, step

from specdemo.models.chat_caches import Conversation
from specdemo.stores import Stores
from specdemo.ui.conversation import Conversations, answer_footer, shown_messages
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC


def answered(history: Any = ()) -> Run:
    run = Run((SPEC,), history=history)
    made = header()
    made["recipe"] = made["recipe"] | {"chat": True}
    drafted = step(1, pieces=["x", "y"], draft=("x", "z"), accepted=(0,), tested=2, verify_s=0.01)
    absorb(run, SPEC, made, PREFILL, drafted, end())
    run.finish()
    return run


def test_each_answer_has_its_footer() -> None:
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": " Hi "},
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": "Yes"},
    ]
    shown = shown_messages(messages, ["10 tok/s"])
    assert [message["content"] for message in shown] == ["Hello", "Hi\n\n*10 tok/s*", "Go on", "Yes"]
    assert [message["role"] for message in shown] == ["user", "assistant"] * 2
    assert shown_messages([], []) == []


def test_footer_names_speed_and_acceptance() -> None:
    run = answered()
    assert answer_footer(run.lanes) == f"{run.lanes[SPEC].rate} · 50 % accepted"


def test_turns_and_footers_of_a_conversation_end_together() -> None:
    conversations = Conversations()
    conversations.remember("ann", "Hello", answered())
    conversations.remember("ann", "Go on", answered(history=conversations.history("ann", "Go on", "next")))
    assert conversations.last_message("ann") == "Go on" and len(conversations.shown("ann")) == 4
    conversations.remember("ann", "New", answered())  # a new conversation
    assert conversations.last_message("ann") == "New" and len(conversations.shown("ann")) == 2
    conversations.forget("ann")
    assert conversations.last_message("ann") == "" and conversations.shown("ann") == []
    kept = Stores(Conversation(), {"ngrams": object()})
    conversations.stores_of("ann")[SPEC] = kept
    conversations.forget("ann")
    assert conversations.stores_of("ann") == {SPEC: Stores(drafts=kept.drafts)}
    assert kept.conversation is not None  # a run uses it
