"""Service of the page: it owns the decoding worker, the models and all runs, and checks their health."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, TypeVar

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from specdemo.bench.calibration import Calibration, calibrate
from specdemo.bench.measure import BenchProgress, measure
from specdemo.bench.pairs import PairBench, measure_pairs
from specdemo.core.errors import UserError
from specdemo.core.events import End, Event, Loading, StepEvent
from specdemo.core.formats import format_bytes
from specdemo.models.chat_prompt import PromptOrChat
from specdemo.models.memory import has_memory_for_text
from specdemo.models.model_pool import ModelPool
from specdemo.models.threads import thread_initializer
from specdemo.models.tokenizer import ChatMessage
from specdemo.pipeline import CONVERSATION, Stores, stored_bytes
from specdemo.preflight import OWN, SHORT_TEXT_TOKENS, Preflight, PreflightProgress, predict, texts_for
from specdemo.prompts import Prompt, alternate_classes
from specdemo.recipe import Recipe
from specdemo.remote.connections import network_of
from specdemo.remote.local_service import LocalServices, cores_but_one
from specdemo.shared_passes import PASS_ROWS
from specdemo.ui.conversation import answer_footer
from specdemo.ui.frames import Run
from specdemo.ui.limits import HostLimits, TimeBudget, Visitors
from specdemo.ui.run_store import RunStore
from specdemo.ui.streams import LaneEvents, drain, reason
from specdemo.worker import Stream, Worker, WorkerBusy, WorkerGroup, unshared_passes

REMEMBERED = 256  # visitors with stored n-grams and conversations
MAX_STORED_BYTES = 512 << 20  # n-grams and suffixes of all visitors
PROMPTS_PER_KIND = 3  # prompts per kind of text in a preflight
WARM_UP_TOKENS = 8
PROBE = "def"
LATELY_S = 600  # an idle machine decodes two tokens per ten minutes
PATIENCE_S = 20
T = TypeVar("T")
Turn = Literal["new", "next", "same"]

Generate = Callable[[Recipe, PromptOrChat, ModelPool, Stores], Generator[Event]]


class Service:
    """Decoding service of page and API. It admits runs, submits them to the worker and returns their streams."""

    def __init__(
        self,
        models: ModelPool,
        engine: Generate,
        limits: HostLimits | None = None,
        worker: Worker | WorkerGroup | None = None,
    ) -> None:
        self.limits = limits if limits is not None else HostLimits()
        self.worker = worker if worker is not None else _shared_device(self.limits)
        self.last_token: float | None = None  # time of `time.monotonic`
        self.clouds = LocalServices(models.idle_s if math.isfinite(models.idle_s) else 600.0)
        self._models, self._engine = models, engine
        self.conversations: OrderedDict[str, list[ChatMessage]] = OrderedDict()
        self.footers: OrderedDict[str, list[str]] = OrderedDict()  # one per answer of a conversation
        self._began: OrderedDict[str, datetime] = OrderedDict()  # time that chat templates read
        self._visitors, self._admission = Visitors(self.limits), threading.Lock()
        self.runs = RunStore(max_trace=self.limits.max_trace, admit=self._admit_request)
        self._stores: OrderedDict[str, dict[str, Stores]] = OrderedDict()
        self._benches: dict[str, Stream[BenchProgress | dict[str, Any]]] = {}
        self._idle: threading.Timer | None = None

    def history(self, visitor: str, prompt: Any, turn: Turn) -> list[ChatMessage]:
        """Return the messages before a turn: none, all, or those before the last turn if it had the same prompt."""
        if turn == "new":
            self._began.pop(visitor, None)
        earlier = self.conversations.get(visitor, []) if turn != "new" else []
        if turn == "same":
            return earlier[:-2] if earlier and earlier[-2]["content"] == prompt else []
        return [*earlier]

    def last_message(self, visitor: str) -> str:
        """Return the visitor's last message of the conversation, or an empty text."""
        earlier = self.conversations.get(visitor, [])
        return earlier[-2]["content"] if len(earlier) > 1 else ""

    def start(
        self,
        jobs: list[tuple[str, Recipe]],
        prompt: Any,
        visitor: str = "",
        address: str = "",
        history: Sequence[ChatMessage] = (),
        warm_up: bool = False,
    ) -> LaneEvents:
        """Decode `prompt` after `history` with each recipe in turn. Items are pairs of lane and event.

        `visitor` selects the stored n-grams, `address` the rate limit; `warm_up`: first decode a few tokens per recipe.
        """
        if not isinstance(prompt, str):
            raise UserError(f"the prompt must be a text, not {type(prompt).__name__}")
        conversation = [*history, {"role": "user", "content": prompt}]
        chat = any(recipe.chat for _, recipe in jobs)
        text = "".join(message["content"] for message in conversation) if chat else prompt
        now = _remembered(self._began, visitor, datetime.now()) if visitor else datetime.now()
        granted = [(lane, self.limits.grant(recipe, text).at(now)) for lane, recipe in jobs]
        keep = any(recipe.ngram_keep or recipe.chat for _, recipe in granted)
        remembered = self._stores_of(visitor) if keep and visitor else {}
        budget = TimeBudget(self.limits.max_seconds)

        def events() -> Iterator[tuple[str, Event]]:
            if warm_up and isinstance(self.worker, Worker):
                yield from self._warm_up(granted)
            for i, (lane, recipe) in enumerate(granted):
                stores = remembered.setdefault(lane, {})
                if not history or any(lane == earlier for earlier, _ in granted[:i]):
                    stores.pop(CONVERSATION, None)  # new conversations and repetitions compute their prefill
                if recipe.needs_local_service:
                    yield lane, Loading("starting a cloud process on this machine")
                with (
                    self._with_services([recipe]) as (served,),
                    closing(
                        self._engine(served, conversation if recipe.chat else prompt, self._models, stores)
                    ) as stream,
                ):
                    event: Event | None = None
                    for event in self._noting(budget.spend(stream)):
                        yield lane, event
                if isinstance(event, End) and event.reason in ("error", "cancelled"):
                    return

        return self._admit(events, address, visitor)

    def _stores_of(self, visitor: str) -> dict[str, Stores]:
        stores = _remembered(self._stores, visitor, dict[str, Stores]())
        sizes = {name: sum(map(stored_bytes, list(lanes.values()))) for name, lanes in [*self._stores.items()]}
        excess = sum(sizes.values()) - MAX_STORED_BYTES
        for name, size in sizes.items():
            if size and excess > 0 and name != visitor:
                self._stores.pop(name, None)  # another thread may have removed it
                excess -= size
        return stores

    def _warm_up(self, jobs: Sequence[tuple[str, Recipe]]) -> Iterator[tuple[str, Event]]:
        for lane, recipe in jobs:
            if recipe.cloud is not None:
                continue
            short = replace(recipe, max_tokens=min(recipe.max_tokens, WARM_UP_TOKENS), min_length=0)
            prompt: PromptOrChat = [{"role": "user", "content": PROBE}] if recipe.chat else PROBE
            yield lane, Loading("warming up")
            with closing(self._engine(short, prompt, self._models, {})) as stream:
                yield from ((lane, event) for event in stream if isinstance(event, Loading))

    def probe(self, recipe: Recipe) -> Stream[Event]:
        return self._submit(lambda: self._noting(self._engine(recipe, PROBE, self._models, {})))

    def predict(self, recipe: Recipe, prompt: str = "", address: str = "") -> Stream[PreflightProgress | Preflight]:
        """Predict the speed-up from a short text after `prompt`, without one from texts of all classes."""
        if isinstance(self.worker, WorkerGroup):
            raise UserError("preflight needs a permanent device, which this host does not have: press Run instead")
        if recipe.cloud is not None:
            raise UserError("preflight times both models on this machine: choose mode off, or press Run instead")
        if recipe.external is not None:
            raise UserError("preflight times both models on this machine: leave external empty")
        recipe = self.limits.grant(recipe, prompt)
        texts = alternate_classes(texts_for(recipe), PROMPTS_PER_KIND)
        if prompt.strip():
            texts = [Prompt(OWN, OWN, prompt)]
            recipe = replace(recipe, max_tokens=min(recipe.max_tokens, SHORT_TEXT_TOKENS), min_length=0)
        return self._admit(lambda: _measured(predict(recipe, texts, self._models)), address)

    async def preflight(self, recipe: Recipe, address: str = "") -> Preflight:
        async with aclosing(drain(stream := self.predict(recipe, address=address))) as batches:
            async for batch in batches:
                for item in batch:
                    if isinstance(item, Preflight):
                        return item
        raise stream.error or RuntimeError("the worker returned no result")

    def bench(
        self, recipes: Sequence[Recipe], prompts: Sequence[Prompt], visitor: str, address: str = ""
    ) -> Stream[BenchProgress | dict[str, Any]]:
        """Measure every recipe on every prompt; stop the visitor's previous bench."""
        granted = self._grant_bench(recipes, prompts)

        def steps() -> Iterator[BenchProgress | dict[str, Any]]:
            with self._with_services(granted) as recipes:
                yield from measure(recipes, prompts, self._models)

        return self._start_bench(steps, visitor, address)

    def bench_pairs(
        self, benches: Sequence[PairBench], prompts: Sequence[Prompt], visitor: str, address: str = ""
    ) -> Stream[BenchProgress | dict[str, Any]]:
        """Measure one pair after another and add the records to `benches`; stop the visitor's previous bench."""
        for bench in benches:
            bench.recipes = self._grant_bench(bench.recipes, prompts)
        return self._start_bench(lambda: measure_pairs(benches, prompts, self._models), visitor, address)

    def _grant_bench(self, recipes: Sequence[Recipe], prompts: Sequence[Prompt]) -> list[Recipe]:
        if self.limits.max_seconds is not None or isinstance(self.worker, WorkerGroup):
            raise UserError("a bench takes minutes, which this host does not allow: run the program on your machine")
        longest = max((prompt.text for prompt in prompts), key=len)
        return [self.limits.grant(replace(recipe, ngram_keep=False), longest) for recipe in recipes]

    def _start_bench(
        self, job: Callable[[], Iterator[BenchProgress | dict[str, Any]]], visitor: str, address: str
    ) -> Stream[BenchProgress | dict[str, Any]]:
        stream = self._admit(lambda: _measured(job()), address, visitor, replaced=self._benches.get(visitor))
        self.stop_bench(visitor)
        self._benches[visitor] = stream
        return stream

    def calibrate(
        self, recipe: Recipe, prompts: Sequence[Prompt], visitor: str, address: str = ""
    ) -> Stream[BenchProgress | Calibration]:
        """Measure thresholds of gates."""
        if self.limits.max_seconds is not None or isinstance(self.worker, WorkerGroup):
            raise UserError("calibration takes long, which this host does not allow: run specdemo calibrate")
        longest = max((prompt.text for prompt in prompts), key=len)
        granted = self.limits.grant(replace(recipe, ngram_keep=False), longest)
        return self._admit(lambda: _measured(calibrate(granted, prompts, self._models)), address, visitor)

    @contextmanager
    def _with_services(self, recipes: Sequence[Recipe]) -> Iterator[list[Recipe]]:
        """Yield `recipes` with the addresses of local services, which run until the context is left."""
        counts = {
            recipe.target_spec: recipe.cloud.replicas
            for recipe in recipes
            if recipe.cloud is not None and recipe.needs_local_service
        }
        with self.clouds.running(counts) as urls:
            yield [
                replace(recipe, cloud=replace(recipe.cloud, remote=urls[recipe.target_spec]))
                if recipe.cloud is not None and recipe.needs_local_service
                else recipe
                for recipe in recipes
            ]

    def kill_replica(self, run: Run | None) -> str:
        """Kill the local service that verifies a run; return a message. Raises `UserError`."""
        if self.limits.remote is not None:
            raise UserError("the services of this host belong to all visitors: run the program on your machine")
        steps = [event.step for lane in run.lanes.values() for event in lane.steps] if run is not None else []
        replica = next((step.verdict.replica for step in reversed(steps) if step.verdict.replica), "")
        self.clouds.kill(replica)
        return f"{replica} was killed. A run with several local services continues with another."

    def stop_bench(self, visitor: str) -> None:
        if stream := self._benches.pop(visitor, None):
            stream.stop()

    async def unload(self) -> str:
        """Unload all models that no run uses; return a message. Raises `UserError` on public hosts."""
        if self.limits.public:
            raise UserError("all visitors share the models of this host: idle models are unloaded automatically")

        def job() -> Iterator[str]:
            size = self._models.weight_bytes
            self._models.clear()
            yield f"{format_bytes(size)} of weights unloaded." if size else "No model was loaded."

        try:
            return await _only_item(self.worker.submit(job))
        except Exception as error:
            return reason(error)

    def _submit(self, job: Callable[[], Iterator[T]], owner: str = "") -> Stream[T]:
        def steps() -> Iterator[T]:
            try:
                yield from job()
            finally:
                self._tidy_later()

        return self.worker.submit(steps, owner=owner)

    def _tidy_later(self) -> None:
        def tidy() -> Iterator[int]:
            yield self._models.tidy()

        def submit() -> None:
            with suppress(RuntimeError):  # the queue is full (the next job tidies) or closed
                self._submit(tidy)

        if self._idle:
            self._idle.cancel()
        if (due := self._models.due_s) is None:
            return
        self._idle = threading.Timer(due, submit)
        self._idle.daemon = True
        self._idle.start()

    def remember_turn(self, visitor: str, prompt: str, run: Run) -> None:
        """Store the run's history and the first lane's turn as the visitor's conversation."""
        lane = run.lanes[run.plan[0]]
        if lane.recipe.get("chat") and run.phase[0] == "done":
            answer = "".join(event.text for event in lane.steps)
            turn: list[ChatMessage] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            _remembered(self.conversations, visitor, list[ChatMessage]())[:] = [*run.history, *turn]
            notes = _remembered(self.footers, visitor, list[str]())
            notes[:] = [*notes[: len(run.history) // 2], answer_footer(run.lanes)]

    def leave(self, visitor: str) -> None:
        """Release the data of a session; its run ends separately."""
        self.stop_bench(visitor)
        self._stores.pop(visitor, None)
        self.forget(visitor)

    def forget(self, visitor: str) -> None:
        """End the visitor's conversation. A run under way keeps its stores, and releases them."""
        lanes = self._stores.get(visitor, {})
        for lane, stores in list(lanes.items()):  # a job may add lanes
            remaining = stores.copy()
            remaining.pop(CONVERSATION, None)
            lanes[lane] = remaining
        self.conversations.pop(visitor, None)
        self.footers.pop(visitor, None)

    def _admit(
        self, job: Callable[[], Iterator[T]], address: str, visitor: str = "", replaced: Stream[Any] | None = None
    ) -> Stream[T]:
        with self._admission:
            self._visitors.admit(address, replaced)
            stream = self._submit(job, visitor or network_of(address))
            self._visitors.entered(address, stream)
        return stream

    def _admit_request(self, address: str) -> None:
        with self._admission:
            self._visitors.admit(address)
            self._visitors.entered(address)

    def _noting(self, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, StepEvent) and event.step.tokens:
                self.last_token = time.monotonic()
            yield event


def _measured(results: Iterator[T]) -> Iterator[T]:
    with unshared_passes():
        yield from results


def _shared_device(limits: HostLimits) -> Worker:
    texts = PASS_ROWS if limits.batch is None else limits.batch
    return Worker(waiting=limits.queue, prepare=thread_initializer(), texts=texts, has_memory=has_memory_for_text)


def _remembered(table: OrderedDict[str, T], visitor: str, new: T) -> T:
    value = table.setdefault(visitor, new)
    table.move_to_end(visitor)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
    return value


async def _only_item(stream: Stream[T]) -> T:
    async with aclosing(drain(stream)) as batches:
        async for batch in batches:
            for item in batch:
                return item
    raise stream.error or RuntimeError("the worker returned no result")


def leave_a_core() -> None:
    """Reserve a core for a browser on the same machine. With remote visitors use all cores: docs/page.md."""
    torch.set_num_threads(min(torch.get_num_threads(), cores_but_one()))


class Health:
    """Health check of the service. If the last token is old, a probe run is started and shared by all requests."""

    def __init__(
        self, service: Service, recipe: Recipe, lately_s: float = LATELY_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._service, self._recipe = service, recipe
        self._lately, self._patience = lately_s, patience_s
        self._probe: Stream[Event] | None = None

    @property
    def age_s(self) -> float | None:
        """Seconds since the last token; None before the first."""
        last = self._service.last_token
        return None if last is None else time.monotonic() - last

    @property
    def fresh(self) -> bool:
        return self.age_s is not None and self.age_s <= self._lately

    async def look(self) -> tuple[bool, str]:
        if self.fresh:
            return True, f"a token was produced {self.age_s:.0f} s ago"
        try:
            if self._probe is None or self._probe.done:
                self._probe = self._service.probe(self._recipe)
        except WorkerBusy as error:
            return False, f"no recent token, and {error}"
        await asyncio.to_thread(self._probe.wait, self._patience)
        if self.fresh:
            return True, "the page was idle, and a probe produced a token"
        if self._probe.error:
            return False, reason(self._probe.error)
        return False, f"no token within {self._patience:g} s: the device is loading models or does not respond"

    def routes(self) -> list[Route]:
        """Return the route `GET /health`: 200 or 503, with the reason and the passes by texts."""

        async def answer(_: Request) -> JSONResponse:
            alive, why = await self.look()
            passes = {str(texts): count for texts, count in sorted(self._service.worker.texts_per_pass.items())}
            return JSONResponse({"alive": alive, "why": why, "texts_per_pass": passes}, 200 if alive else 503)

        return [Route("/health", answer)]
