"""EAGLE-1 and EAGLE-2 heads in the layout of SafeAILab; they differ in the tree alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from specdemo.models.engines.head import EagleWeights, LayerSizes
from specdemo.models.engines.llama_weights import layer_count
from specdemo.models.head_kinds.checkpoint import HeadCheckpoint, HeadKind, layer_shapes, layer_sizes, target_width

if TYPE_CHECKING:
    from specdemo.models.load import LoadedModel

_LAYER = "layers.0."


def _fits(config: Mapping[str, Any]) -> bool:
    return "num_attention_heads" in config and "speculators_model_type" not in config


def _read(checkpoint: HeadCheckpoint, target: LoadedModel) -> EagleWeights:
    layer = layer_sizes(checkpoint, checkpoint.config)
    needed = partial(_shapes, layer, target.vocab_size, target_width(target))
    tensors = checkpoint.tensors("EAGLE-1 or EAGLE-2", needed)
    return EagleWeights(tensors, (layer_count(target.model),), None, layer)


def _shapes(
    layer: LayerSizes, vocab_size: int, target_width: int, stored: Collection[str]
) -> dict[str, tuple[int, ...]]:
    shapes = {
        "fc.weight": (target_width, 2 * target_width),
        **layer_shapes(layer, _LAYER, target_width),
    }
    optional = {
        "fc.bias": (target_width,),
        "embed_tokens.weight": (vocab_size, target_width),
        "lm_head.weight": (vocab_size, target_width),
    }
    return shapes | {key: shape for key, shape in optional.items() if key in stored}


EAGLE = HeadKind("eagle", _fits, lambda config: 1, _read)
