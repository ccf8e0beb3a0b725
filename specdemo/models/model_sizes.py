"""Sizes of a model, compared with each other before anything is built from them.

The limits exceed those of all published models. With them, sizes and their sums in C are below 2^31.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specdemo.core.errors import UserError

MAX_LAYERS, MAX_HEADS = 1_000, 4_096
MAX_HEAD_DIM, MAX_HEADS_WIDTH = 4_096, 1 << 18
MAX_WIDTH, MAX_INNER = 65_536, 1 << 20
MAX_VOCABULARY, MAX_POSITIONS = 4_000_000, 1 << 24
MAX_INT32 = (1 << 31) - 1

ROTATES_WHOLE_HEADS = ("llama", "mistral", "qwen2", "qwen3", "gemma2")  # names of model types
_LIMITS = {
    "layers": ("layers", MAX_LAYERS),
    "width": ("values per row", MAX_WIDTH),
    "inner": ("values inside the MLP", MAX_INNER),
    "heads": ("heads", MAX_HEADS),
    "kv_heads": ("heads of keys and values", MAX_HEADS),
    "head_dim": ("values per head", MAX_HEAD_DIM),
    "vocab_size": ("tokens", MAX_VOCABULARY),
    "positions": ("positions", MAX_POSITIONS),
    "window": ("positions in its window", MAX_INT32),
}


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder; None: absent or unknown."""

    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    rotated: int | None = None  # number of rotated values of a head
    rotates_whole_heads: bool = False
    inner: int | None = None
    layers: int | None = None
    vocab_size: int | None = None
    positions: int | None = None
    window: int | None = None

    @property
    def kv_values(self) -> int:
        """Values of keys and values per layer and position; 0 if unknown."""
        return 2 * (self.kv_heads or self.heads or 0) * (self.head_dim or 0)

    def check(self, label: str) -> None:
        """Raise `UserError` with the first contradiction. `label`: name of the file or model."""
        if problem := next(self._problems(), ""):
            raise UserError(f"{label} {problem}: choose another model")

    def _problems(self) -> Iterator[str]:
        for field, (title, limit) in _LIMITS.items():
            value = getattr(self, field)
            if value is not None and not 1 <= value <= limit:
                yield f"has {value:,} {title}, not 1 to {limit:,}"
        width, heads = self.width, self.heads
        dim, rotated = self.head_dim, self.rotated
        if width and heads and dim is None and width % heads:
            yield f"divides {width:,} values among {heads:,} heads"
        if heads and self.kv_heads and heads % self.kv_heads:
            yield f"divides {heads:,} heads among {self.kv_heads:,} keys and values"
        if heads and dim and heads * dim > MAX_HEADS_WIDTH:
            yield f"has {heads:,} heads of {dim:,} values, together more than {MAX_HEADS_WIDTH:,}"
        if rotated is None:
            return
        if rotated < 2 or rotated % 2:
            yield f"rotates {rotated:,} values of a head, not an even number from 2"
        if dim and rotated > dim:
            yield f"rotates {rotated:,} values of heads that have {dim:,}"
        if dim and self.rotates_whole_heads and rotated != dim:
            yield f"rotates {rotated:,} of the {dim:,} values of a head, and its architecture rotates all"


def sizes_of_config(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes in a config.json, or a part of it, whose values have been checked individually."""

    def first(*names: str) -> int | None:
        return next((config[name] for name in names if type(config.get(name)) is int), None)

    width, heads = first("hidden_size", "n_embd", "d_model"), first("num_attention_heads", "n_head", "num_heads")
    kind, rotated = config.get("model_type"), first("rotary_dim")
    head_dim = first("head_dim", "d_kv")
    whole, partial = kind in ROTATES_WHOLE_HEADS, kind == "gpt_neox"
    if not (head_dim or whole or partial) and any(map(_sets_head_size, config.items())):
        width = head_dim = None  # 0 or names such as qk_nope_head_dim allow heads of any size
    elif head_dim is None and width and heads and width % heads == 0:
        head_dim = width // heads
    if head_dim and (whole or partial):
        rotated = _rotated(config, head_dim, partial)
    return ModelSizes(width, heads, first("num_key_value_heads"), head_dim, rotated, whole)


def _sets_head_size(item: tuple[str, Any]) -> bool:
    key, value = item
    return value is not None and ("head_dim" in key or key in ("d_kv", "kv_channels", "attention_head_size"))


def _rotated(config: Mapping[str, Any], head_dim: int, partial: bool) -> int:
    """Return the rotated values of a head as computed by `transformers`. `partial`: GPT-NeoX."""
    stored = config.get("rope_scaling") or config.get("rope_parameters")
    rope = stored if isinstance(stored, Mapping) else {}
    if not partial and rope.get("rope_type", rope.get("type", "default")) == "default":
        return head_dim
    names = [(rope, "partial_rotary_factor"), (config, "rotary_pct" if partial else "partial_rotary_factor")]
    shares = (source[name] for source, name in names if source.get(name) is not None)
    return int(head_dim * next(shares, 0.25 if partial else 1))
