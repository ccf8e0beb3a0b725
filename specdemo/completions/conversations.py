"""Stores of earlier requests by content, so that a resent conversation reuses its KV caches."""

from __future__ import annotations

from collections import OrderedDict

from specdemo.core.step import common_prefix
from specdemo.models.chat_caches import Conversation
from specdemo.stores import Stores

_MOST = 256  # conversations; the memory of their caches is bounded by `ChatCaches`


class ConversationStores:
    """Stores by owner, prompt and answer, least recently used first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, tuple[str, str, str, Stores]] = OrderedDict()  # owner, prompt, answer
        self._next = 0

    def take(self, owner: str, prompt: str) -> Stores:
        """Remove and return the owner's stores that share most text with `prompt`, or new stores.

        They must share the earlier prompt, or half of prompt and answer: otherwise more is lost than reused.
        """
        best, longest = None, 0
        for key, (name, earlier, answer, _) in self._entries.items():
            if name != owner:
                continue
            shared = common_prefix(prompt, earlier + answer)
            if shared > longest and shared >= min(len(earlier), (len(earlier) + len(answer)) / 2):
                best, longest = key, shared
        return Stores(Conversation()) if best is None else self._entries.pop(best)[-1]

    def put(self, owner: str, prompt: str, answer: str, stores: Stores) -> None:
        self._entries[self._next] = owner, prompt, answer, stores
        self._next += 1
        while len(self._entries) > _MOST:
            self._entries.popitem(last=False)
