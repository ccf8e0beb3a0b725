"""Model variants that share weights: fewer layers (self-speculation, 2309.08168, LayerSkip) and fixed dropout masks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from specdemo.core.errors import UserError
from specdemo.models.engines.encoder_decoder import has_encoder
from specdemo.models.engines.llama_weights import LlamaWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layer_count(model: PreTrainedModel | LlamaWeights) -> int:
    return model.config.get_text_config().num_hidden_layers


def with_layers(model: PreTrainedModel | LlamaWeights, kept: Sequence[int]) -> PreTrainedModel | LlamaWeights:
    """Return the model restricted to the layers `kept`, sharing all weights.

    Raises `UserError` for invalid layers and encoder-decoders. `transformers` models need layer 0, which counts cached
    positions.
    """
    if has_encoder(model.config):
        raise UserError(
            f"{type(model).__name__} has an encoder, and self-speculation is for decoders: choose method nasd"
        )
    count = layer_count(model)
    if not kept or not set(kept) < set(range(count)):
        raise UserError(f"self-speculation needs a proper subset of layers 0 to {count - 1}, not {list(kept)}")
    if isinstance(model, LlamaWeights):
        return model.with_layers(kept)
    if 0 not in kept:
        raise UserError(f"{type(model).__name__} cannot omit layer 0: include it")
    return _with_layers(model, kept, count)


def _with_layers(model: nn.Module, kept: Sequence[int], count: int) -> nn.Module:
    thin = copy.copy(model)
    thin._modules = dict(model._modules)
    for name, child in model._modules.items():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            thin._modules[name] = nn.ModuleList([child[i] for i in kept])
            return thin
    for name, child in model._modules.items():
        if child is not None and any(
            isinstance(inner, nn.ModuleList) and len(inner) == count for inner in child.modules()
        ):
            thin._modules[name] = _with_layers(child, kept, count)
            return thin
    raise UserError(f"{type(model).__name__} has no list of {count} layers: choose another method")


def with_dropout(model: PreTrainedModel | LlamaWeights, seed: int, share: float = 0.1) -> LlamaWeights:
    """Return the model with a dropout mask on its embedding channels for all positions (1512.05287, section 4)."""
    if not isinstance(model, LlamaWeights):
        raise UserError(f"dropout needs a drafter of the Llama family, not {type(model).__name__}: gate by entropy")
    generator = torch.Generator().manual_seed(seed)
    width = model.embedding.shape[1]
    mask = (torch.rand(width, generator=generator) >= share).to(model.embedding)
    thin = copy.copy(model)
    thin.embedding, thin.idle = model.embedding * mask / (1 - share), []
    return thin
