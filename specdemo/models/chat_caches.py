"""KV caches of conversations between turns."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from specdemo.models.kv_cache import CachedModel


class Conversation:
    """Owner of caches."""


class ChatCaches:
    """Caches by conversation, least recently used first."""

    def __init__(self, is_loaded: Callable[[Any], bool], budget_bytes: int = 1 << 30) -> None:
        self._is_loaded, self._budget_bytes = is_loaded, budget_bytes
        self._caches: WeakKeyDictionary[Conversation, dict[Hashable, CachedModel]] = WeakKeyDictionary()

    @property
    def reserved_bytes(self) -> int:
        return sum(cache.reserved_bytes for caches in self._caches.values() for cache in caches.values())

    def take(self, conversation: Conversation, key: Hashable, model: Any) -> CachedModel | None:
        """Remove a cache of `model` for exclusive use."""
        cache = self._caches.get(conversation, {}).pop(key, None)
        return cache if cache is not None and cache.model is model else None

    def put(self, conversation: Conversation, key: Hashable, cache: CachedModel) -> None:
        """Retain a cache unless its model was unloaded."""
        if self._is_loaded(cache.model):
            self._caches[conversation] = {**self._caches.pop(conversation, {}), key: cache}
            while self.reserved_bytes > self._budget_bytes:
                self.evict()

    def evict(self) -> bool:
        """Free the oldest caches; return False without any."""
        oldest = next(self._caches.keys(), None)
        return oldest is not None and self._caches.pop(oldest, None) is not None

    def drop_unloaded(self) -> None:
        for conversation, caches in list(self._caches.items()):
            kept = {key: cache for key, cache in caches.items() if self._is_loaded(cache.model)}
            if kept:
                self._caches[conversation] = kept
            else:
                del self._caches[conversation]

    def clear(self) -> None:
        self._caches.clear()
