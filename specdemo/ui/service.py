"""What stands behind the page: one worker, the models, everyone's runs. Knows nothing of gradio.

Tokens are decoded in the worker's thread, and everything on the device goes through the one worker.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from specdemo.bench import BenchProgress, measure
from specdemo.core.errors import UserError
from specdemo.models.memory import format_bytes
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import ChatMessage
from specdemo.pipeline import Stores
from specdemo.preflight import Preflight, preflight, texts_for
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe
from specdemo.remote.local_service import LocalServices, cores_but_one
from specdemo.ui.frames import Run
from specdemo.ui.limits import HostLimits
from specdemo.ui.run_store import RunStore
from specdemo.ui.streams import drain, reason
from specdemo.ui.visitors import TimeBudget, Visitors
from specdemo.worker import Stream, Worker, WorkerGroup

REMEMBERED = 256  # visitors whose n-grams and conversations are kept
PROBE = "def"
OF_EACH_KIND = 3  # prompts of a class that a preflight reads

Engine = Callable[[Recipe, str, ModelPool, Stores], Generator[dict[str, Any]]]
Lines = Stream[tuple[str, dict[str, Any]]]


class Service:
    """Starts runs and hands out what they gave; `worker` is the thread that decodes."""

    def __init__(
        self,
        models: ModelPool,
        engine: Engine,
        limits: HostLimits | None = None,
        worker: Worker | WorkerGroup | None = None,
    ) -> None:
        self.limits = limits if limits is not None else HostLimits()
        self.worker = worker if worker is not None else Worker(waiting=self.limits.queue)
        self.runs = RunStore()
        self.last_token: float | None = None  # when one was produced, by `time.monotonic`
        self.clouds = LocalServices(models.idle_s if math.isfinite(models.idle_s) else 600.0)
        self._models, self._engine = models, engine
        self.talks: OrderedDict[str, list[ChatMessage]] = OrderedDict()  # by visitor: what was said so far
        self._visitors, self._door = Visitors(self.limits), threading.Lock()
        self._stores: OrderedDict[str, Stores] = OrderedDict()  # by visitor: nobody's text shows in another's drafts
        self._benches: dict[str, Stream[BenchProgress | dict[str, Any]]] = {}  # by visitor, the latest of each
        self._idle: threading.Timer | None = None

    def start(self, jobs: list[tuple[str, Recipe]], prompt: Any, visitor: str = "", address: str = "") -> Lines:
        """Decode `prompt` by each recipe in turn; items are a lane's name and a line of its trace.

        `visitor` is whose n-grams may be used, `address` whom the limits count.
        """
        if not isinstance(prompt, str):
            raise UserError(f"the prompt must be a text, not {type(prompt).__name__}")
        said = [*self.talks.get(visitor, ()), {"role": "user", "content": prompt}]
        whole = "".join(message["content"] for message in said) if any(one.chat for _, one in jobs) else prompt
        granted = [(lane, self.limits.grant(recipe, whole)) for lane, recipe in jobs]
        kept = any(recipe.ngram_keep or recipe.chat for _, recipe in granted)
        stores = self._stores_of(visitor) if kept else {}
        budget = TimeBudget(self.limits.max_seconds)

        def steps() -> Iterator[tuple[str, dict[str, Any]]]:
            for lane, asked in granted:
                if asked.needs_local_service:
                    yield lane, {"phase": "loading", "text": "a cloud of its own, in a process beside this one"}
                event: dict[str, Any] = {}
                read = said if asked.chat else prompt
                with self._with_services([asked]) as (recipe,):
                    with closing(self._engine(recipe, read, self._models, stores)) as events:
                        for event in self._noting(budget.spend(events)):
                            yield lane, event
                if event.get("end") in ("error", "cancelled"):
                    return

        return self._admit(steps, address)

    def probe(self, recipe: Recipe) -> Stream[dict[str, Any]]:
        """A run that no visitor asked for, to see whether there are tokens to be had."""
        return self._submit(lambda: self._noting(self._engine(recipe, PROBE, self._models, {})))

    async def preflight(self, recipe: Recipe, prompt: str = "", address: str = "") -> Preflight:
        """Estimates for `recipe` from the bundled texts, and from `prompt` if there is one."""
        if isinstance(self.worker, WorkerGroup):
            raise UserError("preflight times a device that stays, and here one is lent to each run: just run it")
        if recipe.cloud is not None:
            raise UserError("preflight times both models on this machine: choose mode off, or just run it")
        recipe = self.limits.grant(recipe, prompt)
        kinds: dict[str, list[Prompt]] = {}
        for one in texts_for(recipe):
            kinds.setdefault(one.kind, []).append(one)
        texts = [one for some in kinds.values() for one in some[:OF_EACH_KIND]]
        if prompt:
            texts.append(Prompt("own", "own", prompt))

        def job() -> Iterator[Preflight]:
            yield preflight(recipe, texts, self._models)

        stream = self._admit(job, address)
        async with aclosing(drain(stream)) as batches:
            async for batch in batches:
                for found in batch:
                    return found
        raise stream.error or RuntimeError("the worker gave no answer")

    def bench(
        self, recipes: Sequence[Recipe], prompts: Sequence[Prompt], visitor: str, address: str = ""
    ) -> Stream[BenchProgress | dict[str, Any]]:
        """Measure every recipe on every prompt; what this visitor still had measured is asked to stop."""
        if self.limits.max_seconds is not None or isinstance(self.worker, WorkerGroup):
            raise UserError(
                "a bench takes minutes, which this host gives to nobody: run the program on your own machine"
            )
        granted = [self.limits.grant(recipe, max((prompt.text for prompt in prompts), key=len)) for recipe in recipes]
        self.stop_bench(visitor)

        def steps() -> Iterator[BenchProgress | dict[str, Any]]:
            with self._with_services(granted) as recipes:
                yield from measure(recipes, prompts, self._models)

        stream = self._admit(steps, address)
        self._benches[visitor] = stream
        return stream

    @contextmanager
    def _with_services(self, recipes: Sequence[Recipe]) -> Iterator[list[Recipe]]:
        """Yield `recipes` with the address of a local service where they need one; it runs at least that long."""
        with self.clouds.running(recipe.target_spec for recipe in recipes if recipe.needs_local_service) as urls:
            yield [
                replace(recipe, cloud=replace(recipe.cloud, remote=urls[recipe.target_spec]))
                if recipe.cloud is not None and recipe.needs_local_service
                else recipe
                for recipe in recipes
            ]

    def stop_bench(self, visitor: str) -> None:
        """End what this visitor has measured, after the step that is being made."""
        if stream := self._benches.pop(visitor, None):
            stream.stop()

    async def unload(self) -> str:
        """Let go of all models; what that gave, in words. Runs that are going on keep theirs to their end.

        Raises `UserError` where visitors share them.
        """
        if self.limits.public:
            raise UserError(
                "all visitors share the models here, so nobody unloads them: those that nobody uses go anyway"
            )

        def job() -> Iterator[str]:
            held = self._models.weight_bytes
            self._models.clear()
            yield f"{format_bytes(held)} of weights unloaded." if held else "No model was loaded."

        stream = self.worker.submit(job)
        async with aclosing(drain(stream)) as batches:
            async for batch in batches:
                for said in batch:
                    return said
        return reason(stream.error or RuntimeError("the worker gave no answer"))

    def _submit(self, job: Callable[[], Iterator[Any]]) -> Stream:
        """Have it done; afterwards, and whenever a model has become idle then, the worker looks for idle ones."""

        def steps() -> Iterator[Any]:
            try:
                yield from job()
            finally:
                self._tidy_later()

        return self.worker.submit(steps)

    def _tidy_later(self) -> None:
        """When the first of the loaded models has been idle for long enough, unload it; where they stay, never."""

        def tidy() -> Iterator[int]:
            yield self._models.tidy()

        def submit() -> None:
            with suppress(RuntimeError):  # busy, so there will be another occasion; or closed
                self._submit(tidy)

        if self._idle:
            self._idle.cancel()
        if (due := self._models.due_s) is None:
            return
        self._idle = threading.Timer(due, submit)
        self._idle.daemon = True
        self._idle.start()

    def heard(self, visitor: str, prompt: str, run: Run) -> None:
        """A turn of this visitor's conversation is over: what the first lane wrote is the answer."""
        lane = run.lanes[run.plan[0]]
        if lane.recipe.get("chat") and run.phase[0] == "done":
            answer = "".join(line["text"] for line in lane.lines if "i" in line)
            talk = self.talks.setdefault(visitor, [])
            talk += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            self.talks.move_to_end(visitor)
            while len(self.talks) > REMEMBERED:
                self.talks.popitem(last=False)

    def leave(self, visitor: str) -> None:
        """This visitor has gone: end what they had going, forget what it taught."""
        self.runs.leave(visitor)
        self.stop_bench(visitor)
        self._stores.pop(visitor, None)
        self.talks.pop(visitor, None)

    def _admit(self, job: Callable[[], Iterator[Any]], address: str) -> Stream:
        with self._door:
            self._visitors.admit(address)
            stream = self._submit(job)
            self._visitors.entered(address, stream)
        return stream

    def _noting(self, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            if event.get("tokens"):
                self.last_token = time.monotonic()
            yield event

    def _stores_of(self, visitor: str) -> Stores:
        """This visitor's; a client that gives a new name every time pushes out the others, and fills no memory."""
        if not visitor:
            return {}
        stores = self._stores.setdefault(visitor, {})
        self._stores.move_to_end(visitor)
        while len(self._stores) > REMEMBERED:
            self._stores.popitem(last=False)
        return stores


def leave_a_core() -> None:
    """Keep torch off one of the cores, for a browser on the same machine.

    Where visitors are elsewhere all cores are better: docs/page.md has both.
    """
    torch.set_num_threads(min(torch.get_num_threads(), cores_but_one()))
