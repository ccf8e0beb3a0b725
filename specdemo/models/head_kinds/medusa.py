"""Medusa heads (2401.10774) in the layout of FasterDecoding: residual blocks and output matrices.

Without output matrices, all heads share that of the target, or its rows of a draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch.nn.functional as F
from torch import Tensor

from specdemo.models.engines.torch_head import HeadConfig, HeadWeights, TargetModel, TorchCachedHead, TorchHead
from specdemo.models.head_kinds.checkpoint import HeadCheckpoint, HeadKind, Shapes

_BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.weight")


def _fits(config: HeadConfig) -> bool:
    return "medusa_num_heads" in config.values


def _counts(stored: Collection[str]) -> tuple[int, int]:
    """Return the numbers of heads, which config.json may not state correctly, and of blocks of a head."""
    numbers = [(int(match[1]), int(match[2])) for name in stored if (match := _BLOCK.fullmatch(name))]
    heads, blocks = zip(*numbers, strict=True) if numbers else ((0,), (0,))
    return max(heads) + 1, max(blocks) + 1


def _shapes(checkpoint: HeadCheckpoint, stored: Collection[str]) -> Shapes:
    width = checkpoint.target_width
    heads, blocks = _counts(stored)
    shapes: Shapes = {}
    for head in range(heads):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (width, width)
            shapes[f"{head}.{block}.linear.bias"] = (width,)
        if f"0.{blocks}.weight" in stored:
            shapes[f"{head}.{blocks}.weight"] = (checkpoint.drafted, width)
    return shapes


class MedusaHead(TorchHead):
    """Independent heads: head i drafts token i from the target's final state, independently of the tokens before it."""

    kind = "medusa"

    def __init__(self, weights: HeadWeights, target: TargetModel) -> None:
        super().__init__(weights, target)
        self._count, self._blocks = _counts(self.tensors)
        if f"0.{self._blocks}.weight" not in self.tensors:
            rows = self.output_rows(self.ids)
            self.tensors |= {f"{head}.{self._blocks}.weight": rows for head in range(self._count)}

    def longest_draft(self, length: int) -> int:
        return self._count

    def projected_states(self, states: Tensor) -> Tensor:
        return states[:, 0]

    def forward(self, text: TorchCachedHead, rows: Tensor, following: list[int]) -> Tensor:
        return rows[-1:].clone()

    def logits(self, text: TorchCachedHead, token: int) -> Tensor:
        row = text.state
        for block in range(self._blocks):
            row = row + F.silu(self.linear(f"{text.drafted}.{block}.linear", row))
        return self.linear(f"{text.drafted}.{self._blocks}", row)[0]


MEDUSA = HeadKind("Medusa", _fits, lambda config, layers: [layers], _shapes, MedusaHead, has_layers=False)
