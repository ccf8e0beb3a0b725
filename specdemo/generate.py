"""Generation: from a prompt to events."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from specdemo import __version__
from specdemo.core.decode import Drafter, decode
from specdemo.core.errors import UserError
from specdemo.core.events import End, Event, Header, Loading, MemoryUse, StepEvent
from specdemo.core.formats import format_bytes
from specdemo.core.metrics import Metrics
from specdemo.drafters import METHODS
from specdemo.models import memory
from specdemo.models.batch_invariance import COMPARED_ROWS, compared_context
from specdemo.models.load import LoadedModel
from specdemo.models.loaded_pair import LoadedPair
from specdemo.models.model_pool import ModelPool
from specdemo.models.threads import torch_threads
from specdemo.models.tokenizer import ChatMessage, TextStream, TokenNames, encode_prompt, prompt_text
from specdemo.pipeline import PASSES, Pipeline, Stores, build_pipeline, longest_chain
from specdemo.recipe import Recipe
from specdemo.remote.client import RemoteModel, connect
from specdemo.remote.gates import EdgeVerifier

CHARACTERS_PER_TOKEN = 3  # rough


def generate(
    recipe: Recipe,
    prompt: str | Sequence[ChatMessage],
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
    pool = ModelPool() if pool is None else pool
    running = recipe.running
    if drafter is not None:
        if not METHODS[running.method].drafts:
            raise UserError(f"method {running.method} does not draft: choose another method to use a drafter with it")
        running = replace(running, method="lookup")  # needs no second model
    specs = [running.drafter_spec] if running.cloud else [running.target_spec, running.drafter_spec]
    with closing(pool.bring([spec for spec in specs if spec is not None], _context(running, prompt))) as loading:
        for progress in loading:
            yield Loading(progress.text, progress.done, progress.total)
    loaded = [pool.take(spec) if spec is not None else None for spec in specs]
    if running.cloud:
        yield Loading(f"connecting to the cloud at {running.cloud.remote}")
        hub = getattr(pool, "hub", None)
        with closing(connect(running.cloud, running.target_spec, running.seed, edge=loaded[0], hub=hub)) as remote:
            if remote.lost:
                yield Loading("no response from the cloud: the drafter decodes alone")
            yield from _run(recipe, running, prompt, pool, remote, loaded[0], stores, drafter)
    else:
        assert loaded[0] is not None
        yield from _run(recipe, running, prompt, pool, *loaded, stores, drafter)


def _context(recipe: Recipe, prompt: str | Sequence[ChatMessage]) -> int:
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    copies = 1 + PASSES if recipe.cloud and "variance" in recipe.cloud.gates else 1
    return copies * (sum(map(len, texts)) // CHARACTERS_PER_TOKEN + recipe.max_tokens)


def _run(
    recipe: Recipe,
    running: Recipe,
    prompt: str | Sequence[ChatMessage],
    pool: ModelPool,
    target: LoadedModel | RemoteModel,
    model: LoadedModel | None,
    stores: Stores | None,
    drafter: Drafter | None,
) -> Iterator[Event]:
    environment = _environment(target, model)  # measured before the clock starts
    text, start = prompt_text(target.tokenizer, prompt, running.chat), time.perf_counter()
    prompt_tokens = encode_prompt(target.tokenizer, text, running.chat, target.vocab_size)
    tokens = target.opening if target.encoder else prompt_tokens  # an encoder's input is not part of the text
    with ExitStack() as resources:
        pipeline = build_pipeline(running, target, model, stores, text, pool.chats)
        resources.callback(pipeline.close)
        pipeline = _adapted(pipeline, recipe, drafter)
        room = _room(pipeline, tokens)
        start += _prepare(pipeline, running, len(tokens), room)
        yield Header(
            recipe=asdict(recipe),
            prompt=text,
            prompt_tokens=tuple(prompt_tokens),
            vocab_size=target.vocab_size,
            exact=recipe.exact,
            bit_equal=target.bit_equal and drafter is None and _is_compared(running, target, len(tokens)),
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
            resources.close()
            del pipeline, steps
            pool.recover()
            failure = _memory_ran_out(kv_bytes, device)
        if failure is not None:
            yield End("error", failure, metrics)
            return
        full = metrics.tokens == room < running.max_tokens
        yield End("stop" if last in target.stop else "length", None, metrics, _peak(device, kv_bytes), full)


def _adapted(pipeline: Pipeline, recipe: Recipe, drafter: Drafter | None) -> Pipeline:
    if drafter is not None:
        pipeline = replace(pipeline, drafter=drafter)
    alone = recipe.cloud is not None and recipe.cloud.alone
    return replace(pipeline, verifier=EdgeVerifier(pipeline.verifier)) if alone else pipeline


def _peak(device: torch.device, kv_bytes: int) -> MemoryUse:
    return MemoryUse(memory.peak_process_bytes(), memory.peak_device_bytes(device), kv_bytes)


def _is_compared(recipe: Recipe, target: LoadedModel | RemoteModel, tokens: int) -> bool:
    if isinstance(target, LoadedModel) and target.invariance.by_construction:
        return True
    length = longest_chain(recipe)
    context = compared_context(target.model) if isinstance(target, LoadedModel) else sys.maxsize
    return length is not None and length < COMPARED_ROWS and tokens + recipe.max_tokens <= context


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
    target: LoadedModel | RemoteModel,
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
    """Return the seconds taken."""
    start = time.perf_counter()
    pipeline.prepare(recipe, tokens, tokens + min(recipe.max_tokens, room))
    return time.perf_counter() - start


def _environment(target: LoadedModel | RemoteModel, model: LoadedModel | None) -> dict[str, Any]:
    local = [loaded.model.device for loaded in (target, model) if isinstance(loaded, LoadedModel)]
    gpu = next((device for device in local if device.type == "cuda"), None)
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
