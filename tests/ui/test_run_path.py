"""Path of a run from the click to the engine and back, as docs/architecture.md describes it."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.documented_paths import PACKAGE, UI, documented_paths
from fakes.served_page import last_frame
from fakes.trace_lines import events_of
from fakes.trace_records import end, header, step
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from starlette.websockets import WebSocket

from specdemo.core.events import Event
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.ui.gateway import Gateway
from specdemo.ui.limits import HostLimits
from specdemo.ui.runs import Runs
from specdemo.ui.service import Service
from specdemo.ui.streams import run_routes
from specdemo.worker import Worker

pytestmark = pytest.mark.slow

LINES = [header(), step(0, pieces=["a"]), step(1, pieces=["b"]), end()]


def test_a_run_takes_the_documented_path(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[tuple[str, str]] = set()

    def note_callers() -> None:
        frame = inspect.currentframe()
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE) and not frame.f_code.co_name.startswith("<"):
                module = file.relative_to(UI if file.is_relative_to(UI) else PACKAGE)
                taken.add((module.as_posix(), frame.f_code.co_name))
            frame = frame.f_back

    def noted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            note_callers()
            return function(*args, **options)

        return call

    def engine(*_: Any) -> Iterator[Event]:
        note_callers()
        yield from events_of(LINES)

    monkeypatch.setattr(Worker, "submit", noted(Worker.submit))
    monkeypatch.setattr(WebSocket, "send_text", noted(WebSocket.send_text))
    service = Service(ModelPool(), engine)
    defaults = {"prompt": "x", "compare": False, "pair": "bundled", "method": "draft"}
    routes = [Runs(service, "cpu", defaults).route, *run_routes(service.runs)]
    middleware = [Middleware(Gateway, limits=HostLimits(), hosts=None)]
    with TestClient(Starlette(routes=routes, middleware=middleware)) as client:
        last_frame(client, {"id": "run-of-this-test", "settings": {}})
    service.worker.close()
    path = next(path for heading, path in documented_paths().items() if heading.startswith("Prompt to green token"))
    assert ("service.py", "_decode") in taken and ("streams.py", "_follow") in taken
    assert {(module, name) for module, name in taken if name not in path.get(module, ())} == set()


def compared_phase(step_s: float, **settings: Any) -> tuple[str, dict[str, Any]]:
    """Run a comparison of 40 tokens with steps of this duration; return the last phase and the lengths of `speeds`."""

    def engine(recipe: Recipe, *_: Any) -> Iterator[Event]:
        times = {"draft_s": 0.0, "verify_s": step_s, "host_s": 0.0}
        steps = [step(i, pieces=["b"]) | times | {"t": step_s * (i + 1)} for i in range(40)]
        yield from events_of([header(recipe.method), *steps, end()])

    service = Service(ModelPool(), engine)
    runs = Runs(
        service, "cpu", {"prompt": "x", "compare": True, "pair": "bundled", "method": "nasd", "ngram_keep": False}
    )
    with TestClient(Starlette(routes=[runs.route, *run_routes(service.runs)])) as client:
        state = last_frame(client, {"id": "run-of-this-test", "settings": settings})
    run = service.runs.get("run-of-this-test")
    assert run is not None
    service.worker.close()
    return state["phase"][1], {name: len(speeds) for name, speeds in run.speeds.items()}


@pytest.mark.parametrize(
    ("step_s", "settings", "pairs"),
    [
        (0.001, {}, 3),  # 40 tokens
        (0.1, {}, 1),  # 8 s for both lanes: repetitions would keep the visitor waiting
        (0.001, {"ngram_keep": True}, 1),  # the second run would know the text
        (0.001, {"compare": False}, 0),
    ],
)
def test_comparisons_of_short_texts_are_repeated(step_s: float, settings: dict[str, Any], pairs: int) -> None:
    words, counts = compared_phase(step_s, **settings)
    assert words.startswith("40 tokens, token limit reached") and ("3 pairs" in words) == (pairs == 3)
    assert counts == ({"spec": pairs, "ar": pairs} if pairs else {"spec": 1})
