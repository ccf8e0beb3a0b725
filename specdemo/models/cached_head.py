"""A drafting head with the rows of a text.

Callers always pass all tokens; rows are addressed by content, and states come from the target's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from specdemo.core.origin import HEAD
from specdemo.core.step import common_prefix
from specdemo.models.engines.head import Head

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler

Result = TypeVar("Result")


class StateSource(Protocol):
    """Interface of the target's cache."""

    def states(self, tokens: Sequence[int], start: int) -> Tensor | None:
        """Return hidden states `[len(tokens) - start, taps, width]`; None if a position was never passed."""


class CachedHead:
    """Function from tokens to draft logits. `target` must have the head's taps."""

    origin = HEAD

    def __init__(self, head: Head, target: StateSource) -> None:
        self.head, self.target = head, target
        self._cache = head.open()
        self._held: list[int] = []  # text of the committed rows

    @property
    def kind(self) -> str:
        """See `Head.kind`."""
        return self.head.kind

    @property
    def ids(self) -> Tensor | None:
        """Target ids of the logits since `start`; None: all."""
        return self._cache.ids

    def longest_draft(self, tokens: Sequence[int]) -> int:
        """Return the most draft tokens after `tokens`."""
        return self.head.longest_draft(len(tokens))

    def expect(self) -> None:
        """See `Head.expect`."""
        self.head.expect(self._cache)

    def start(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the logits `[size]` of the first draft token; None before the first pass of the target."""
        return self._added(tokens, partial(self.head.start, self._cache))

    def step(self, token: int) -> Tensor:
        """Return the logits `[size]` after the draft token `token`."""
        return self.head.step(self._cache, token)

    @property
    def confidence(self) -> float | None:
        """See `Head.confidence`."""
        return self.head.confidence(self._cache)

    def draft_rows(self) -> Any:
        """Return the draft rows, for `restore`."""
        return self._cache.draft_rows()

    def restore(self, rows: Any) -> None:
        """Continue after these draft rows."""
        self._cache.restore(rows)

    def sample_chain(
        self, tokens: Sequence[int], sampler: ChainSampler, count: int, threshold: float
    ) -> list[int] | None:
        """Draft in a single call, see `Head.sample_chain`; return None if impossible."""
        head = self.head.sample_chain

        def run(following: list[int], states: Tensor, held: int) -> list[int] | None:
            return head(self._cache, following, states, held, sampler, count, threshold)

        return self._added(tokens, run)

    @property
    def kv_bytes(self) -> int:
        return self._cache.kv_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._cache.reserved_bytes

    def prepare(self, end: int) -> None:
        """See `Head.prepare`."""
        self.head.prepare(self._cache, end)

    def drop_recordings(self) -> None:
        self._cache.drop_recordings()

    def close(self) -> None:
        self._cache.clear()
        self._held = []

    def _added(self, tokens: Sequence[int], run: Callable[..., Result | None]) -> Result | None:
        rows = self._missing(tokens)
        if rows is None:
            return None
        self._held = self._held[: rows[2] + 1]
        try:
            result = run(*rows)
        except BaseException:
            self._cache.keep(0)
            self._held = []
            raise
        if result is not None:
            self._held = list(tokens)
        return result

    def _missing(self, tokens: Sequence[int]) -> tuple[list[int], Tensor, int] | None:
        """Return following tokens and states of the rows to add, at least one, and the number of rows before."""
        if len(tokens) < 2:
            return None
        held = min(max(0, common_prefix(self._held, tokens) - 1), len(tokens) - 2)
        states = self.target.states(tokens[:-1], held)
        if states is None:
            return None
        return list(tokens[held + 1 :]), states, held
