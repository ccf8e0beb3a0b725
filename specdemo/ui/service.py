"""What stands behind the page: one worker, the models, everyone's runs. Knows nothing of gradio.

Tokens are decoded in the worker's thread. Whoever wants them drains a stream, ten times a second at most, and leaving
it (end, Stop, a closed tab, an error) asks the stream to stop. Everything on the device goes through the one worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Any

import torch

from specdemo.bench import Prompt, load_prompts
from specdemo.core.errors import Refused
from specdemo.models.reasons import size
from specdemo.models.shelf import Shelf
from specdemo.parts import Stores
from specdemo.preflight import Preflight, preflight
from specdemo.recipe import Recipe
from specdemo.ui.frames import Runs
from specdemo.worker import Stream, Worker, WorkerBusy

TICK = 1 / 10  # seconds between frames: soon enough for the eye, and little load on the decoding thread
LONGEST_PROMPT = 100_000  # characters; tokenising more than any context holds would only take the worker's time
OF_EACH_KIND = 3  # prompts of a class that a preflight reads
log = logging.getLogger(__name__)

Engine = Callable[[Recipe, str, Shelf, Stores], Iterator[dict[str, Any]]]
Lines = Stream[tuple[str, dict[str, Any]]]


class Service:
    """Starts runs and hands out what they gave; `worker` is the thread that decodes."""

    def __init__(self, models: Shelf, engine: Engine) -> None:
        leave_a_core()
        self.worker, self.runs = Worker(), Runs()
        self._models, self._engine = models, engine
        self._stores: dict[str, Stores] = {}  # by visitor: nobody's text may show in another's drafts
        self._idle: threading.Timer | None = None

    def start(self, jobs: list[tuple[str, Recipe]], prompt: Any, visitor: str = "") -> Lines:
        """Decode `prompt` by each recipe in turn; items are a lane's name and a line of its trace."""
        if not isinstance(prompt, str):
            raise Refused(f"the prompt must be a text, not {type(prompt).__name__}")
        if len(prompt) > LONGEST_PROMPT:
            raise Refused(f"the prompt has {len(prompt):,} characters: shorten it to {LONGEST_PROMPT:,} at most")
        stores = self._stores.setdefault(visitor, {}) if visitor else {}

        def steps() -> Iterator[tuple[str, dict[str, Any]]]:
            try:
                for lane, recipe in jobs:
                    event: dict[str, Any] = {}
                    for event in self._engine(recipe, prompt, self._models, stores):
                        yield lane, event
                    if event.get("end") == "error":
                        return
            finally:
                self._tidy_later()

        return self.worker.submit(steps)

    async def preflight(self, recipe: Recipe, prompt: str = "") -> Preflight:
        """Estimates for `recipe` from the bundled texts, and from `prompt` if there is one."""
        kinds: dict[str, list[Prompt]] = {}
        for one in load_prompts():
            kinds.setdefault(one.kind, []).append(one)
        texts = [one for some in kinds.values() for one in some[:OF_EACH_KIND]]
        if prompt:
            texts.append(Prompt("own", "own", prompt[:LONGEST_PROMPT]))

        def job() -> Iterator[Preflight]:
            yield preflight(recipe, texts, self._models)

        stream = self.worker.submit(job)
        async with aclosing(drain(stream)) as batches:
            async for batch in batches:
                for found in batch:
                    return found
        raise stream.error or RuntimeError("the worker gave no answer")

    async def unload(self) -> str:
        """Let go of all models; what that gave, in words. Runs that are going on keep theirs to their end."""

        def job() -> Iterator[str]:
            held = self._models.weight_bytes
            self._models.clear()
            yield f"{size(held)} of weights unloaded." if held else "No model was loaded."

        stream = self.worker.submit(job)
        async with aclosing(drain(stream)) as batches:
            async for batch in batches:
                for said in batch:
                    return said
        return reason(stream.error or RuntimeError("the worker gave no answer"))

    def _tidy_later(self) -> None:
        """Once nobody has run anything for long enough, unload what is idle."""

        def tidy() -> Iterator[int]:
            yield self._models.tidy()

        def submit() -> None:
            with suppress(RuntimeError):  # busy, so not idle; or closed
                self.worker.submit(tidy)

        if self._idle:
            self._idle.cancel()
        self._idle = threading.Timer(self._models.idle_s, submit)
        self._idle.daemon = True
        self._idle.start()

    def trace_since(self, asked: Any) -> str | None:
        """For a browser that missed frames: `[run id, how many records it has]`."""
        run_id, have = asked if isinstance(asked, list) and len(asked) == 2 else (None, 0)
        run = self.runs.get(run_id)
        return run.frame(have) if run and isinstance(have, int) and have >= 0 else None

    def trace(self, asked: Any) -> str | None:
        """The trace to save: `[run id, lane]`."""
        run_id, lane = asked if isinstance(asked, list) and len(asked) == 2 else (None, "")
        run = self.runs.get(run_id)
        return run.trace(lane) if run and isinstance(lane, str) else None

    def stop_run(self, run_id: Any) -> None:
        """Stop, which knows the run by its unguessable id. The frames go on to the end, so the tail is not lost."""
        if run := self.runs.get(run_id):
            run.stop()

    def leave(self, visitor: str) -> None:
        """This visitor has gone: end what they had going, forget what it taught."""
        self.runs.leave(visitor)
        self._stores.pop(visitor, None)


def leave_a_core() -> None:
    """Keep torch off one of the cores, for the server and a browser on the same machine.

    Its threads wait for one another several hundred times a token: one that has to share its core stops them all.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(min(torch.get_num_threads(), max(1, cores - 1)))


async def drain(stream: Stream) -> AsyncIterator[list]:
    """Whatever is new, again and again until the job is over. Leaving early asks the job to stop."""
    read = 0
    try:
        while True:
            last = stream.done  # before draining, or the tail is lost
            fresh = stream.items[read:]
            read += len(fresh)
            yield fresh
            if last:
                return
            await asyncio.sleep(TICK)
    finally:
        stream.stop()


def reason(error: BaseException) -> str:
    """One sentence about what went wrong, for whoever asked for the run."""
    if isinstance(error, (Refused, WorkerBusy)):
        return str(error)
    log.error("a run failed", exc_info=error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
