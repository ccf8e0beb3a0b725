"""A stored head, its check against the shapes of its kind, and the parts of configurations that kinds share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.models.engines.head import HeadWeights, LayerSizes
from specdemo.models.engines.llama_weights import ROPE_TYPES
from specdemo.models.hub import local_shapes, weight_errors
from specdemo.models.llama_checkpoint import LlamaConfig
from specdemo.models.model_sizes import sizes_of_config
from specdemo.models.untrusted import weight_files

if TYPE_CHECKING:
    from specdemo.models.load import LoadedModel

OTHER_HEAD = "choose a head for this target"
_FLOATS, _INTEGERS = ("F32", "BF16", "F16"), ("I64", "I32")
_TYPES = {"d2t": _INTEGERS, "t2d": ("BOOL",)}

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadCheckpoint:
    """Directory of a head with its config.json."""

    name: str
    config: Mapping[str, Any]
    folder: Path

    def tensors(
        self, kind: str, needed: Callable[[Collection[str]], Shapes], rename: Callable[[str], str] = str
    ) -> dict[str, Tensor]:
        """Read all tensors, under the names that `rename` gives them.

        `needed(names)` returns the shapes of a head of `kind` with these tensors. Raises `UserError` for others.
        """
        stored = {rename(key): value for key, value in local_shapes(self.name, self.folder).items()}
        shapes = needed(stored.keys())
        for key, shape in shapes.items():
            if key not in stored:
                raise UserError(f"{self.name} has no tensor {key}: choose a head of kind {kind}")
            dtype, given = stored[key]
            if given != shape:
                sizes = f"{_shown(given)} instead of {_shown(shape)}"
                raise UserError(f"{key} of {self.name} has shape {sizes}: {OTHER_HEAD}")
            if dtype not in (allowed := _TYPES.get(key, _FLOATS)):
                raise UserError(f"{key} of {self.name} has type {dtype} instead of {allowed[0]}: choose another head")
        if others := sorted(stored.keys() - shapes.keys()):
            raise UserError(f"{self.name} has a tensor unknown to {kind} ({others[0]}): choose another head")
        return {rename(key): tensor for key, tensor in self._read()}

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        for path in weight_files(self.folder):
            with weight_errors(self.name), safe_open(path, "pt") as file:
                for key in file.keys():
                    yield key, file.get_tensor(key)

    def integer(self, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
        """Return a size from `config`. Raises `UserError` without one."""
        value = config.get(key) or default
        if type(value) is not int:
            raise UserError(f"config.json of {self.name} has no {key}: choose another head")
        return value

    def size(self, config: Mapping[str, Any], key: str, most: int | None = None) -> int:
        """Return a positive size up to `most` from `config`. Raises `UserError` for others."""
        size = self.integer(config, key)
        if size < 1 or (most is not None and size > most):
            limits = f"within 1 to {most}" if most is not None else "positive"
            raise UserError(f"{key} in config.json of {self.name} is not {limits}: choose another head")
        return size

    def draft_ids(self, tensors: dict[str, Tensor], vocab_size: int) -> Tensor | None:
        """Return the target ids of the draft vocabulary from the offsets `d2t`, None for all; remove its tensors."""
        offsets, used = tensors.pop("d2t", None), tensors.pop("t2d", None)
        if offsets is None:
            return None
        ids = offsets.long() + torch.arange(len(offsets))
        if not (0 <= int(ids[0]) and int(ids[-1]) < vocab_size and bool((ids.diff() > 0).all())):
            raise UserError(f"d2t of {self.name} leaves the {vocab_size:,} tokens of the target: {OTHER_HEAD}")
        if used is not None and not torch.equal(used.nonzero()[:, 0], ids):
            raise UserError(f"t2d of {self.name} contradicts d2t: choose another head")
        return None if len(ids) == vocab_size else ids


@dataclass(frozen=True)
class HeadKind:
    """Registry entry of a kind of heads."""

    name: str
    fits: Callable[[Mapping[str, Any]], bool]  # True for the config.json of this kind
    tap_count: Callable[[Mapping[str, Any]], int]  # number of hidden states that a row receives
    read: Callable[[HeadCheckpoint, LoadedModel], HeadWeights]  # raises `UserError` for files that do not fit


def layer_sizes(checkpoint: HeadCheckpoint, config: Mapping[str, Any]) -> LayerSizes:
    """Read the configuration of a layer. Raises `UserError` for missing or invalid values."""
    width, heads = (checkpoint.integer(config, key) for key in ("hidden_size", "num_attention_heads"))
    sizes_of_config(config).check(f"config.json of {checkpoint.name}")
    head_dim = checkpoint.integer(config, "head_dim", width // heads)
    frequencies, factor = _frequencies(checkpoint.name, config, head_dim)
    return LayerSizes(
        width,
        checkpoint.integer(config, "intermediate_size"),
        heads,
        checkpoint.integer(config, "num_key_value_heads", heads),
        head_dim,
        checkpoint.integer(config, "max_position_embeddings"),
        float(config.get("rms_norm_eps", 1e-6)),
        frequencies,
        factor,
    )


def layer_shapes(layer: LayerSizes, prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of attention on `inputs` columns and of the part after it, without the first norm."""
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "post_attention_layernorm": (layer.width,),
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (layer.width, queries),
        "mlp.gate_proj": (layer.inner, layer.width),
        "mlp.up_proj": (layer.inner, layer.width),
        "mlp.down_proj": (layer.width, layer.inner),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def target_width(target: LoadedModel) -> int:
    """Return the width of the target's hidden states."""
    return target.model.config.get_text_config().hidden_size


def valid_taps(name: str, taps: Any, layers: int) -> tuple[int, ...]:
    """Return the hidden states of a target of `layers` layers. Raises `UserError` for others."""
    valid = isinstance(taps, list) and all(type(tap) is int for tap in taps)
    if not (taps and valid and all(0 <= tap <= layers for tap in taps) and sorted({*taps}) == taps):
        raise UserError(f"{name} receives the states of layers that the target does not have: {OTHER_HEAD}")
    return tuple(taps)


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def _frequencies(name: str, layer: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    stored = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = stored.get("rope_type", stored.get("type", "default")) if isinstance(stored, dict) else ""
    if kind not in ROPE_TYPES or head_dim % 2:
        raise UserError(f"the rotary embedding of {name} is not of kind {', '.join(ROPE_TYPES)}: choose another head")
    theta = stored.get("rope_theta") or layer.get("rope_theta") or 10_000.0
    if kind == "default":
        return theta ** (-torch.arange(0, head_dim, 2).double() / head_dim).float(), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**stored, "rope_type": kind, "rope_theta": theta}
    others = {key: value for key, value in layer.items() if key != "rope_scaling"}
    config = LlamaConfig.from_dict({**others, "rope_parameters": rope, "head_dim": head_dim})
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
