"""Passes of an engine over a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.engines.engine import Engine, Entry


class Passes:
    def __init__(self, engine: Engine[Any]) -> None:
        self.engine, self.cache = engine, engine.open()

    def run(self, new: list[int] | Tensor, held: int, draft: Draft, **options: Any) -> Tensor:
        return self.engine.run([Entry(self.cache, new, held, draft)], **options)[0]

    def keep(self, length: int, slots: Sequence[int]) -> None:
        self.cache.keep(length, slots)
