"""Generation: from a prompt to events."""

from __future__ import annotations

import platform
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any, TypeAlias

import torch

from specdemo import __version__
from specdemo.core.decode import Drafter, decode
from specdemo.core.errors import UserError
from specdemo.core.events import End, Event, Header, Loading, MemoryUse, StepEvent
from specdemo.core.formats import format_bytes
from specdemo.core.metrics import Metrics
from specdemo.core.target import Target
from specdemo.drafters import METHODS
from specdemo.models import memory
from specdemo.models.load import LoadedModel
from specdemo.models.loaded_pair import LoadedPair
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.threads import torch_threads
from specdemo.models.tokenizer import ChatMessage, TextStream, TokenNames, encode_prompt, prompt_text
from specdemo.pipeline import Pipeline, Stores, build_pipeline, longest_chain
from specdemo.recipe import Recipe
from specdemo.remote.gates import PASSES, EdgeVerifier
from specdemo.remote.target import connect

CHARACTERS_PER_TOKEN = 3  # rough
PromptOrChat: TypeAlias = "str | Sequence[ChatMessage]"


def generate(
    recipe: Recipe,
    prompt: PromptOrChat,
    pool: ModelPool | LoadedPair | None = None,
    stores: Stores | None = None,
    drafter: Drafter | None = None,
) -> Iterator[Event]:
    """Run `recipe` on `prompt`, which may be a conversation if `recipe.chat` is set.

    `pool` provides models (default: a new pool), `stores` the n-grams of earlier runs; `drafter` replaces the recipe's.
    Raises `UserError` before the header; later failures end the run with `End("error")`. Closing the iterator releases
    all resources, without an `End`.
    """
    if not prompt:
        raise UserError("the prompt is empty: type something to continue")
    if isinstance(pool, LoadedPair):
        recipe, pool = pool.bind(recipe), pool.pool
    running = recipe.running
    if drafter is not None and not METHODS[running.method].drafts:
        raise UserError(f"method {running.method} does not draft: choose another method to use a drafter with it")
    run = run_local if running.cloud is None else run_edge_cloud
    yield from run(recipe, prompt, Resources(ModelPool() if pool is None else pool, stores, drafter))


@dataclass(frozen=True)
class Resources:
    """Objects that a run receives from its caller."""

    pool: ModelPool
    stores: Stores | None = None  # n-grams of earlier runs
    drafter: Drafter | None = None  # replaces that of the recipe

    def load(self, specs: Mapping[str, ModelSpec], context: int) -> Generator[Event, None, dict[str, LoadedModel]]:
        """Load the models by role, except a drafter that is replaced, for `context` tokens; yield the progress."""
        needed = {role: spec for role, spec in specs.items() if role != "drafter" or self.drafter is None}
        with closing(self.pool.bring(list(needed.values()), context)) as loading:
            for progress in loading:
                yield Loading(progress.text, progress.done, progress.total)
        return {role: self.pool.take(spec) for role, spec in needed.items()}


def run_local(recipe: Recipe, prompt: PromptOrChat, resources: Resources) -> Iterator[Event]:
    """Run a recipe whose target is in this process."""
    running = recipe.running
    models = yield from resources.load(running.specs, _context(running, prompt))
    yield from _run(recipe, running, prompt, resources, models["target"], models.get("drafter"))


def run_edge_cloud(recipe: Recipe, prompt: PromptOrChat, resources: Resources) -> Iterator[Event]:
    """Run a recipe whose target is a service."""
    running = recipe.running
    assert running.cloud is not None
    edge_specs = {role: spec for role, spec in running.specs.items() if role != "target"}
    edge = (yield from resources.load(edge_specs, _context(running, prompt))).get("drafter")
    yield Loading(f"connecting to the cloud at {running.cloud.remote}")
    hub = resources.pool.hub
    with closing(connect(running.cloud, running.target_spec, running.seed, edge=edge, hub=hub)) as target:
        if target.lost:
            yield Loading("no response from the cloud: the drafter decodes alone")
        yield from _run(recipe, running, prompt, resources, target, edge)


def _context(recipe: Recipe, prompt: PromptOrChat) -> int:
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    copies = 1 + PASSES if recipe.cloud and "variance" in recipe.cloud.gates else 1
    return copies * (sum(map(len, texts)) // CHARACTERS_PER_TOKEN + recipe.max_tokens)


def _run(
    recipe: Recipe,
    running: Recipe,
    prompt: PromptOrChat,
    resources: Resources,
    target: Target,
    model: LoadedModel | None,
) -> Iterator[Event]:
    environment = _environment(target, model)  # measured before the clock starts
    text, start = prompt_text(target.tokenizer, prompt, running.chat), time.perf_counter()
    prompt_tokens = encode_prompt(target.tokenizer, text, running.chat, target.vocab_size)
    tokens = target.opening if target.encoder else prompt_tokens  # an encoder's input is not part of the text
    with ExitStack() as opened:
        chats, proposer = resources.pool.chats, resources.drafter
        pipeline = build_pipeline(running, target, model, resources.stores, text, chats, proposer)
        opened.callback(pipeline.close)
        if recipe.cloud is not None and recipe.cloud.alone:
            pipeline = replace(pipeline, verifier=EdgeVerifier(pipeline.verifier))
        room = _room(pipeline, tokens)
        start += _prepare(pipeline, running, len(tokens), room)
        yield Header(
            recipe=asdict(recipe),
            prompt=text,
            prompt_tokens=tuple(prompt_tokens),
            vocab_size=target.vocab_size,
            exact=recipe.exact,
            bit_equal=proposer is None and target.bit_equal(longest_chain(running), len(tokens) + running.max_tokens),
            encoder=target.encoder,
            environment={**environment, **target.environment},
        )
        device, metrics, last, failure, exhausted = pipeline.device, Metrics(), None, None, False
        steps = _steps(pipeline, target, tokens, min(running.max_tokens, room), start, running.first_target)
        try:
            for event in steps:
                metrics, last = event.metrics, event.step.tokens[-1] if event.step.tokens else last
                yield event
        except (UserError, RuntimeError, MemoryError) as error:  # a failing model ends its run with a message
            failure, exhausted = memory.describe_failure(error), memory.is_out_of_memory(error)
        kv_bytes = pipeline.kv_bytes
        if exhausted:  # outside the handler: its traceback references tensors
            opened.close()
            del pipeline, steps
            resources.pool.recover()
            failure = _memory_ran_out(kv_bytes, device)
        if failure is not None:
            yield End("error", failure, metrics)
            return
        full = metrics.tokens == room < running.max_tokens
        yield End("stop" if last in target.stop else "length", None, metrics, _peak(device, kv_bytes), full)


def _peak(device: torch.device, kv_bytes: int) -> MemoryUse:
    return MemoryUse(memory.peak_process_bytes(), memory.peak_device_bytes(device), kv_bytes)


def _room(pipeline: Pipeline, tokens: Sequence[int]) -> int:
    room = pipeline.context - len(tokens)
    if room < 1:
        raise UserError(
            f"the prompt has {len(tokens):,} tokens and the context {pipeline.context:,}: "
            f"shorten it by at least {1 - room:,}"
        )
    return room


def _memory_ran_out(kv_bytes: int, device: torch.device) -> str:
    return (
        f"memory ran out (keys and values took {format_bytes(kv_bytes)}, {format_bytes(memory.free_bytes(device))} are "
        "free again): shorten the prompt or the text, quantize the models, or choose a smaller pair"
    )


def _steps(
    pipeline: Pipeline,
    target: Target,
    tokens: Sequence[int],
    max_tokens: int,
    start: float,
    first_target: bool,
) -> Iterator[StepEvent]:
    metrics, stream, names = Metrics(), TextStream(target.tokenizer, tokens), TokenNames(target.tokenizer)
    sampler, stop = memory.MemorySampler(), target.stop
    steps = decode(
        tokens,
        pipeline.verifier,
        pipeline.drafter,
        pipeline.policy,
        max_tokens=max_tokens,
        stop=stop,
        clock=time.perf_counter,
        start=start,
        first_target=first_target,
    )
    while True:
        with torch_threads(1):
            step = next(steps, None)
        if step is None:
            return
        metrics = metrics.plus(step)
        verdict = step.verdict
        draft_texts = stream.peek(step.draft.tokens, step.draft.parents)
        pieces = [stream.push(token) for token in step.tokens]
        if step.tokens and (step.tokens[-1] in stop or metrics.tokens >= max_tokens):
            pieces[-1] += stream.rest()
        pending = stream.peek(verdict.pending, range(-1, len(verdict.pending) - 1))
        yield StepEvent(
            step,
            tuple(pieces),
            tuple(draft_texts),
            names.fresh(token for top in verdict.tops for token, _ in top.top),
            "".join(pending),
            MemoryUse(sampler.process_bytes(), memory.device_bytes(pipeline.device), pipeline.kv_bytes),
            metrics,
        )


def _prepare(pipeline: Pipeline, recipe: Recipe, tokens: int, room: int) -> float:
    start = time.perf_counter()
    pipeline.prepare(recipe, tokens, tokens + min(recipe.max_tokens, room))
    return time.perf_counter() - start


def _environment(target: Target, model: LoadedModel | None) -> dict[str, Any]:
    devices = [target.device, model.device if model else None]
    gpu = next((device for device in devices if device is not None and device.type == "cuda"), None)
    drafter_bytes = model.weight_bytes if model else None
    return {**_versions(), "processor": _processor(gpu), **target.environment, "drafter_bytes": drafter_bytes}


@cache
def _versions() -> dict[str, Any]:
    return {
        "specdemo": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


@cache
def _processor(gpu: torch.device | None) -> str:
    if gpu is not None:
        return torch.cuda.get_device_name(gpu)
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
