"""Sessions of an edge with services, and the contexts that they keep."""

from __future__ import annotations

import secrets
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from specdemo.remote.protocol import VerifyConfig

_RANDOM_BYTES = 24


def random_context_id() -> str:
    return uuid.uuid4().hex


@dataclass
class ContextState:
    """Context of a service as the edge assumes it."""

    context_id: str = field(default_factory=random_context_id)
    epoch: int = 0
    step: int = -1
    tokens: list[int] = field(default_factory=list)

    def restart(self, in_new_context: bool) -> None:
        """Send the complete text next."""
        self.tokens = []
        self.epoch += 1
        if in_new_context:
            self.context_id = random_context_id()
            self.epoch = 0


@dataclass
class RemoteSession:
    """Secret owner of contexts.

    `lasts`: it keeps them for the next turn of a conversation, and deletes them when it is garbage-collected.
    """

    lasts: bool = False
    id: str = field(default_factory=lambda: secrets.token_urlsafe(_RANDOM_BYTES), repr=False)
    _contexts: dict[str, tuple[ContextState, Callable[[], object]]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, _delete, self._contexts).atexit = False  # they expire

    def take(self, config: VerifyConfig) -> ContextState:
        """Return the context of the last turn with this configuration, or a new context."""
        earlier = self._contexts.pop(config.model_dump_json(), None)
        return ContextState() if earlier is None else earlier[0]

    def keep(self, config: VerifyConfig, context: ContextState, delete: Callable[[], object]) -> None:
        """Keep a context; `delete` starts its deletion."""
        self._contexts[config.model_dump_json()] = (context, delete)


def _delete(contexts: dict[str, tuple[ContextState, Callable[[], object]]]) -> None:
    for _, delete in contexts.values():
        delete()
