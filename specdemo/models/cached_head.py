"""Drafting heads, which draft from hidden states of the target.

Row t of a text x combines the target's states at position t with the embedding of x[t + 1] and predicts x[t + 2]
(EAGLE, 2401.15077). Its rotary position is t, and it attends to the last `Head.window` rows up to t. A text of L tokens
has the committed rows 0 to L - 2, of which those that no draft sees may be missing: a long prompt needs no more rows
than a window. Draft row i has position L - 1 + i and receives the head's own state of the row before in place of the
target's. Medusa heads (2401.10774) have the last row only: head i predicts draft token i from its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdemo.core.step import HEAD, Draft, common_prefix
from specdemo.models.engines.engine import BufferCache, RepeatedPasses

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler, UnreadDraft

MOST_CONTEXT_TOKENS = 1024


class StateSource(Protocol):
    """Interface of the target's cache."""

    def states(self, tokens: Sequence[int], start: int) -> Tensor | None:
        """Return hidden states `[len(tokens) - start, taps, width]`; None if a position was never passed."""


class Head(ABC):
    """Base class of heads: weights, which texts share."""

    kind: str  # drafting method
    taps: tuple[int, ...]  # states of the target that a row receives, see `engine.Cache`
    ids: Tensor | None  # int64 `[size]`, ascending: static draft vocabulary; None: all ids
    extends: bool  # True if tokens of a text extend the draft vocabulary
    window = 1024  # last rows that a row sees, with its own
    device = torch.device("cpu")
    encoder = False

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    @abstractmethod
    def longest_draft(self, length: int) -> int:
        """Return the most draft tokens after `length` tokens."""

    @abstractmethod
    def open(self, target: StateSource) -> CachedHead:
        """Return the head for a text of `target`, which has its taps."""

    @cached_property
    def static(self) -> frozenset[int]:
        """Tokens of the static draft vocabulary."""
        return frozenset(() if self.ids is None else self.ids.tolist())


class ContextTokens:
    """The first `MOST_CONTEXT_TOKENS` different tokens of a text besides the `static` ones.

    They depend on the text alone, so drafts remain exact.
    """

    def __init__(self, static: Collection[int]) -> None:
        self._static = static
        self.tokens: list[int] = []
        self._own: set[int] = set()
        self._first_positions: list[int] = []

    def update(self, following: Sequence[int], held: int) -> int:
        """Read the tokens `following` position `held`; return the number of unchanged `tokens`."""
        unchanged = bisect_right(self._first_positions, held)
        self._own.difference_update(self.tokens[unchanged:])
        del self.tokens[unchanged:], self._first_positions[unchanged:]
        for position, token in enumerate(following, held + 1):
            if token not in self._static and token not in self._own and len(self.tokens) < MOST_CONTEXT_TOKENS:
                self._own.add(token)
                self.tokens.append(token)
                self._first_positions.append(position)
        return unchanged


class CachedHead(ABC):
    """Function from the tokens of a text to draft logits, with the cache of a model of the head's layers.

    Callers always pass all tokens; rows are addressed by content, and states come from the target's cache.
    """

    origin = HEAD
    confidence: float | None = None  # see `DraftScorer`

    def __init__(self, head: Head, target: StateSource, cache: BufferCache) -> None:
        self.head, self.cache = head, cache
        self.target = target
        self.ids = head.ids  # target ids of the logits since `start`, those of the head first; None: all
        self._cached_tokens: list[int] = []  # text of the committed rows
        self._first = 0  # the first of these rows that is stored
        self._branches: dict[int, Any] = {}  # draft rows up to each scored node of a tree
        self._context: ContextTokens | None = None
        if head.extends and head.ids is not None:
            self._context = ContextTokens(head.static)
            self._extended_ids = pad(head.ids, (0, MOST_CONTEXT_TOKENS))

    @property
    def kind(self) -> str:
        return self.head.kind

    def longest_draft(self, tokens: Sequence[int]) -> int:
        return self.head.longest_draft(len(tokens))

    def expect(self) -> None:  # noqa: B027
        """Prepare for `start` while the caller does other work."""

    def prepare(self, passes: RepeatedPasses) -> None:  # noqa: B027
        """Record draft rows and chains for these passes of the target, if possible."""

    def start(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the logits `[size]` of the first draft token; None before the first pass of the target."""
        rows = self._begin(tokens)
        if rows is None:
            return None
        logits = self.start_rows(*rows)
        self._cached_tokens = list(tokens)
        return logits

    @abstractmethod
    def start_rows(self, following: list[int], states: Tensor, held: int) -> Tensor:
        """Add committed rows after the first `held`; return the logits `[size]` of the last row.

        Row held + i receives `states[i]`, `[taps, width]`, and the token `following[i]`. Draft rows are dropped.
        """

    @abstractmethod
    def step(self, token: int) -> Tensor:
        """Continue the draft with `token`; return the logits `[size]` of the next."""

    def score_nodes(self, tokens: Sequence[int], draft: Draft, nodes: Sequence[int]) -> list[Tensor] | None:
        """Return the logits after nodes of a tree, in turn, see `DraftScorer`."""
        scored = []
        for node in nodes:
            if node < 0:
                self._branches = {}
                logits = self.start(tokens)
            else:
                self.restore(self._branches[draft.parents[node]])
                logits = self.step(draft.tokens[node])
            if logits is None:
                return None
            self._branches[node] = self.draft_rows()
            scored.append(logits)
        return scored

    def sample_chain(
        self, tokens: Sequence[int], sampler: ChainSampler, limits: Sequence[float]
    ) -> list[int] | UnreadDraft | None:
        """Draft in a single call, see `DraftScorer`; return None if unsupported."""
        return None

    @abstractmethod
    def draft_rows(self) -> Any:
        """Return a copy of the draft rows, for `restore`."""

    @abstractmethod
    def restore(self, rows: Any) -> None:
        """Continue after these draft rows, before the next `start`."""

    @property
    def reserved_bytes(self) -> int:
        return self.cache.reserved_bytes

    def close(self) -> None:
        """Overwrite the memory of the text."""
        self.cache.clear()
        self._cached_tokens = []
        self._branches = {}
        self._extend([], -1)

    @abstractmethod
    def _write_outputs(self, first: int, tokens: list[int]) -> None:
        """Store the target's output rows of `tokens`, which follow the first `first` outputs and replace all others."""

    def _extend(self, following: Sequence[int], held: int) -> None:
        """Add tokens that follow position `held` to the draft vocabulary; remove those of a former text."""
        if self._context is None:
            return
        before = len(self._context.tokens)
        unchanged = self._context.update(following, held)
        if before == unchanged == len(self._context.tokens):
            return
        added = self._context.tokens[unchanged:]
        first = len(self._extended_ids) - MOST_CONTEXT_TOKENS + unchanged
        if unchanged < before:
            self._extended_ids = self._extended_ids.clone()  # earlier drafts refer to it
        self.ids = self._extended_ids[: first + len(added)]
        if self.ids.device.type != "cpu":
            self.ids[first:] = torch.tensor(added, device=self.ids.device)
        else:
            self.ids.numpy()[first:] = added
        self._write_outputs(first, added)

    def _begin(self, tokens: Sequence[int]) -> tuple[list[int], Tensor, int] | None:
        """Return the rows to add, see `_missing`; until the caller sets `_cached_tokens`, the cache has no rows."""
        rows = self._missing(tokens)
        if rows is not None:
            known = rows[2] if self._cached_tokens else 0  # missing rows extend the vocabulary as well
            self._cached_tokens = []
            self._extend(tokens[known + 1 :], known)
        return rows

    def _missing(self, tokens: Sequence[int]) -> tuple[list[int], Tensor, int] | None:
        """Return following tokens and states of the rows to add, at least one, and the number of rows before."""
        if len(tokens) < 2:
            return None
        seen = max(0, len(tokens) - 1 - self.head.window)
        held = min(common_prefix(self._cached_tokens, tokens) - 1, len(tokens) - 2)
        if held < seen or self._first > seen:
            self._cached_tokens = []
            self._first = held = seen
            self.cache.keep(held)
        states = self.target.states(tokens[:-1], held)
        if states is None:
            return None
        return list(tokens[held + 1 :]), states, held
