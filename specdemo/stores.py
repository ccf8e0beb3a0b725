"""State that runs leave for later runs of the same user."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from specdemo.models.chat_caches import Conversation

MAX_STORE_BYTES = 64 << 20  # n-grams and suffixes of a `Stores`


@dataclass
class Stores:
    """Text of earlier runs to draft from, and a conversation, which owns KV caches, session and time."""

    conversation: Conversation | None = None
    drafts: dict[Hashable, Any] = field(default_factory=dict)  # n-grams and suffixes, least recently used first

    def conversation_of(self, chat: bool) -> Conversation | None:
        """Return the conversation, which a chat begins."""
        if chat and self.conversation is None:
            self.conversation = Conversation()
        return self.conversation

    def without_conversation(self) -> Stores:
        """Return a copy without the conversation; runs under way keep theirs."""
        return Stores(drafts=self.drafts.copy())

    @property
    def size_bytes(self) -> int:
        return sum(getattr(store, "size_bytes", 0) for store in list(self.drafts.values()))

    def drop_oldest(self) -> None:
        """Drop drafts until they have at most `MAX_STORE_BYTES`."""
        for key in list(self.drafts):
            if self.size_bytes > MAX_STORE_BYTES:
                self.drafts.pop(key, None)
