"""Runs measured by the studies: complete traces, and the cloud service in another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

import psutil

from benchmarks.tables import ROOT
from specdemo.core.events import End, Header, Loading, StepEvent
from specdemo.core.trace import to_json
from specdemo.generate import generate
from specdemo.models.chat_prompt import PromptOrChat
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

T = TypeVar("T")


@dataclass(frozen=True)
class Trace:
    """Events of a run: header, steps and end."""

    header: Header
    steps: list[StepEvent]
    end: End

    @property
    def tokens(self) -> list[int]:
        """All committed tokens."""
        return [token for event in self.steps for token in event.step.tokens]

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the complete run."""
        return to_json(self.end)["metrics"]


def traced(recipe: Recipe, prompt: PromptOrChat, pool: ModelPool, **parts: Any) -> Trace:
    """Run `recipe` to its end, with `parts` for `generate`. Raises `RuntimeError` if the run fails."""
    trace = possibly_failed(recipe, prompt, pool, **parts)
    if trace.end.error:
        raise RuntimeError(trace.end.error)
    return trace


def possibly_failed(recipe: Recipe, prompt: PromptOrChat, pool: ModelPool, **parts: Any) -> Trace:
    """Run `recipe` to its end or first error."""
    events: list[Any] = [event for event in generate(recipe, prompt, pool, **parts) if not isinstance(event, Loading)]
    header, *steps, end = events
    return Trace(header, steps, end)


def in_new_process(function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function of a module that a new process imports."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


class Service:
    """A cloud service in a process, which may be replaced at its port."""

    def __init__(self, *options: str) -> None:
        self._options, self.url = options, "http://127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Start the process; `url` is its address."""
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", "specdemo", "serve", "--port", port, *self._options]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().removeprefix("listening on ").strip()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def cloud_service(*options: str) -> Iterator[Service]:
    """Run the service of the bundled pair with `options` on a free local port."""
    with closing(Service("--pair", "bundled", *options)) as service:
        yield service
