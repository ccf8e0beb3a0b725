"""A stored drafting head: its configuration, sizes and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.models.untrusted import MAX_INT32


@dataclass(frozen=True)
class HeadConfig:
    """Values of the config.json of a head, in which those of nested parts are included."""

    name: str  # of the head
    values: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None, most: int = MAX_INT32) -> int:
        """Return a size. Raises `UserError` for a value that is missing or not within 1 to `most`."""
        value = self.values.get(key) or default
        if type(value) is not int or not 1 <= value <= most:
            problem = "is missing" if value is None else f"is not within 1 to {most:,}"
            raise UserError(f"{key} in config.json of {self.name} {problem}: choose another head")
        return value

    def enabled(self, key: str, default: bool = False) -> bool:
        return self.values.get(key, default) is True


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
    """Tensors of a head. Without its own output or embedding matrix it shares the rows of the target."""

    config: HeadConfig
    tensors: Mapping[str, Tensor]
    taps: tuple[int, ...]  # states of the target that a row receives, see `engine.Cache`
    ids: Tensor | None  # int64 `[size]`, ascending: draft vocabulary; None: all ids
    layer: LayerSizes | None  # None: no decoder layer
