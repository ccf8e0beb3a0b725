"""Service of the page: it owns the decoding worker and the models, and admits the runs of visitors."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from traceback import format_tb
from typing import Any, TypeVar

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from specdemo.bench.calibration import Calibration, calibrate
from specdemo.bench.measure import BenchProgress, measure
from specdemo.bench.pairs import PairBench, measure_pairs
from specdemo.core.errors import FULL_DISK, UserError, write_error
from specdemo.core.events import End, Event, Loading, StepEvent
from specdemo.core.formats import format_bytes
from specdemo.core.metrics import Metrics
from specdemo.fit import FitRow, fit
from specdemo.models.chat_caches import Stores
from specdemo.models.chat_prompt import PromptOrChat
from specdemo.models.engines.engine import thread_initializer
from specdemo.models.memory import has_memory_for_text
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import ChatMessage
from specdemo.preflight import OWN, SHORT_TEXT_TOKENS, Preflight, PreflightProgress, predict
from specdemo.prompts import Prompt, alternate_classes, load_prompts
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.admission import network_of
from specdemo.remote.local_service import LocalServices, cores_but_one
from specdemo.remote.server import JobHealth, Unhealthy
from specdemo.shared_passes import PASS_ROWS
from specdemo.ui.frames import Run
from specdemo.ui.lane import is_short
from specdemo.ui.limits import HostLimits, RunRates, TimeBudget
from specdemo.ui.run_store import RunStore
from specdemo.ui.settings import with_method_names
from specdemo.ui.visitors import Visitors
from specdemo.worker import Stream, Worker, WorkerBusy, read_batches, unshared_passes

WARM_UP_TOKENS = 8
PROBE = "def"
FRAME_S = 1 / 12  # shortest time between two frames
LONGEST_REASON = 600  # characters; error messages can quote arbitrary input
LATELY_S = 600  # an idle machine decodes two tokens per ten minutes
PATIENCE_S = 20
_FIT_OPTIONS = ("temperature", "top_p", "chat", "dtype", "quantization", "activations", "device")
PROMPTS_PER_KIND = 3  # prompts per kind of text in a preflight
BenchJob = Callable[[], Iterator[BenchProgress | dict[str, Any]]]
log = logging.getLogger(__name__)
T = TypeVar("T")

LaneEvents = Stream[tuple[str, Event]]
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

        def unload_idle() -> None:
            with suppress(RuntimeError):  # the queue is full (the next job tidies) or closed
                self.worker.submit(partial(self._tidied, lambda: iter([self.models.unload_idle()])))

        try:
            yield from job()
        finally:
            if self._idle:
                self._idle.cancel()
            if (due := self.models.seconds_to_unload) is not None:
                self._idle = threading.Timer(due, unload_idle)
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


async def read_result(stream: Stream[Any], kind: type[T]) -> T:
    """Return the first item of this type. Raises the error of the job."""
    async with aclosing(read_batches(stream, FRAME_S)) as batches:
        async for batch in batches:
            for item in batch:
                if isinstance(item, kind):
                    return item
    raise stream.error or RuntimeError("the worker returned no result")


def error_sentence(error: BaseException) -> str:
    """Convert an exception to a sentence for the visitor; log unexpected exceptions."""
    if isinstance(error, (UserError, WorkerBusy)):
        text = with_method_names(str(error))
    elif isinstance(error, OSError) and error.errno in (*FULL_DISK, errno.EROFS):
        text = str(write_error("to the disk of this host", error))
    else:
        # The log omits the message, which can quote the text of a visitor.
        log.error("a run failed: %s\n%s", type(error).__name__, "".join(format_tb(error.__traceback__)))
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"


class Health:
    """Health check of the service; its probe decodes `recipe`."""

    def __init__(self, service: Service, recipe: Recipe) -> None:
        self._service = service
        self.route = Route("/health", self.answer)
        probe = partial(service.probe, recipe)
        self.jobs = JobHealth(
            service.worker, probe, PATIENCE_S, lambda: time.monotonic() - service.last_token, LATELY_S
        )

    async def answer(self, _: Request) -> JSONResponse:
        """Respond to `GET /health` with 200 or 503, the reason and the passes by texts."""
        alive = True
        try:
            why = await asyncio.to_thread(self.jobs.check)
        except Unhealthy as error:
            alive, why = False, str(error) if error.__cause__ is None else error_sentence(error.__cause__)
        passes = {str(texts): count for texts, count in sorted(self._service.worker.texts_per_pass.items())}
        return JSONResponse({"alive": alive, "why": why, "texts_per_pass": passes}, 200 if alive else 503)


# --- jobs of predictions, benches and calibrations; they raise `UserError` if the host does not allow them -----------


def prediction_job(
    service: Service, recipe: Recipe, prompt: str = ""
) -> Callable[[], Iterator[PreflightProgress | Preflight]]:
    """Predict the speed-up from a short text after `prompt`, without one from texts of all classes."""
    if not service.permanent:
        raise UserError("preflight needs a permanent device, which this host does not have: press Run instead")
    if recipe.cloud is not None:
        raise UserError("preflight times both models on this machine: choose mode off, or press Run instead")
    if recipe.external is not None:
        raise UserError("preflight times both models on this machine: leave external empty")
    recipe = service.limits.grant(recipe, prompt)
    texts = alternate_classes(load_prompts(chat=recipe.chat), PROMPTS_PER_KIND)
    if prompt.strip():
        texts = [Prompt(OWN, OWN, prompt)]
        recipe = replace(recipe, max_tokens=min(recipe.max_tokens, SHORT_TEXT_TOKENS), min_length=0)
    return lambda: predict(recipe, texts, service.models)


def fit_job(service: Service, recipe: Recipe) -> Callable[[], Iterator[PreflightProgress | FitRow]]:
    """Compare the models of this machine as drafters for the target of `recipe`."""
    if service.limits.public or not service.permanent:
        raise UserError("the files of this host are not shown to visitors: run the program on your machine")
    values = {name: getattr(recipe, name) for name in _FIT_OPTIONS}
    return lambda: fit(recipe.models[0], (), values, service.models)


def bench_job(service: Service, recipes: Sequence[Recipe], prompts: Sequence[Prompt]) -> BenchJob:
    """Measure every recipe on every prompt."""
    granted = _grant_long(service, recipes, prompts)

    def steps() -> Iterator[BenchProgress | dict[str, Any]]:
        with service.with_services(granted) as recipes:
            yield from measure(recipes, prompts, service.models)

    return steps


def pairs_bench_job(service: Service, benches: Sequence[PairBench], prompts: Sequence[Prompt]) -> BenchJob:
    """Measure pairs in turn and add the records to `benches`."""
    for bench in benches:
        bench.recipes = _grant_long(service, bench.recipes, prompts)
    return lambda: measure_pairs(benches, prompts, service.models)


def calibration_job(
    service: Service, recipe: Recipe, prompts: Sequence[Prompt]
) -> Callable[[], Iterator[BenchProgress | Calibration]]:
    """Measure thresholds of gates."""
    (granted,) = _grant_long(service, [recipe], prompts)
    return lambda: calibrate(granted, prompts, service.models)


def _grant_long(service: Service, recipes: Sequence[Recipe], prompts: Sequence[Prompt]) -> list[Recipe]:
    if service.limits.max_seconds is not None or not service.permanent:
        raise UserError("measurements take minutes, which this host does not allow: run the program on your machine")
    longest = max((prompt.text for prompt in prompts), key=len)
    return [service.limits.grant(replace(recipe, ngram_keep=False), longest) for recipe in recipes]
