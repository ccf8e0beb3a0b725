"""Dropout at the input of a model that was loaded without any: the same weights, some channels of its words silent."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from specdemo.core.errors import Refused
from specdemo.models.lean import Lean

SHARE = 0.1  # of the channels


def with_dropout(model: PreTrainedModel | Lean, seed: int, share: float = SHARE) -> Lean:
    """The model with one mask over its embedding's channels, the same at every place (1512.05287, section 4).

    Raises `Refused` for a model that runs through `transformers`, whose embedding is not ours to change.
    """
    if not isinstance(model, Lean):
        raise Refused(f"dropout needs one of the Llama family as drafter, not {type(model).__name__}: gate by entropy")
    generator = torch.Generator().manual_seed(seed)
    width = model.embedding.shape[1]
    kept = (torch.rand(width, generator=generator) >= share).to(model.embedding)
    thin = copy.copy(model)
    thin.embedding, thin.idle = model.embedding * kept / (1 - share), []
    return thin
