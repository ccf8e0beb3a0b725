"""Interface of drafting heads, which draft from hidden states of the target.

Row t of a text x combines the target's states at position t with the embedding of x[t + 1] and predicts x[t + 2]
(EAGLE, 2401.15077). Its rotary position is t, and it attends to rows 0 to t. A text of L tokens has the committed rows
0 to L - 2. Draft row i has position L - 1 + i and receives the head's own state of the row before in place of the
target's. Medusa heads (2401.10774) have the last row only: head i predicts draft token i from its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler


@dataclass(frozen=True, eq=False)
class LayerSizes:
    """Sizes of a Llama decoder layer and its rotary embedding."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    epsilon: float
    frequencies: Tensor  # `[head_dim / 2]`, radians per position
    rotary_factor: float  # factor of cosines and sines

    def rotation(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[count, head_dim / 2]`."""
        angles = torch.arange(count)[:, None] * self.frequencies
        return angles.cos() * self.rotary_factor, angles.sin() * self.rotary_factor


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """A stored head. Without its own output or embedding matrix it shares the rows of the target."""

    tensors: Mapping[str, Tensor]
    taps: tuple[int, ...]
    ids: Tensor | None  # see `Head`


@dataclass(frozen=True, eq=False)
class EagleWeights(HeadWeights):
    """An EAGLE-1/2 head, with names such as `layers.0.self_attn.q_proj.weight`."""

    layer: LayerSizes


@dataclass(frozen=True, eq=False)
class Eagle3Weights(HeadWeights):
    """An EAGLE-3 head under the names of SafeAILab, such as `midlayer.self_attn.q_proj.weight`."""

    layer: LayerSizes
    norm_before_residual: bool = False
    norm_output: bool = False  # rows receive the normalised state of the row before

    @property
    def has_further_norms(self) -> bool:
        """True with a norm of all states (`input_norm`), of each state (`fc_norm.0`) or of the output."""
        return self.norm_output or not {"input_norm.weight", "fc_norm.0.weight"}.isdisjoint(self.tensors)


@dataclass(frozen=True, eq=False, kw_only=True)
class DFlashWeights(HeadWeights):
    """A DFlash (2602.06036) or DSpark (2607.05147) head.

    Layers read keys and values of the target's states, and of a block: the last token and mask tokens.
    """

    layer: LayerSizes
    block: int  # rows of a pass
    mask_token: int
    windows: tuple[int | None, ...]  # most positions before the block that a layer sees, None: all
    causal_windows: bool  # rows of a block see no later ones in layers with a window
    from_anchor: bool  # the last token's row drafts as well


@dataclass(frozen=True, eq=False)
class MedusaWeights(HeadWeights):
    """Medusa heads, with names such as `0.0.linear.weight` (block 0 of head 0) and `0.1.weight` (its output matrix)."""

    heads: int
    blocks: int  # residual blocks of a head


def check_token(token: int, count: int) -> None:
    """Raise `ValueError` unless `token` is one of `count` token ids."""
    if not 0 <= token < count:
        raise ValueError(f"token id {token:,} is outside the vocabulary of {count:,} tokens")


class HeadCache(ABC):
    """Keys and values of a head for the rows of a text."""

    length: int  # committed rows; draft rows follow them until the next `start`
    ids: Tensor | None  # int64 `[size]`: target ids of the logits since `start`, those of the head first; None: all ids

    @abstractmethod
    def draft_rows(self) -> Any:
        """Return a copy of the draft rows."""

    @abstractmethod
    def restore(self, rows: Any) -> None:
        """Replace the draft rows, before the next `start`."""

    def drop_recordings(self) -> None:  # noqa: B027
        """Free recorded passes."""

    @abstractmethod
    def keep(self, length: int) -> None:
        """Keep the first `length` committed rows."""

    @abstractmethod
    def clear(self) -> None:
        """Empty the cache and overwrite its memory."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of the committed rows."""

    @property
    @abstractmethod
    def reserved_bytes(self) -> int: ...


class Head(ABC):
    """Base class of heads."""

    kind: str  # drafting method
    taps: tuple[int, ...]  # states of the target that a row receives, see `engine.Cache`
    ids: Tensor | None  # int64 `[size]`, ascending: static draft vocabulary, which texts may extend; None: all ids
    weight_bytes: int
    device = torch.device("cpu")

    @abstractmethod
    def longest_draft(self, length: int) -> int:
        """Return the most draft tokens after `length` tokens."""

    @abstractmethod
    def open(self) -> HeadCache:
        """Return an empty cache."""

    def prepare(self, cache: HeadCache, end: int) -> None:  # noqa: B027
        """Record passes for up to `end` rows."""

    def expect(self, cache: HeadCache) -> None:  # noqa: B027
        """Prepare for `start` while the caller does other work."""

    @abstractmethod
    def start(self, cache: HeadCache, following: list[int], states: Tensor, held: int) -> Tensor:
        """Add committed rows after the first `held`; return the logits `[size]` of the last row.

        Row held + i receives `states[i]`, `[taps, width]`, and the token `following[i]`. Draft rows are dropped.
        """

    @abstractmethod
    def step(self, cache: HeadCache, token: int) -> Tensor:
        """Continue the draft with `token`; return the logits `[size]` of the next."""

    def confidence(self, cache: HeadCache) -> float | None:
        """Return the chance that the token of the last logits is accepted, predicted before it is chosen, if known."""
        return None

    def sample_chain(
        self,
        cache: HeadCache,
        following: list[int],
        states: Tensor,
        held: int,
        sampler: ChainSampler,
        count: int,
        threshold: float,
    ) -> list[int] | None:
        """Call `start` and draft up to `count` tokens; return None if unsupported.

        The draft ends before a token if the product of the largest probabilities (of raw logits) up to it is below
        `threshold`.
        """
        return None
