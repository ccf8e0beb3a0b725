"""Sessions of an edge with services."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from specdemo.remote.protocol import VerifyConfig
from specdemo.worker import run_in_thread

_RANDOM_BYTES = 24


@dataclass(frozen=True)
class ContextState:
    """Context of a service at the end of a turn."""

    context_id: str
    epoch: int
    step: int
    tokens: list[int]
    delete: Callable[[], object] = field(compare=False)


@dataclass
class RemoteSession:
    """Secret owner of contexts.

    `lasts`: it keeps them for the next turn of a conversation, and deletes them when it is garbage-collected.
    """

    lasts: bool = False
    id: str = field(default_factory=lambda: secrets.token_urlsafe(_RANDOM_BYTES), repr=False)
    _contexts: dict[str, ContextState] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, _delete, self._contexts).atexit = False  # they expire

    def take(self, config: VerifyConfig) -> ContextState | None:
        return self._contexts.pop(config.model_dump_json(), None)

    def keep(self, config: VerifyConfig, context: ContextState) -> None:
        self._contexts[config.model_dump_json()] = context


def _delete(contexts: dict[str, ContextState]) -> None:
    for context in contexts.values():
        run_in_thread(context.delete)
