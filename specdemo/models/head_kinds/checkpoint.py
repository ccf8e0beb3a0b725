"""Registry entries of kinds of heads, and reading of a stored head by the shapes of its kind."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.models.cached_head import Head
from specdemo.models.engines.llama_weights import ROPE_TYPES
from specdemo.models.engines.torch_head import HeadConfig, HeadWeights, LayerSizes
from specdemo.models.hub import local_shapes
from specdemo.models.llama_checkpoint import LlamaConfig, matrix_shapes
from specdemo.models.model_sizes import check_model_config
from specdemo.models.untrusted import read_settings, weight_files

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
    """Return the values of a config.json with those of nested parts, which other values precede."""
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
