"""Medusa heads in the layout of FasterDecoding: residual blocks and output matrices.

Without output matrices, all heads share that of the target, or its rows of a draft vocabulary `d2t`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from specdemo.models.engines.head import MedusaWeights
from specdemo.models.engines.llama_weights import layer_count
from specdemo.models.head_kinds.checkpoint import HeadCheckpoint, HeadKind, target_width

if TYPE_CHECKING:
    from specdemo.models.load import LoadedModel

_BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.weight")


def _fits(config: Mapping[str, Any]) -> bool:
    return "medusa_num_heads" in config


def _read(checkpoint: HeadCheckpoint, target: LoadedModel) -> MedusaWeights:
    drafted = checkpoint.integer(checkpoint.config, "draft_vocab_size", target.vocab_size)
    needed = partial(_shapes, target_width(target), drafted, target.vocab_size)
    tensors = checkpoint.tensors("Medusa", needed)
    ids = checkpoint.draft_ids(tensors, target.vocab_size)
    return MedusaWeights(tensors, (layer_count(target.model),), ids, *_counts(tensors))


def _counts(stored: Collection[str]) -> tuple[int, int]:
    """Return the numbers of heads, which config.json may not state correctly, and of blocks of a head."""
    numbers = [(int(match[1]), int(match[2])) for name in stored if (match := _BLOCK.fullmatch(name))]
    heads, blocks = zip(*numbers, strict=True) if numbers else ((0,), (0,))
    return max(heads) + 1, max(blocks) + 1


def _shapes(width: int, drafted: int, vocab_size: int, stored: Collection[str]) -> dict[str, tuple[int, ...]]:
    heads, blocks = _counts(stored)
    shares_rows = f"0.{blocks}.weight" not in stored
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (width, width)
            shapes[f"{head}.{block}.linear.bias"] = (width,)
        if not shares_rows:
            shapes[f"{head}.{blocks}.weight"] = (drafted, width)
    shapes |= {"t2d": (vocab_size,)} if "t2d" in stored else {}
    return shapes | ({"d2t": (drafted,)} if drafted != vocab_size or "d2t" in stored else {})


MEDUSA = HeadKind("medusa", _fits, lambda config: 1, _read)
