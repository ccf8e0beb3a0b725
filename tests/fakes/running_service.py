"""The service in a thread, with the completions of a pair."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specdemo.completions.routes import add_completions
from specdemo.completions.service import CompletionService
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote import serve


@contextmanager
def running_service(recipe: Recipe, template: str = "", **options: Any) -> Iterator[tuple[str, CompletionService]]:
    """Yield the address and the completions; `template` is the chat template of the target."""
    pool = ModelPool()
    target = pool.take(recipe.target_spec)
    if template:
        target.tokenizer.chat_template = template
    app = serve.serve_model(target, local=True, **options)
    completions = CompletionService(pool, recipe, seed=lambda: 5)
    add_completions(app, completions)
    listener, ready = serve.bind("127.0.0.1", 0), threading.Event()
    stdin, end = socket.socketpair()
    events = {"stdin": stdin.makefile("rb"), "announce": ready.set}
    thread = threading.Thread(target=serve.listen, args=(app, listener), kwargs=events)
    thread.start()
    try:
        assert ready.wait(60)
        yield "http://{}:{}".format(*listener.getsockname()), completions
    finally:
        end.close()
        thread.join(60)
