"""Medusa heads (arXiv 2401.10774) in plain torch: a residual block each on the target's final state.

Head i predicts token t + 2 + i from the state at t. All heads share the target's output rows of the draft vocabulary,
so that parameter names and `config.json` are those of published heads without output matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from training.head.kind import DraftHead
from training.head.target import Target

HEADS = 5


class Residual(nn.Module):
    """The identity plus a gated product, which begins with 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(DraftHead):
    """The heads, as modules "0" to "4"."""

    taps = (-1,)

    def __init__(self, config: PretrainedConfig, taps: int, vocabulary: Tensor, own_output: bool = False) -> None:
        if own_output:
            raise ValueError("Medusa heads share the output matrix of the target: omit --own-output")
        super().__init__(config, taps, vocabulary)
        for i in range(HEADS):
            self.add_module(str(i), nn.Sequential(Residual(config.hidden_size)))

    def settings(self, taps: Sequence[int]) -> dict[str, Any]:
        return {"medusa_num_heads": HEADS, "medusa_num_layers": 1}

    def forward(self, taps: Tensor, tokens: Tensor, embeddings: Tensor, steps: int) -> list[Tensor]:
        return [self.get_submodule(str(i))(taps) for i in range(steps)]

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Begin with the output matrix on the unchanged state."""
        for parameter in self.parameters():
            parameter.zero_()
