"""State that runs leave for later runs of the same user: text to draft from, and KV caches of conversations."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from weakref import ref

import torch

from specdemo.models.kv_cache import CachedModel

MAX_STORE_BYTES = 64 << 20  # n-grams and suffixes of a `Stores`


@dataclass(eq=False)
class Stores:
    """Text of earlier runs to draft from; in a conversation also the owner of KV caches and of a session.

    The caches are closed when it is deleted.
    """

    drafts: dict[Hashable, Any] = field(default_factory=dict)  # n-grams and suffixes, least recently used first
    began: datetime | None = None  # time of the first turn, which chat templates read; None: no conversation
    session: Any = None  # `RemoteSession`, if the target of the conversation is a service

    def without_conversation(self) -> Stores:
        """Return a copy without the conversation; runs under way keep theirs."""
        return Stores(self.drafts.copy())

    @property
    def size_bytes(self) -> int:
        return sum(getattr(store, "size_bytes", 0) for store in list(self.drafts.values()))

    def drop_oldest(self) -> None:
        """Drop drafts until they have at most `MAX_STORE_BYTES`."""
        for key in list(self.drafts):
            if self.size_bytes > MAX_STORE_BYTES:
                self.drafts.pop(key, None)


class ChatCaches:
    """Caches by conversation, least recently used first. Models that are not loaded any more have none."""

    def __init__(self, is_loaded: Callable[[Any], bool], budget_bytes: Callable[[torch.device], int]) -> None:
        self._is_loaded, self._budget_bytes = is_loaded, budget_bytes
        self._caches: dict[ref[Stores], dict[Hashable, CachedModel]] = {}

    @property
    def reserved_bytes(self) -> int:
        # A list, since conversations end in other threads.
        return sum(cache.reserved_bytes for caches in list(self._caches.values()) for cache in caches.values())

    def take(self, conversation: Stores, key: Hashable, model: Any) -> CachedModel | None:
        """Remove a cache of `model` for exclusive use; close a cache of another model."""
        cache = self._caches.get(ref(conversation), {}).pop(key, None)
        if cache is None or cache.model is model:
            return cache
        cache.close()
        return None

    def put(self, conversation: Stores, key: Hashable, cache: CachedModel) -> None:
        """Retain a cache, or close it if its model was unloaded."""
        if not self._is_loaded(cache.model):
            cache.close()
            return
        caches = self._caches.pop(ref(conversation), {})
        if key in caches:
            caches[key].close()
        self._caches[ref(conversation, self._drop)] = {**caches, key: cache}
        budget = self._budget_bytes(cache.model.device)
        for cache in [cache for caches in list(self._caches.values()) for cache in caches.values()]:
            if self.reserved_bytes <= budget:
                return
            cache.drop_recordings()
        self.free(self.reserved_bytes - budget, spared=1)

    def free(self, count: int, kind: str = "", spared: int = 0) -> bool:
        """Close the oldest conversations, except the last `spared`, for `count` bytes; return False without any."""
        missing = count
        for conversation, caches in list(self._caches.items())[: len(self._caches) - spared]:
            sizes = (cache.reserved_bytes for cache in caches.values() if kind in ("", cache.model.device.type))
            if missing > 0 and (size := sum(sizes)):
                self._drop(conversation)
                missing -= size
        return missing < count

    def drop_unloaded(self) -> None:
        for conversation, caches in list(self._caches.items()):
            for key, cache in list(caches.items()):
                if not self._is_loaded(cache.model):
                    caches.pop(key).close()
            if not caches:
                self._caches.pop(conversation, None)

    def clear(self) -> None:
        for conversation in list(self._caches):
            self._drop(conversation)

    def _drop(self, conversation: ref[Stores]) -> None:
        for cache in list(self._caches.pop(conversation, {}).values()):  # other threads may close some
            cache.close()
