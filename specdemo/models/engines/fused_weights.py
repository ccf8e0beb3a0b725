"""Base class of weights that are converted to the layout of an engine."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from specdemo.models.engines.engine import Engine

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

Weights = TypeVar("Weights", bound="FusedWeights")


class FusedWeights(ABC):
    """Weights of a decoder in the layout of one engine. Variants with fewer layers share the tensors."""

    def __init__(self, model: PreTrainedModel, angles: Any) -> None:
        self.config: PretrainedConfig = model.config
        self.generation_config: GenerationConfig = model.generation_config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.heads: int = self.config.num_attention_heads
        self.kv_heads: int = getattr(self.config, "num_key_value_heads", None) or self.heads
        self.width: int = self.config.hidden_size
        self.head_dim: int = getattr(self.config, "head_dim", None) or self.width // self.heads
        self.layers: Any = []
        self.channel_scale: Tensor | None = None
        self._angles = angles
        self.engine: Engine[Any] | None = None  # `engine_of` sets this engine for all texts
        self.temporary = False  # True if only a run holds this object

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    @abstractmethod
    def embedding_rows(self, ids: Tensor) -> Tensor:
        """Return the rows `[n, width]` of the embedding matrix for the tokens `ids` `[n]`."""

    @abstractmethod
    def output_rows(self, ids: Tensor | None) -> Tensor:
        """Return the rows `[n, width]` of the output matrix for the tokens `ids` `[n]`, or all."""

    def with_layers(self: Weights, selected: Sequence[int]) -> Weights:
        variant = self._variant()
        variant.layers = [self.layers[i] for i in selected]
        return variant

    def with_channel_scale(self: Weights, scale: Tensor) -> Weights:
        """Return the model with embedding channels multiplied by `scale` `[width]`."""
        variant = self._variant()
        variant.channel_scale = scale.to(self.device, self.dtype).contiguous()
        return variant

    def _variant(self: Weights) -> Weights:
        variant = copy.copy(self)
        variant.engine = None
        variant.temporary = True
        return variant
