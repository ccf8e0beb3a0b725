"""DFlash (2602.06036) and DSpark (2607.05147) heads in the layouts of z-lab, DeepSpec and `speculators`.

Layers read keys and values of the target's states, and of a block: the last token and mask tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.models.engines.torch_head import HeadConfig, HeadWeights, TargetModel, TorchCachedHead, TorchHead
from specdemo.models.head_kinds.checkpoint import OTHER_HEAD, HeadCheckpoint, HeadKind, Shapes

_MOST = 64  # layers and rows of a block
_MARKOV, _CONFIDENCE = "markov_head.markov_w", "confidence_head.proj"


def _fits(config: HeadConfig) -> bool:
    if kind := config.values.get("speculators_model_type"):
        return kind in ("dflash", "dspark")
    return config.values.get("architectures") in (["DFlashDraftModel"], ["Qwen3DSparkModel"])


def _is_dspark(config: HeadConfig) -> bool:
    values = config.values
    return values.get("speculators_model_type") == "dspark" or values.get("architectures") == ["Qwen3DSparkModel"]


def _taps(config: HeadConfig, layers: int) -> Any:
    """Return the hidden states of the target. z-lab and DeepSpec list outputs of layers."""
    if "speculators_model_type" in config.values:
        return config.values.get("aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    outputs, count = config.values.get("target_layer_ids"), config.integer("num_hidden_layers", most=_MOST)
    if outputs is None:
        outputs = [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)] if count > 1 else [layers // 2]
    return [tap + 1 for tap in outputs]


def _shapes(checkpoint: HeadCheckpoint, stored: Collection[str]) -> Shapes:
    width, config = checkpoint.target_width, checkpoint.config
    layer = checkpoint.layer
    if layer.width != width:
        raise UserError(f"{config.name} has states of width {layer.width:,} instead of {width:,}: {OTHER_HEAD}")
    count = len(_taps(config, checkpoint.target_layers))
    shapes: Shapes = {"hidden_norm.weight": (width,), "norm.weight": (width,), "fc.weight": (width, count * width)}
    for i in range(config.integer("num_hidden_layers", most=_MOST)):
        shapes[f"layers.{i}.input_layernorm.weight"] = (width,)
        shapes |= checkpoint.layer_shapes(f"layers.{i}.", width)
        shapes |= {f"layers.{i}.self_attn.{name}_norm.weight": (layer.head_dim,) for name in "qk"}
        for matrix in (f"layers.{i}.self_attn.{name}_proj" for name in "qkvo" if config.values.get("attention_bias")):
            shapes[f"{matrix}.bias"] = shapes[f"{matrix}.weight"][:1]
    shapes |= checkpoint.own_rows(stored, width)
    return shapes | _dspark_shapes(checkpoint) if _is_dspark(config) else shapes


def _dspark_shapes(checkpoint: HeadCheckpoint) -> Shapes:
    """Return the shapes of the Markov and confidence heads."""
    config = checkpoint.config
    if (kind := config.values.get("markov_head_type", "vanilla")) != "vanilla":
        raise UserError(f"{config.name} has a Markov head of another kind ({kind}): choose one of kind vanilla")
    shapes: Shapes = {}
    rank = config.integer("markov_rank") if config.values.get("markov_rank", 256) else 0
    if rank:
        shapes[f"{_MARKOV}1.weight"] = (checkpoint.vocab_size, rank)
        shapes[f"{_MARKOV}2.weight"] = (checkpoint.drafted, rank)
    if config.enabled("enable_confidence_head", True):
        inputs = checkpoint.target_width + (rank if config.enabled("confidence_head_with_markov", True) else 0)
        shapes |= {f"{_CONFIDENCE}.weight": (1, inputs), f"{_CONFIDENCE}.bias": (1,)}
    return shapes


def _windows(config: HeadConfig, layers: int) -> list[int | None]:
    """Return the most positions before the block that each layer sees, None: all."""
    kinds = config.values.get("layer_types") or ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UserError(f"layer_types in config.json of {config.name} do not fit its layers: choose another head")
    if "sliding_attention" not in kinds:
        return [None] * layers
    if "speculators_model_type" not in config.values:
        raise UserError(f"{config.name} has layers with a window: choose a head of speculators")
    window = config.integer("sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]


class TorchDFlash(TorchHead):
    """Head that drafts a block of rows in one pass; `text.state` contains their states `[n, width]`."""

    kind = "block"

    def __init__(self, weights: HeadWeights, target: TargetModel) -> None:
        super().__init__(weights, target)
        config = weights.config
        if "lm_head.weight" not in self.tensors:
            self.tensors["lm_head.weight"] = self.output_rows(self.ids)
        self.layers = list(range(config.integer("num_hidden_layers", most=_MOST)))
        self._windows = _windows(config, len(self.layers))
        self._causal_windows = not config.enabled("sliding_window_non_causal")
        # True if the row of the last token drafts as well
        self._from_anchor = config.enabled("sample_from_anchor", _is_dspark(config))
        self._block, self._mask_token = config.integer("block_size", most=_MOST), config.values.get("mask_token_id")
        fits = type(self._mask_token) is int and 0 <= self._mask_token < self.config.vocab_size
        if not fits or self._block + self._from_anchor < 2:
            raise UserError(f"{config.name} has no mask token of the target, or blocks without drafts: {OTHER_HEAD}")

    def longest_draft(self, length: int) -> int:
        return max(0, min(self._block, self.layer.context - length + 1) - (not self._from_anchor))

    def projected_states(self, states: Tensor) -> Tensor:
        return self.norm("hidden_norm", self.linear("fc", states.flatten(1)))

    def forward(self, text: TorchCachedHead, rows: Tensor, following: list[int]) -> Tensor:
        end = text.end + len(rows)
        text.cache.reserve(end + self._block)
        for i in self.layers:
            text.cache.kv[i, :, text.end : end] = self._keys_and_values(text, i, rows, text.end)
        return text.state

    def draft(self, text: TorchCachedHead, token: int) -> Tensor:
        return text.state

    def logits(self, text: TorchCachedHead, token: int) -> Tensor:
        if not text.drafted:
            text.state = self._block_states(text, token)
        state = text.state[text.drafted : text.drafted + 1]
        logits, features = self.linear("lm_head", state), state
        if (table := self.tensors.get(f"{_MARKOV}1.weight")) is not None:
            if not 0 <= token < len(table):
                raise ValueError(f"token id {token:,} is outside the vocabulary of {len(table):,} tokens")
            before = table[token : token + 1]
            logits = logits + self.linear(f"{_MARKOV}2", before)
            features = torch.cat([state, before], -1)
        if (weight := self.tensors.get(f"{_CONFIDENCE}.weight")) is not None:
            text.confidence = float(self.linear(_CONFIDENCE, features[:, : weight.shape[1]]).float().sigmoid())
        return logits[0]

    def _keys_and_values(self, text: TorchCachedHead, layer: int, rows: Tensor, first: int) -> Tensor:
        """Return keys and values `[2 * kv_heads, n, head_dim]` of rows at positions from `first` on."""
        name, angles = f"layers.{layer}.self_attn.", text.cache.angles[:, first : first + len(rows)]
        keys = self.apply_rope(self.norm(f"{name}k_norm", self.projected(f"{name}k", rows)), angles)
        return torch.cat((keys, self.projected(f"{name}v", rows)), 1).transpose(0, 1)

    def _block_states(self, text: TorchCachedHead, token: int) -> Tensor:
        """Return the states `[n, width]` of the rows of a block that draft."""
        first, count = text.end, self.longest_draft(text.end + 1)
        masks = count - 1 if self._from_anchor else count
        rows = self.embedded(torch.tensor([token, *[self._mask_token] * masks], device=self.device))
        angles = text.cache.angles[:, first : first + len(rows)]
        for i in self.layers:
            prefix = f"layers.{i}."
            inputs = self.norm(f"{prefix}input_layernorm", rows)
            query = self.norm(f"{prefix}self_attn.q_norm", self.projected(f"{prefix}self_attn.q", inputs))
            added = self._keys_and_values(text, i, inputs, first)
            keys, values = torch.cat([text.cache.kv[i, :, :first], added], 1)[None].chunk(2, 1)
            mixed = F.scaled_dot_product_attention(
                self.apply_rope(query, angles).transpose(0, 1)[None],
                keys,
                values,
                attn_mask=self._visible(i, first, len(rows)),
                enable_gqa=True,
            )
            rows = self.layer_output(prefix, rows, mixed[0].transpose(0, 1))
        return self.norm("norm", rows)[-count:]

    def _visible(self, layer: int, first: int, count: int) -> Tensor | None:
        """Return the mask `[count, first + count]` of a layer with a window, or of a long text."""
        window = self._windows[layer]
        if window is None and first <= self.window:
            return None
        positions = torch.arange(first + count, device=self.device)
        visible = (positions >= first - min(window or self.window, self.window)).expand(count, -1)
        causal = window is not None and self._causal_windows
        return visible & (positions <= positions[first:, None]) if causal else visible


DFLASH = HeadKind("DFlash or DSpark", _fits, _taps, _shapes, TorchDFlash)
