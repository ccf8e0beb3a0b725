"""Service of the page: it owns the decoding worker and the models, and admits the runs of visitors."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import torch

from specdemo.core.errors import UserError
from specdemo.core.events import End, Event, Loading, StepEvent
from specdemo.core.formats import format_bytes
from specdemo.core.metrics import Metrics
from specdemo.models.chat_caches import Stores
from specdemo.models.chat_prompt import PromptOrChat
from specdemo.models.memory import has_memory_for_text
from specdemo.models.model_pool import ModelPool
from specdemo.models.threads import thread_initializer
from specdemo.models.tokenizer import ChatMessage
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.connections import network_of
from specdemo.remote.local_service import LocalServices, cores_but_one
from specdemo.ui.frames import Run
from specdemo.ui.lane import is_short
from specdemo.ui.limits import HostLimits, RunRates, TimeBudget
from specdemo.ui.run_store import RunStore
from specdemo.ui.streams import LaneEvents, error_sentence, read_result
from specdemo.ui.visitors import Visitors
from specdemo.worker import PASS_ROWS, Stream, Worker, unshared_passes

WARM_UP_TOKENS = 8
PROBE = "def"
T = TypeVar("T")

Generate = Callable[[Recipe, PromptOrChat, ModelPool, Stores], Generator[Event]]


class Service:
    """Decoding service of page and API. It admits runs, submits them to the worker and returns their streams."""

    def __init__(
        self,
        models: ModelPool,
        engine: Generate,
        limits: HostLimits | None = None,
        worker: Worker | None = None,
        permanent: bool = True,
    ) -> None:
        """`permanent`: the device belongs to the page; otherwise (ZeroGPU) each run gets one."""
        self.permanent = permanent
        self.limits = limits if limits is not None else HostLimits()
        texts = PASS_ROWS if self.limits.batch is None else self.limits.batch
        self.worker = worker or Worker(
            waiting=self.limits.queue, prepare=thread_initializer(), texts=texts, has_memory=has_memory_for_text
        )
        self.last_token = -math.inf  # time of `time.monotonic`
        self.clouds = LocalServices(models.idle_s if math.isfinite(models.idle_s) else 600.0)
        self.models, self._engine = models, engine
        self._rates = RunRates(self.limits)
        self.visitors = Visitors()
        self.runs = RunStore(self.visitors, max_trace=self.limits.max_trace, admit=self._rates.count)
        self._idle: threading.Timer | None = None

    def start(
        self,
        jobs: list[tuple[str, Recipe]],
        prompt: Any,
        visitor: str = "",
        address: str = "",
        history: Sequence[ChatMessage] = (),
        warm_up: bool = False,
        repeated_from: int | None = None,
    ) -> LaneEvents:
        """Decode `prompt` after `history` with each recipe in turn. Items are pairs of lane and event.

        `visitor` selects the stored n-grams, `address` the rate limit; `warm_up`: first decode a few tokens per recipe.
        `repeated_from`: index of the first repetition, for short texts only.
        """
        if not isinstance(prompt, str):
            raise UserError(f"the prompt must be a text, not {type(prompt).__name__}")
        conversation = [*history, {"role": "user", "content": prompt}]
        chat = any(recipe.chat for _, recipe in jobs)
        text = "".join(message["content"] for message in conversation) if chat else prompt
        known = self.visitors.get_or_add(visitor)
        now = known.began or datetime.now()
        granted = [(lane, self.limits.grant(recipe, text).at(now)) for lane, recipe in jobs]
        remembered: dict[str, Stores] = {}
        if any(recipe.ngram_keep or recipe.chat for _, recipe in granted):
            remembered = known.stores
            self.visitors.limit_stores(known)
        budget = TimeBudget(self.limits.max_seconds)

        def events() -> Generator[tuple[str, Event]]:
            if warm_up and self.permanent:
                yield from self._warm_up(granted)
            for i, (lane, recipe) in enumerate(granted):
                stores = remembered.get(lane, Stores())
                if not history or any(lane == earlier for earlier, _ in granted[:i]):
                    stores = stores.without_conversation()  # new conversations and repetitions compute their prefill
                remembered[lane] = stores
                if plan_run(recipe).needs_local_service:
                    yield lane, Loading("starting a cloud process on this machine")
                with (
                    self.with_services([recipe]) as (served,),
                    closing(self._decode(served, conversation if recipe.chat else prompt, stores)) as stream,
                ):
                    event: Event | None = None
                    for event in budget.spend(stream):
                        yield lane, event
                if isinstance(event, End) and event.reason in ("error", "cancelled"):
                    return

        job = events if repeated_from is None else partial(_repeat_if_short, events, repeated_from)
        return self.admit(job, address, visitor)

    def _warm_up(self, jobs: Sequence[tuple[str, Recipe]]) -> Iterator[tuple[str, Event]]:
        for lane, recipe in jobs:
            if recipe.cloud is not None:
                continue
            short = replace(recipe, max_tokens=min(recipe.max_tokens, WARM_UP_TOKENS), min_length=0)
            prompt: PromptOrChat = [{"role": "user", "content": PROBE}] if recipe.chat else PROBE
            yield lane, Loading("warming up")
            with closing(self._decode(short, prompt, Stores())) as stream:
                yield from ((lane, event) for event in stream if isinstance(event, Loading))

    def token_age_s(self) -> float:
        return time.monotonic() - self.last_token

    def probe(self, recipe: Recipe) -> Stream[Event]:
        return self.worker.submit(partial(self._tidied, lambda: self._decode(recipe, PROBE, Stores())))

    def _decode(self, recipe: Recipe, prompt: PromptOrChat, stores: Stores) -> Generator[Event]:
        with closing(self._engine(recipe, prompt, self.models, stores)) as events:
            for event in events:
                if isinstance(event, StepEvent) and event.step.tokens:
                    self.last_token = time.monotonic()
                yield event

    @contextmanager
    def with_services(self, recipes: Sequence[Recipe]) -> Iterator[list[Recipe]]:
        """Yield `recipes` with the addresses of local services, which run until the context is left."""
        plans = [plan_run(recipe) for recipe in recipes]
        counts = {plan.target: plan.cloud.replicas for plan in plans if plan.cloud and plan.needs_local_service}
        with self.clouds.running(counts) as urls:
            yield [
                replace(plan.recipe, cloud=replace(plan.cloud, remote=urls[plan.target]))
                if plan.cloud and plan.needs_local_service
                else plan.recipe
                for plan in plans
            ]

    def kill_replica(self, run: Run | None) -> str:
        """Kill the local service that verifies a run; return a message. Raises `UserError`."""
        if self.limits.remote is not None:
            raise UserError("the services of this host belong to all visitors: run the program on your machine")
        steps = [event.step for lane in run.lanes.values() for event in lane.steps] if run is not None else []
        replica = next((step.verdict.replica for step in reversed(steps) if step.verdict.replica), "")
        self.clouds.kill(replica)
        return f"{replica} was killed. A run with several local services continues with another."

    async def unload(self) -> str:
        """Unload all models that no run uses; return a message. Raises `UserError` on public hosts."""
        if self.limits.public:
            raise UserError("all visitors share the models of this host: idle models are unloaded automatically")

        def job() -> Iterator[str]:
            size = self.models.weight_bytes
            self.models.clear()
            yield f"{format_bytes(size)} of weights unloaded." if size else "No model was loaded."

        try:
            return await read_result(self.worker.submit(job), str)
        except Exception as error:
            return error_sentence(error)

    def _tidied(self, job: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Run a job; unload models some time after it."""
        try:
            yield from job()
        finally:
            self._tidy_later()

    def _tidy_later(self) -> None:
        def submit() -> None:
            with suppress(RuntimeError):  # the queue is full (the next job tidies) or closed
                self.worker.submit(partial(self._tidied, lambda: iter([self.models.unload_idle()])))

        if self._idle:
            self._idle.cancel()
        if (due := self.models.seconds_to_unload) is None:
            return
        self._idle = threading.Timer(due, submit)
        self._idle.daemon = True
        self._idle.start()

    def admit(
        self, job: Callable[[], Iterator[T]], address: str, visitor: str = "", replaced: Stream[Any] | None = None
    ) -> Stream[T]:
        """Submit a job within the limits of the visitor, without counting the replaced one."""
        owner = visitor or network_of(address)
        return self._rates.start(address, lambda: self.worker.submit(partial(self._tidied, job), owner=owner), replaced)

    def measure(
        self, job: Callable[[], Iterator[T]], address: str, visitor: str = "", replaced: Stream[Any] | None = None
    ) -> Stream[T]:
        """Submit a measurement like `admit`, in passes of its own."""

        def alone() -> Iterator[T]:
            with unshared_passes():
                yield from job()

        return self.admit(alone, address, visitor, replaced)


def leave_a_core() -> None:
    """Reserve a core for a browser on the same machine. With remote visitors use all cores: docs/page.md."""
    torch.set_num_threads(min(torch.get_num_threads(), cores_but_one()))


def _repeat_if_short(events: Callable[[], Generator[tuple[str, Event]]], first: int) -> Iterator[tuple[str, Event]]:
    """Yield the events of the `first` jobs, and of all others after short texts."""
    ends: list[Metrics] = []
    with closing(events()) as stream:
        for lane, event in stream:
            yield lane, event
            if isinstance(event, End):
                ends.append(event.metrics)
                if len(ends) == first and not is_short(ends):
                    return
