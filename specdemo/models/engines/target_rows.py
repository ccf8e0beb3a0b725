"""Rows of the target's embedding and output matrices, which heads share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.models.engines.fused_weights import FusedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def embedding_rows(model: PreTrainedModel | FusedWeights, ids: Tensor) -> Tensor:
    """Return the embeddings `[n, width]` of the tokens `ids` `[n]`."""
    if isinstance(model, FusedWeights):
        return model.embedding_rows(ids)
    embeddings: Any = model.get_input_embeddings()
    return F.embedding(ids, embeddings.weight)


def output_rows(model: PreTrainedModel | FusedWeights, ids: Tensor | None) -> Tensor:
    """Return the rows `[n, width]` of the output matrix for the tokens `ids` `[n]`, or all."""
    if isinstance(model, FusedWeights):
        return model.output_rows(ids)
    head = model.get_output_embeddings()
    if head.weight is None:  # a packed layer
        columns = head(torch.eye(model.config.get_text_config().hidden_size, dtype=model.dtype)).T
        return columns if ids is None else columns[ids]
    return head.weight if ids is None else F.embedding(ids, head.weight)
