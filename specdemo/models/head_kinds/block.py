"""Block heads as `training.head` writes them: an EAGLE-3 layer, further layers, slots, Markov term and confidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from specdemo.models.engines.head import BlockWeights
from specdemo.models.engines.llama_weights import layer_count
from specdemo.models.head_kinds import eagle3
from specdemo.models.head_kinds.checkpoint import HeadCheckpoint, HeadKind, layer_shapes, layer_sizes, target_width

if TYPE_CHECKING:
    from specdemo.models.load import LoadedModel

_MOST = 64  # layers and slots
_MOST_RANK = 256  # as in `native/interface.h`


def _fits(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") == ["BlockHead"]


def _read(checkpoint: HeadCheckpoint, target: LoadedModel) -> BlockWeights:
    config = checkpoint.config
    layer = layer_sizes(checkpoint, config)
    layers, slots = (checkpoint.size(config, key, _MOST) for key in ("num_hidden_layers", "block_size"))
    rank = checkpoint.size(config, "markov_rank", _MOST_RANK)
    drafted = checkpoint.integer(config, "draft_vocab_size", target.vocab_size)
    taps = eagle3.read_taps(checkpoint.name, config, layer_count(target.model))
    first = partial(eagle3.shapes, layer, len(taps), drafted, target.vocab_size, target_width(target))
    width = layer.width
    others: dict[str, tuple[int, ...]] = {
        "slots": (slots - 1, 2 * width),
        "markov_head.markov_w1.weight": (rank, width),
        "markov_head.markov_w2.weight": (width, rank),
        "confidence_head.proj.weight": (1, width),
        "confidence_head.proj.bias": (1,),
    }
    for i in range(1, layers):
        others |= {f"layers.{i}.input_layernorm.weight": (width,), **layer_shapes(layer, f"layers.{i}.", width)}

    def needed(stored: Collection[str]) -> dict[str, tuple[int, ...]]:
        return first(stored) | others

    tensors = checkpoint.tensors("block", needed, eagle3.common_name)
    return BlockWeights(
        taps=taps,
        ids=checkpoint.draft_ids(tensors, target.vocab_size),
        tensors=tensors,
        layer=layer,
        layers=layers,
        slots=slots,
    )


BLOCK_HEAD = HeadKind("block", _fits, eagle3.count_taps, _read)
