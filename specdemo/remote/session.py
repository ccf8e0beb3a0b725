"""Sessions of an edge with services."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from specdemo.remote.protocol import VerifyConfig

_RANDOM_BYTES = 24


@dataclass(frozen=True)
class ContextState:
    """Context of a service at the end of a turn."""

    context_id: str
    epoch: int
    step: int
    tokens: list[int]


@dataclass
class RemoteSession:
    """Secret owner of contexts. `lasts`: it keeps them for the next turn of a conversation."""

    lasts: bool = False
    id: str = field(default_factory=lambda: secrets.token_urlsafe(_RANDOM_BYTES), repr=False)
    _contexts: dict[str, ContextState] = field(default_factory=dict, repr=False)

    def take(self, config: VerifyConfig) -> ContextState | None:
        return self._contexts.pop(config.model_dump_json(), None)

    def keep(self, config: VerifyConfig, context: ContextState) -> None:
        self._contexts[config.model_dump_json()] = context
