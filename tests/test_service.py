"""What stands behind the page, about models: unloading when asked, and when nobody has asked for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

from specdemo.models.pairs import PAIRS
from specdemo.models.shelf import Shelf
from specdemo.models.spec import Spec
from specdemo.recipe import Recipe
from specdemo.ui.service import Service


class Watched(Shelf):
    """Says when it was tidied."""

    def __init__(self, idle_s: float) -> None:
        super().__init__(idle_s=idle_s)
        self.tidied, self.gone = threading.Event(), 0

    def tidy(self) -> int:
        self.gone = super().tidy()
        self.tidied.set()
        return self.gone


def engine(recipe: Recipe, prompt: str, shelf: Shelf, stores: Any) -> Iterator[dict[str, Any]]:
    shelf.take(recipe.target_spec)
    yield {"end": "stop"}


def test_unloading_says_how_much_went() -> None:
    shelf = Shelf()
    service = Service(shelf, engine)
    try:
        assert asyncio.run(service.unload()) == "No model was loaded."
        shelf.take(Spec(PAIRS["bundled"].drafter, device="cpu"))
        said = asyncio.run(service.unload())
        assert said.endswith("MB of weights unloaded.") and not shelf.weight_bytes
    finally:
        service.worker.close()


def test_idle_models_are_unloaded_without_being_asked() -> None:
    shelf = Watched(idle_s=0.05)
    service = Service(shelf, engine)
    try:
        recipe = Recipe(target=PAIRS["bundled"].drafter, method="ar", device="cpu")
        stream = service.start([("spec", recipe)], "def")
        assert stream.wait(60) and stream.error is None
        assert shelf.tidied.wait(60) and shelf.gone == 1
    finally:
        service.worker.close()
