"""Record of where a drafter took its tokens from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a draft token; fields are None where unknown or without meaning."""

    source: str | None = None  # "model", "head", "n-gram", "filler", "random", "text", "store",
    # "prediction", "pool" or "window"
    position: int | None = None  # index of the copied token in the text
    matched: int | None = None  # length of the repeated ending
    order: int | None = None  # n of the n-gram
    count: int | None = None
    confidence: float | None = None  # probability estimated by the drafter

    def as_dict(self) -> dict[str, Any]:
        """Return the known fields."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}


_FIELDS = tuple(field.name for field in fields(Origin))
MODEL, HEAD = Origin("model"), Origin("head")
