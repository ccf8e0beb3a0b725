"""The service in a thread, with the completions of a pair."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI

from fakes.listening import listening
from specdemo.completions.routes import add_completions
from specdemo.completions.service import CompletionService
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe, plan_run
from specdemo.remote import serve
from specdemo.remote.admission import ServiceOptions


def completion_app(recipe: Recipe, template: str = "", **options: Any) -> tuple[FastAPI, CompletionService]:
    """Return the application and the completions; `template` is the chat template of the target."""
    pool = ModelPool()
    target = pool.get(plan_run(recipe).target)
    if template:
        target.tokenizer.chat_template = template
    app = serve.serve_model(target, ServiceOptions(local=True, **options))
    completions = CompletionService(pool, recipe, seed=lambda: 5)
    add_completions(app, completions)
    return app, completions


@contextmanager
def running_service(recipe: Recipe, template: str = "", **options: Any) -> Iterator[tuple[str, CompletionService]]:
    """Yield the address and the completions."""
    app, completions = completion_app(recipe, template, **options)
    with listening(app) as address:
        yield "http://{}:{}".format(*address), completions
