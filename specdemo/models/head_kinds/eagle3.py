"""EAGLE-3 heads in the layouts of SafeAILab and `speculators`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from specdemo.models.engines.head import Eagle3Weights, LayerSizes
from specdemo.models.engines.llama_weights import layer_count
from specdemo.models.head_kinds.checkpoint import (
    HeadCheckpoint,
    HeadKind,
    layer_shapes,
    layer_sizes,
    target_width,
    valid_taps,
)

if TYPE_CHECKING:
    from specdemo.models.load import LoadedModel

_SHARED = ("lm_head.weight", "embed_tokens.weight")


def _fits(config: Mapping[str, Any]) -> bool:
    if kind := config.get("speculators_model_type"):
        return kind == "eagle3"
    listed = config.get("architectures")
    return "draft_vocab_size" in config or (isinstance(listed, list) and "LlamaForCausalLMEagle3" in listed)


def count_taps(config: Mapping[str, Any]) -> int:
    """Return the number of hidden states of the target."""
    listed = _listed_taps(config)
    return len(listed) if isinstance(listed, list) and listed else 3


def _read(checkpoint: HeadCheckpoint, target: LoadedModel) -> Eagle3Weights:
    name, config = checkpoint.name, checkpoint.config
    layer = layer_sizes(checkpoint, config.get("transformer_layer_config", config))
    drafted = checkpoint.integer(config, "draft_vocab_size", target.vocab_size)
    taps, width = read_taps(name, config, layer_count(target.model)), target_width(target)
    norms: dict[str, tuple[int, ...]] = {}
    if config.get("norm_before_fc"):
        norms["input_norm.weight"] = (len(taps) * width,)
    if config.get("fc_norm"):
        norms |= {f"fc_norm.{i}.weight": (width,) for i in range(len(taps))}
    of_layer = partial(shapes, layer, len(taps), drafted, target.vocab_size, width)
    tensors = checkpoint.tensors("EAGLE-3", lambda stored: of_layer(stored) | norms, common_name)
    return Eagle3Weights(
        taps=taps,
        ids=checkpoint.draft_ids(tensors, target.vocab_size),
        tensors=tensors,
        layer=layer,
        norm_before_residual=config.get("norm_before_residual") is True,
        norm_output=config.get("norm_output") is True,
    )


def shapes(
    layer: LayerSizes, taps: int, drafted: int, vocab_size: int, target_width: int, stored: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, by the names that are stored."""
    shares_rows = not {*_SHARED} <= {*stored}
    width = target_width if shares_rows else layer.width
    needed = {
        "fc.weight": (width, taps * target_width),
        "norm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        **layer_shapes(layer, "midlayer.", 2 * width),
    }
    optional = {
        "lm_head.weight": (drafted, width),
        "embed_tokens.weight": (vocab_size, width),
        "d2t": (drafted,),
        "t2d": (vocab_size,),
    }
    needed |= {key: shape for key, shape in optional.items() if key in stored}
    return needed if drafted == vocab_size else needed | {"d2t": (drafted,)}


def common_name(name: str) -> str:
    """Return the name of SafeAILab for a name of `speculators`."""
    return re.sub(r"^layers\.0\.", "midlayer.", name)


def _listed_taps(config: Mapping[str, Any]) -> Any:
    of_eagle = config.get("eagle_config")
    listed = config.get("eagle_aux_hidden_state_layer_ids")
    if not listed and isinstance(of_eagle, dict):
        listed = of_eagle.get("eagle_aux_hidden_state_layer_ids")
    return listed


def read_taps(name: str, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the hidden states of a target of `layers` layers. Raises `UserError` for others."""
    taps = _listed_taps(config) or [2, layers // 2, layers - 3]
    if isinstance(taps, list) and taps[0] == 1:  # outputs of layers
        taps = [tap + 1 if type(tap) is int else tap for tap in taps]
    return valid_taps(name, taps, layers)


EAGLE3 = HeadKind("eagle3", _fits, count_taps, _read)
