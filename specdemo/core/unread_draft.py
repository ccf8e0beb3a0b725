"""Drafts on a device, which the host reads together with the result of their verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specdemo.core.distributions import SparseProbs
from specdemo.core.step import Draft

if TYPE_CHECKING:
    from torch import Tensor

    from specdemo.core.sampling import ChainSampler


class UnreadDraft(Draft):
    """A chain that a device drafts; the host reads it when a field is first needed.

    Tensors also contain tokens after the end of the draft. `ids` `[capacity]`: tokens. `values` `[capacity, 4]`: token,
    largest logit, probability of the token, and 1 before the end or 0 after it. `rows` `[capacity, size]`:
    distributions, 0 after the end. `started`, `ended`: CUDA events.
    """

    __setattr__ = object.__setattr__  # fields of a draft are frozen, and stay unset here

    def __init__(
        self, sampler: ChainSampler, ids: Tensor, values: Tensor, rows: Tensor, started: Any, ended: Any
    ) -> None:
        self.sampler = sampler
        self.ids = ids
        self.values = values
        self.rows = rows
        self.started = started
        self.ended = ended
        self.on_read: Callable[[list[int]], object] = lambda tokens: None
        self.known: Draft | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an unset field."""
        return getattr(self.read(), name)

    def __bool__(self) -> bool:
        """Return True, without waiting for the device, unless the draft was read and is empty."""
        return self.known is None or bool(self.known)

    @property
    def is_chain(self) -> bool:
        return True

    @property
    def device_s(self) -> float:
        self.read()
        return self.started.elapsed_time(self.ended) / 1000

    @property
    def included(self) -> Tensor:
        """Column `[capacity, 1]` of `values`: 1 before the end of the draft."""
        return self.values[:, 3:]

    def probs_on_device(self) -> Tensor | None:
        """Return the distributions `[capacity, vocab]`, if tokens are sampled."""
        sampler = self.sampler
        if sampler.sampling.temperature == 0:
            return None
        return self.rows if sampler.ids is None else SparseProbs(sampler.ids, self.rows, sampler.vocab_size).dense()

    def read(self) -> Draft:
        return self.fill(self.values.T.tolist()) if self.known is None else self.known

    def fill(self, columns: Sequence[Sequence[float]]) -> Draft:
        """Return the draft for the transferred columns of `values`."""
        tokens, largest, token_probs, included = columns
        length = int(sum(included))
        sampler, tested = self.sampler, max(1, length)
        sampler.rewind_noise(length)
        if sampler.sampling.temperature == 0:
            sampler.record(list(largest[:tested]), [], None)
        else:
            sampler.record(list(largest[:tested]), list(token_probs[:length]), self.rows[:length].clone())
        new = [int(token) for token in tokens[:length]]
        self.on_read(new)
        self.known = sampler.chain(new)
        return self.known


def unread(draft: Draft) -> UnreadDraft | None:
    """Return a draft that the host has not read."""
    return draft if isinstance(draft, UnreadDraft) and draft.known is None else None
