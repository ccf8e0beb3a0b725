"""Pages on free ports, and an engine that runs until the test ends it."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from fakes.http_server import free_port
from fakes.traces import end, events_of, header, step

from specdemo.core.events import Event
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.ui.page import build


class Patient:
    """Real engine, except that the prompt "endless" takes 10 ms per step until `over` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.closed = 0

    def __call__(self, recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[Event]:
        if prompt != "endless":
            yield from generate(recipe, prompt, pool, stores)
            return
        try:
            yield from events_of(self._lines(prompt))
        finally:
            self.closed += 1

    def _lines(self, prompt: str) -> Iterator[dict[str, Any]]:
        yield header(prompt=prompt)
        for i in count():
            if self.over.is_set():
                break
            time.sleep(0.01)
            yield step(i, pieces=["b"])
        yield end()


@contextmanager
def launched(pair: str | None = "bundled", **options: Any) -> Iterator[Any]:
    """Serve a page with `options` of `build`."""
    demo = build(pair=pair, **options)
    demo.launch(server_name="127.0.0.1", server_port=free_port())
    gc.freeze()  # as in app.py
    try:
        yield demo
    finally:
        demo.worker.close()
        demo.clouds.close()
        demo.blocks.close(verbose=False)
