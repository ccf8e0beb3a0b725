"""Kinds of heads, and reading of a stored head by the shapes of its kind: Medusa, EAGLE, DFlash and DSpark."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.models.cached_head import Head
from specdemo.models.engines.llama_weights import ROPE_TYPES
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.torch_head import (
    HeadConfig,
    HeadWeights,
    LayerSizes,
    SingleLayerHead,
    TargetModel,
    TorchCachedHead,
    TorchHead,
)
from specdemo.models.hub import local_shapes
from specdemo.models.llama_checkpoint import LlamaConfig, matrix_shapes
from specdemo.models.untrusted import check_model_config, read_settings, weight_files

OTHER_HEAD = "choose a head for this target"
_FLOATS, _INTEGERS = ("F32", "BF16", "F16"), ("I64", "I32")
_TYPES = {"d2t": _INTEGERS, "t2d": ("BOOL",)}
_NESTED = ("transformer_layer_config", "dflash_config", "eagle_config")  # of speculators, z-lab and SafeAILab

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadKind:
    """Registry entry of a kind of heads."""

    name: str
    fits: Callable[[HeadConfig], bool]  # True for the configuration of this kind
    taps: Callable[[HeadConfig, int], Any]  # hidden states that a row receives of a target with these layers
    shapes: Callable[[HeadCheckpoint, Collection[str]], Shapes]  # of all tensors, by the names that are stored
    make: Callable[[HeadWeights, Any], Head]  # the head for a target; raises `UserError`
    rename: Callable[[str], str] = str  # name of a tensor in `shapes` for its stored name
    has_layers: bool = True  # decoder layers of the sizes in config.json


@dataclass(frozen=True)
class HeadCheckpoint:
    """Directory of a head, with the configuration and sizes of its target."""

    config: HeadConfig
    folder: Path
    target_layers: int
    target_width: int
    vocab_size: int

    def read(self, kind: HeadKind) -> HeadWeights:
        """Read the head. Raises `UserError` for files that do not fit the kind or the target."""
        taps = self.check(kind)
        tensors: dict[str, Tensor] = {}
        for path in weight_files(self.folder):
            with safe_open(path, "pt") as file:
                tensors |= {kind.rename(key): file.get_tensor(key) for key in file.keys()}
        layer = self.layer if kind.has_layers else None
        return HeadWeights(self.config, tensors, taps, self._draft_ids(tensors), layer)

    def check(self, kind: HeadKind) -> tuple[int, ...]:
        """Compare configuration and shapes with kind and target; return the hidden states read. Raises `UserError`."""
        name, taps = self.config.name, listed_taps(self.config, kind, self.target_layers)
        if min(taps) < 0 or max(taps) > self.target_layers or sorted({*taps}) != taps:
            raise UserError(f"{name} receives the states of layers that the target does not have: {OTHER_HEAD}")
        stored = {kind.rename(key): value for key, value in local_shapes(name, self.folder).items()}
        shapes = kind.shapes(self, stored.keys())
        if "d2t" in stored or self.drafted != self.vocab_size:
            shapes["d2t"] = (self.drafted,)
        if "t2d" in stored:
            shapes["t2d"] = (self.vocab_size,)
        for key, shape in shapes.items():
            if key not in stored:
                raise UserError(f"{name} has no tensor {key}: choose a head of kind {kind.name}")
            dtype, given = stored[key]
            if given != shape:
                sizes = f"{_shown(given)} instead of {_shown(shape)}"
                raise UserError(f"{key} of {name} has shape {sizes}: {OTHER_HEAD}")
            if dtype not in (allowed := _TYPES.get(key, _FLOATS)):
                raise UserError(f"{key} of {name} has type {dtype} instead of {allowed[0]}: choose another head")
        if others := sorted(stored.keys() - shapes.keys()):
            raise UserError(f"{name} has a tensor unknown to {kind.name} ({others[0]}): choose another head")
        return tuple(taps)

    @cached_property
    def layer(self) -> LayerSizes:
        """Sizes of a decoder layer. Raises `UserError` for missing or invalid values."""
        config = self.config
        width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        check_model_config(f"config.json of {config.name}", config.values)
        head_dim = config.integer("head_dim", width // heads)
        frequencies, rotary_factor = _frequencies(config, head_dim)
        return LayerSizes(
            width=width,
            inner=config.integer("intermediate_size"),
            heads=heads,
            kv_heads=config.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            context=config.integer("max_position_embeddings"),
            epsilon=float(config.values.get("rms_norm_eps", 1e-6)),
            frequencies=frequencies,
            rotary_factor=rotary_factor,
        )

    @cached_property
    def drafted(self) -> int:
        return self.config.integer("draft_vocab_size", self.vocab_size)

    def layer_shapes(self, prefix: str, inputs: int) -> Shapes:
        """Return the shapes of attention on `inputs` columns and of the part after it, without the first norm."""
        layer = self.layer
        shapes = matrix_shapes(layer.width, layer.inner, layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim)
        read = {f"self_attn.{name}_proj": (shapes[f"self_attn.{name}_proj"][0], inputs) for name in "qkv"}
        vectors: Shapes = {"post_attention_layernorm": (layer.width,)}
        return {f"{prefix}{name}.weight": shape for name, shape in (vectors | shapes | read).items()}

    def own_rows(self, stored: Collection[str], width: int) -> Shapes:
        """Return the shapes of stored output and embedding matrices, without which a head shares the target's."""
        shapes: Shapes = {"lm_head.weight": (self.drafted, width), "embed_tokens.weight": (self.vocab_size, width)}
        return {name: shape for name, shape in shapes.items() if name in stored}

    def _draft_ids(self, tensors: dict[str, Tensor]) -> Tensor | None:
        """Return the target ids of the draft vocabulary from the offsets `d2t`, None for all; remove its tensors."""
        offsets, used = tensors.pop("d2t", None), tensors.pop("t2d", None)
        if offsets is None:
            return None
        name, vocab_size = self.config.name, self.vocab_size
        ids = offsets.long() + torch.arange(len(offsets))
        if not (0 <= int(ids[0]) and int(ids[-1]) < vocab_size and bool((ids.diff() > 0).all())):
            raise UserError(f"d2t of {name} leaves the {vocab_size:,} tokens of the target: {OTHER_HEAD}")
        if used is not None and not torch.equal(used.nonzero()[:, 0], ids):
            raise UserError(f"t2d of {name} contradicts d2t: choose another head")
        return None if len(ids) == vocab_size else ids


def read_head_config(name: str, folder: Path) -> HeadConfig:
    """Return the values of a config.json and of its nested parts, which other values precede."""
    values: dict[str, Any] = {}
    stored = read_settings(name, folder / "config.json")
    for part in (*(stored.get(key) for key in _NESTED), stored):
        if isinstance(part, dict):
            values |= {key: value for key, value in part.items() if value is not None}
    return HeadConfig(name, values)


def listed_taps(config: HeadConfig, kind: HeadKind, layers: int) -> list[int]:
    """Return the hidden states that a head of `kind` receives. Raises `UserError` unless they are a list of numbers."""
    taps = kind.taps(config, layers)
    if not (isinstance(taps, list) and taps and all(type(tap) is int for tap in taps)):
        raise UserError(f"config.json of {config.name} does not list layers of the target: choose another head")
    return taps


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def _frequencies(config: HeadConfig, head_dim: int) -> tuple[Tensor, float]:
    values = config.values
    stored = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = stored.get("rope_type", stored.get("type", "default")) if isinstance(stored, dict) else ""
    if kind not in ROPE_TYPES or head_dim % 2:
        known = ", ".join(ROPE_TYPES)
        raise UserError(f"the rotary embedding of {config.name} is not of kind {known}: choose another head")
    theta = stored.get("rope_theta") or values.get("rope_theta") or 10_000.0
    if kind == "default":
        return theta ** (-torch.arange(0, head_dim, 2).double() / head_dim).float(), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**stored, "rope_type": kind, "rope_theta": theta}
    others = {key: value for key, value in values.items() if key != "rope_scaling"}
    full = LlamaConfig.from_dict({**others, "rope_parameters": rope, "head_dim": head_dim})
    return ROPE_INIT_FUNCTIONS[kind](full, torch.device("cpu"))


# --- Medusa ---

_MEDUSA_BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.weight")


def _medusa_counts(stored: Collection[str]) -> tuple[int, int]:
    """Return the numbers of heads, which config.json may not state correctly, and of blocks of a head."""
    numbers = [(int(match[1]), int(match[2])) for name in stored if (match := _MEDUSA_BLOCK.fullmatch(name))]
    heads, blocks = zip(*numbers, strict=True) if numbers else ((0,), (0,))
    return max(heads) + 1, max(blocks) + 1


def _medusa_shapes(checkpoint: HeadCheckpoint, stored: Collection[str]) -> Shapes:
    width = checkpoint.target_width
    heads, blocks = _medusa_counts(stored)
    shapes: Shapes = {}
    for head in range(heads):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (width, width)
            shapes[f"{head}.{block}.linear.bias"] = (width,)
        if f"0.{blocks}.weight" in stored:
            shapes[f"{head}.{blocks}.weight"] = (checkpoint.drafted, width)
    return shapes


class MedusaHead(TorchHead):
    """Medusa heads (2401.10774) in the layout of FasterDecoding: residual blocks and output matrices.

    Head i drafts token i from the target's final state, independently of the tokens before it. Without output matrices,
    all heads share that of the target, or its rows of a draft vocabulary.
    """

    kind = "medusa"

    def __init__(self, weights: HeadWeights, target: TargetModel) -> None:
        super().__init__(weights, target)
        self._count, self._blocks = _medusa_counts(self.tensors)
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


MEDUSA = HeadKind(
    "Medusa",
    fits=lambda config: "medusa_num_heads" in config.values,
    taps=lambda config, layers: [layers],
    shapes=_medusa_shapes,
    make=MedusaHead,
    has_layers=False,
)


# --- EAGLE ---


def _fits_eagle3(config: HeadConfig) -> bool:
    if kind := config.values.get("speculators_model_type"):
        return kind == "eagle3"
    listed = config.values.get("architectures")
    return "draft_vocab_size" in config.values or (isinstance(listed, list) and "LlamaForCausalLMEagle3" in listed)


def _eagle3_taps(config: HeadConfig, layers: int) -> Any:
    taps = config.values.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    if isinstance(taps, list) and taps[0] == 1:  # outputs of layers
        return [tap + 1 if type(tap) is int else tap for tap in taps]
    return taps


def _eagle3_shapes(checkpoint: HeadCheckpoint, stored: Collection[str]) -> Shapes:
    """A head with all matrices of its own may have another width than the target."""
    target_width, config = checkpoint.target_width, checkpoint.config
    count = len(_eagle3_taps(config, checkpoint.target_layers))
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
    """EAGLE-3 heads (2503.01840) in the layouts of SafeAILab and `speculators`.

    The layer reads fused states of several layers of the target.
    """

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


def _make_eagle3(weights: HeadWeights, target: TargetModel) -> Head:
    """Return a native head for a native target, unless it has norms that the native engine does not support."""
    config = weights.config
    further_norms = config.values.get("norm_before_fc") or config.values.get("fc_norm") or config.enabled("norm_output")
    if isinstance(target, NativeWeights) and not further_norms:
        return NativeHead(weights, target)
    return TorchEagle3(weights, target)


def _common_name(name: str) -> str:
    """Return a name of SafeAILab or `speculators` without that of the layer."""
    return name.removeprefix("midlayer.").removeprefix("layers.0.")


EAGLE3 = HeadKind("EAGLE-3", _fits_eagle3, _eagle3_taps, _eagle3_shapes, _make_eagle3, _common_name)


def _eagle_shapes(checkpoint: HeadCheckpoint, stored: Collection[str]) -> Shapes:
    width = checkpoint.target_width
    shapes: Shapes = {"fc.weight": (width, 2 * width), **checkpoint.layer_shapes("", width)}
    if "fc.bias" in stored:
        shapes["fc.bias"] = (width,)
    return shapes | checkpoint.own_rows(stored, width)


class TorchEagle(SingleLayerHead):
    """EAGLE-1 and EAGLE-2 heads (2401.15077) in the layout of SafeAILab, which differ in the tree alone.

    The layer predicts the target's next final state.
    """

    def projected_states(self, states: Tensor) -> Tensor:
        return states[:, 0]

    def combined(self, rows: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.linear("fc", torch.cat([embedded, rows], -1))
        return joined, joined


EAGLE = HeadKind(
    "EAGLE-1 or EAGLE-2",
    fits=lambda config: "num_attention_heads" in config.values and "speculators_model_type" not in config.values,
    taps=lambda config, layers: [layers],
    shapes=_eagle_shapes,
    make=TorchEagle,
    rename=_common_name,
)


# --- DFlash and DSpark ---

_MOST_ROWS = 64  # layers and rows of a block
_MARKOV, _CONFIDENCE = "markov_head.markov_w", "confidence_head.proj"


def _fits_dflash(config: HeadConfig) -> bool:
    if kind := config.values.get("speculators_model_type"):
        return kind in ("dflash", "dspark")
    return config.values.get("architectures") in (["DFlashDraftModel"], ["Qwen3DSparkModel"])


def _is_dspark(config: HeadConfig) -> bool:
    values = config.values
    return values.get("speculators_model_type") == "dspark" or values.get("architectures") == ["Qwen3DSparkModel"]


def _dflash_taps(config: HeadConfig, layers: int) -> Any:
    """Return the hidden states of the target. z-lab and DeepSpec list outputs of layers."""
    if "speculators_model_type" in config.values:
        return config.values.get("aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    outputs, count = config.values.get("target_layer_ids"), config.integer("num_hidden_layers", most=_MOST_ROWS)
    if outputs is None:
        outputs = [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)] if count > 1 else [layers // 2]
    return [tap + 1 for tap in outputs]


def _dflash_shapes(checkpoint: HeadCheckpoint, stored: Collection[str]) -> Shapes:
    width, config = checkpoint.target_width, checkpoint.config
    layer = checkpoint.layer
    if layer.width != width:
        raise UserError(f"{config.name} has states of width {layer.width:,} instead of {width:,}: {OTHER_HEAD}")
    count = len(_dflash_taps(config, checkpoint.target_layers))
    shapes: Shapes = {"hidden_norm.weight": (width,), "norm.weight": (width,), "fc.weight": (width, count * width)}
    for i in range(config.integer("num_hidden_layers", most=_MOST_ROWS)):
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
    """DFlash (2602.06036) and DSpark (2607.05147) heads in the layouts of z-lab, DeepSpec and `speculators`.

    Layers read keys and values of the target's states, and of a block: the last token and mask tokens. The rows of a
    block are drafted in one pass; `text.state` contains their states `[n, width]`.
    """

    kind = "block"

    def __init__(self, weights: HeadWeights, target: TargetModel) -> None:
        super().__init__(weights, target)
        config = weights.config
        if "lm_head.weight" not in self.tensors:
            self.tensors["lm_head.weight"] = self.output_rows(self.ids)
        self.layers = list(range(config.integer("num_hidden_layers", most=_MOST_ROWS)))
        self._windows = _windows(config, len(self.layers))
        self._causal_windows = not config.enabled("sliding_window_non_causal")
        # True if the row of the last token drafts as well
        self._from_anchor = config.enabled("sample_from_anchor", _is_dspark(config))
        self._block = config.integer("block_size", most=_MOST_ROWS)
        self._mask_token = config.values.get("mask_token_id")
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


DFLASH = HeadKind("DFlash or DSpark", _fits_dflash, _dflash_taps, _dflash_shapes, TorchDFlash)


HEAD_KINDS = (MEDUSA, DFLASH, EAGLE3, EAGLE)  # the first that fits is used
