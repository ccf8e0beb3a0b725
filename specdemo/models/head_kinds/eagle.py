"""EAGLE-1 and EAGLE-2 heads (2401.15077) in the layout of SafeAILab; they differ in the tree alone."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from specdemo.models.engines.head import HeadConfig
from specdemo.models.engines.torch_head import SingleLayerHead
from specdemo.models.head_kinds.checkpoint import HeadCheckpoint, HeadKind, Shapes


def _fits(config: HeadConfig) -> bool:
    return "num_attention_heads" in config.values and "speculators_model_type" not in config.values


def _shapes(checkpoint: HeadCheckpoint, stored: Collection[str]) -> Shapes:
    width = checkpoint.target_width
    shapes: Shapes = {"fc.weight": (width, 2 * width), **checkpoint.layer_shapes("", width)}
    if "fc.bias" in stored:
        shapes["fc.bias"] = (width,)
    return shapes | checkpoint.own_rows(stored, width)


class TorchEagle(SingleLayerHead):
    """The layer predicts the target's next final state."""

    def fused(self, states: Tensor) -> Tensor:
        return states[:, 0]

    def combined(self, rows: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.linear("fc", torch.cat([embedded, rows], -1))
        return joined, joined


def _without_layer(name: str) -> str:
    return name.removeprefix("layers.0.")


EAGLE = HeadKind("EAGLE-1 or EAGLE-2", _fits, lambda config, layers: [layers], _shapes, TorchEagle, _without_layer)
