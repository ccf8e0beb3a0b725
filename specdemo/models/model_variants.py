"""A model with layers left out, on the very same weights: the drafter of self-speculation (2309.08168, LayerSkip)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from specdemo.core.errors import UserError
from specdemo.models.engines.encoder_decoder import has_encoder
from specdemo.models.engines.llama_weights import LlamaWeights


def layer_count(model: PreTrainedModel | LlamaWeights) -> int:
    """How many layers it has."""
    return model.config.get_text_config().num_hidden_layers


def with_layers(model: PreTrainedModel | LlamaWeights, kept: Sequence[int]) -> PreTrainedModel | LlamaWeights:
    """The same model through the layers `kept` only; nothing is copied but the list of them.

    Raises `UserError` for layers that it does not have, for a model with an encoder, and where layer 0, which knows how
    long the text is, is left out of a model that runs through `transformers`.
    """
    if has_encoder(model.config):
        raise UserError(
            f"{type(model).__name__} has an encoder, and self-speculation is for decoders: choose method nasd"
        )
    count = layer_count(model)
    if not kept or not set(kept) < set(range(count)):
        raise UserError(f"self-speculation keeps some of the layers 0 to {count - 1}, not all, not {list(kept)}")
    if isinstance(model, LlamaWeights):
        return model.with_layers(kept)
    if 0 not in kept:
        raise UserError(f"{type(model).__name__} cannot leave out layer 0: keep it")
    return _with_layers(model, kept, count)


def _with_layers(model: nn.Module, kept: Sequence[int], count: int) -> nn.Module:
    """A shallow copy of every module on the way to the list of layers, and of the list."""
    thin = copy.copy(model)
    thin._modules = dict(model._modules)
    for name, child in model._modules.items():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            thin._modules[name] = nn.ModuleList([child[i] for i in kept])
            return thin
    for name, child in model._modules.items():
        if child is not None and any(isinstance(one, nn.ModuleList) and len(one) == count for one in child.modules()):
            thin._modules[name] = _with_layers(child, kept, count)
            return thin
    raise UserError(f"{type(model).__name__} shows no list of {count} layers to leave some out of")


SHARE = 0.1  # of the channels


def with_dropout(model: PreTrainedModel | LlamaWeights, seed: int, share: float = SHARE) -> LlamaWeights:
    """The model with one mask over its embedding's channels, the same at every place (1512.05287, section 4).

    Raises `UserError` for a model that runs through `transformers`, whose embedding is not ours to change.
    """
    if not isinstance(model, LlamaWeights):
        raise UserError(
            f"dropout needs one of the Llama family as drafter, not {type(model).__name__}: gate by entropy"
        )
    generator = torch.Generator().manual_seed(seed)
    width = model.embedding.shape[1]
    kept = (torch.rand(width, generator=generator) >= share).to(model.embedding)
    thin = copy.copy(model)
    thin.embedding, thin.idle = model.embedding * kept / (1 - share), []
    return thin
