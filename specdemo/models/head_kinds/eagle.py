"""EAGLE-3 heads (2503.01840) in the layouts of SafeAILab and `speculators`; EAGLE-1 and EAGLE-2 (2401.15077) in that of
SafeAILab, which differ in the tree alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from specdemo.models.cached_head import Head
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.torch_head import HeadConfig, HeadWeights, SingleLayerHead, TargetModel
from specdemo.models.head_kinds.checkpoint import HeadCheckpoint, HeadKind, Shapes


def _fits(config: HeadConfig) -> bool:
    if kind := config.values.get("speculators_model_type"):
        return kind == "eagle3"
    listed = config.values.get("architectures")
    return "draft_vocab_size" in config.values or (isinstance(listed, list) and "LlamaForCausalLMEagle3" in listed)


def _taps(config: HeadConfig, layers: int) -> Any:
    taps = config.values.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    if isinstance(taps, list) and taps[0] == 1:  # outputs of layers
        return [tap + 1 if type(tap) is int else tap for tap in taps]
    return taps


def _shapes(checkpoint: HeadCheckpoint, stored: Collection[str]) -> Shapes:
    """A head with all matrices of its own may have another width than the target."""
    target_width, config = checkpoint.target_width, checkpoint.config
    count = len(_taps(config, checkpoint.target_layers))
    own = {"lm_head.weight", "embed_tokens.weight"} <= {*stored}
    width = checkpoint.layer.width if own else target_width
    shapes: Shapes = {
        "fc.weight": (width, count * target_width),
        "norm.weight": (width,),
        "hidden_norm.weight": (width,),
        "input_layernorm.weight": (width,),
        **checkpoint.layer_shapes("", 2 * width),
        **checkpoint.own_rows(stored, width),
    }
    if config.values.get("norm_before_fc"):
        shapes["input_norm.weight"] = (count * target_width,)
    if config.values.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(count)}
    return shapes


class TorchEagle3(SingleLayerHead):
    """The layer reads fused states of several layers of the target."""

    def __init__(self, weights: HeadWeights, target: TargetModel) -> None:
        super().__init__(weights, target)
        self._norm_before_residual = weights.config.enabled("norm_before_residual")
        self._norm_output = weights.config.enabled("norm_output")

    def projected_states(self, states: Tensor) -> Tensor:
        rows = states.flatten(1)
        if "input_norm.weight" in self.tensors:
            rows = self.norm("input_norm", rows)
        if "fc_norm.0.weight" in self.tensors:
            parts = rows.chunk(len(self.taps), -1)
            rows = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return self.linear("fc", rows)

    def combined(self, rows: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        normalised = self.norm("hidden_norm", rows)
        joined = torch.cat([self.norm("input_layernorm", embedded), normalised], -1)
        return normalised if self._norm_before_residual else rows, joined

    def next_state(self, residuals: Tensor, mixed: Tensor) -> Tensor:
        row = super().next_state(residuals, mixed)
        return self.norm("norm", row) if self._norm_output else row

    def output_input(self, state: Tensor) -> Tensor:
        return state if self._norm_output else self.norm("norm", state)


def _make(weights: HeadWeights, target: TargetModel) -> Head:
    """Return a native head for a native target, unless it has norms that the native engine does not support."""
    config = weights.config
    further_norms = config.values.get("norm_before_fc") or config.values.get("fc_norm") or config.enabled("norm_output")
    if isinstance(target, NativeWeights) and not further_norms:
        return NativeHead(weights, target)
    return TorchEagle3(weights, target)


def _common_name(name: str) -> str:
    """Return a name of SafeAILab or `speculators` without that of the layer."""
    return name.removeprefix("midlayer.").removeprefix("layers.0.")


EAGLE3 = HeadKind("EAGLE-3", _fits, _taps, _shapes, _make, _common_name)


def _fits_eagle(config: HeadConfig) -> bool:
    return "num_attention_heads" in config.values and "speculators_model_type" not in config.values


def _eagle_shapes(checkpoint: HeadCheckpoint, stored: Collection[str]) -> Shapes:
    width = checkpoint.target_width
    shapes: Shapes = {"fc.weight": (width, 2 * width), **checkpoint.layer_shapes("", width)}
    if "fc.bias" in stored:
        shapes["fc.bias"] = (width,)
    return shapes | checkpoint.own_rows(stored, width)


class TorchEagle(SingleLayerHead):
    """The layer predicts the target's next final state."""

    def projected_states(self, states: Tensor) -> Tensor:
        return states[:, 0]

    def combined(self, rows: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.linear("fc", torch.cat([embedded, rows], -1))
        return joined, joined


EAGLE = HeadKind(
    "EAGLE-1 or EAGLE-2", _fits_eagle, lambda config, layers: [layers], _eagle_shapes, TorchEagle, _common_name
)
