"""Passes of an engine over a cache of its own."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.engines.engine import Engine, Entry


class Passes:
    def __init__(self, engine: Engine[Any], taps: tuple[int, ...] = ()) -> None:
        self.engine, self.cache = engine, engine.open(taps=taps)

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        return self.engine.run([Entry(self.cache, new, held, draft)])[0]

    def keep(self, length: int, slots: Sequence[int]) -> None:
        self.cache.keep(length, slots)
