"""Python API: loaded pairs of models, and generation, from a prompt to events."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache, partial
from importlib.metadata import version
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from specdemo import __version__
from specdemo.core.decode import Drafter, decode
from specdemo.core.errors import PromptTooLong, UserError
from specdemo.core.events import (
    End,
    Event,
    Header,
    Loading,
    MemoryUse,
    PromptScores,
    ReportProgress,
    StepEvent,
    ignore_progress,
)
from specdemo.core.formats import format_bytes
from specdemo.core.metrics import Metrics
from specdemo.core.sampling import LogitsProcessor, SamplingParams
from specdemo.core.step import TokenLogprob
from specdemo.core.texts import StopTexts
from specdemo.core.verifier import Target
from specdemo.drafters.suffix import LONGEST_COPY
from specdemo.external.address import key_for
from specdemo.external.client import EngineClient, ExternalRun
from specdemo.external.dialects import GenerationRequest
from specdemo.models import memory
from specdemo.models.cached_head import Head
from specdemo.models.chat_caches import Stores
from specdemo.models.chat_prompt import PromptOrChat, check_prompt, is_encoded, read_prompt
from specdemo.models.engines.engine import torch_threads
from specdemo.models.heads import LoadedDrafter
from specdemo.models.kv_cache import score_prompt
from specdemo.models.load import LoadedModel, in_memory_model, read_tokenizer
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import SAME
from specdemo.models.tokenizer import TextStream, TokenNames, prompt_pieces, stop_texts
from specdemo.models.zoo import PAIRS
from specdemo.option_rules import refuse_inputs
from specdemo.pipeline import Pipeline, RunInputs, RunPrompt, build_pipeline
from specdemo.recipe import Recipe, RunPlan, plan_run
from specdemo.remote.gates import PASSES, IsName
from specdemo.remote.target import RemoteSession, connect
from specdemo.worker import interruptible, job_clock

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHARACTERS_PER_TOKEN = 3  # rough
_LOADING = ("dtype", "quantization", "drafter_quantization", "activations", "device", "drafter_device")


class LoadedPair:
    """Target and optional drafter in memory; `generate` accepts it in place of a `ModelPool`."""

    def __init__(self, pool: ModelPool, chosen: Recipe) -> None:
        """`chosen` selects the models in `pool`."""
        self.pool, self._chosen = pool, chosen

    def bind(self, recipe: Recipe) -> Recipe:
        """Return `recipe` with the models of this pair. Raises `UserError` if it selects other models."""
        chosen = {name: getattr(self._chosen, name) for name in ("pair", "target", "drafter", *_LOADING)}
        for name, value in chosen.items():
            if getattr(recipe, name) not in (getattr(Recipe, name), value):
                raise UserError(f"the recipe sets {name}, but the models are already loaded: pass {name} to load_pair")
        return replace(recipe, **chosen)


def load_pair(
    target: str | PreTrainedModel = "bundled",
    drafter: str | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    drafter_quantization: str = "none",
    activations: str = "auto",
    device: str = "auto",
    drafter_device: str | None = None,
    report: ReportProgress = ignore_progress,
) -> LoadedPair:
    """Load a target and an optional drafter for `generate`. Raises `UserError`.

    By name: `target` is a ready pair, or both are Hugging Face ids or local directories; drafter "same" is the target,
    quantised. `report` receives progress.
    In memory: both are `transformers` models with their `tokenizer` (and `drafter_tokenizer`). They run their own
    forward pass on shared tensors and remain unmodified; loading options do not apply.
    """
    pool = ModelPool()
    values = (dtype, quantization, drafter_quantization, activations, device, drafter_device)
    options: dict[str, Any] = dict(zip(_LOADING, values, strict=True))
    if not isinstance(target, str):
        changed = [name for name, value in options.items() if value != getattr(Recipe, name)]
        if changed:
            raise UserError(f"{changed[0]} does not apply to models in memory: omit it")
        loaded = {"target": in_memory_model("target", target, tokenizer)}
        if drafter is not None:
            loaded["drafter"] = in_memory_model("drafter", drafter, drafter_tokenizer or tokenizer)
        for model in loaded.values():
            pool.add(model)
        names: dict[str, Any] = {role: model.spec.name for role, model in loaded.items()}
        return LoadedPair(pool, replace(Recipe(method="ar"), **names))
    if tokenizer is not None or drafter_tokenizer is not None or not isinstance(drafter, str | None):
        raise UserError("names and models in memory cannot be combined: give two names or two models")
    options["pair" if target in PAIRS and drafter in (None, SAME) else "target"] = target
    chosen = replace(Recipe(), method="ar", drafter=drafter, **options)
    for progress in pool.ensure_loaded(
        [spec for spec in (chosen.spec("target"), chosen.spec("drafter")) if spec is not None]
    ):
        report(progress)
    return LoadedPair(pool, chosen)


@dataclass(frozen=True)
class PlannedRun:
    """Plan, prompt and inputs of a run, and the models that it uses."""

    plan: RunPlan
    prompt: PromptOrChat
    pool: ModelPool
    inputs: RunInputs


def generate(
    recipe: Recipe,
    prompt: PromptOrChat,
    pool: ModelPool | LoadedPair | None = None,
    stores: Stores | None = None,
    drafter: Drafter | None = None,
    processors: Sequence[LogitsProcessor] = (),
    names: IsName | None = None,
    *,
    prediction: str = "",
    logprobs: int | None = None,
    score: bool = False,
) -> Generator[Event]:
    """Run `recipe` on `prompt`: a text, token ids, or a conversation if `recipe.chat` is set.

    `pool` provides models (default: a new pool), `stores` the n-grams and the conversation of earlier runs; `drafter`
    replaces the recipe's; `processors` change the logits of every position, see `LogitsProcessor`; `names`
    recognises names in drafted text for gate `names`; `prediction` is an expected text that is drafted; `logprobs` is
    the number of alternatives in `Verdict.logprobs`; `score` adds `PromptScores` of the prompt after the header.
    Raises `UserError` before the header; later failures end the run with `End("error")`. Closing the iterator releases
    all resources, without an `End`.
    """
    if not prompt:
        raise UserError("the prompt is empty: type something to continue")
    check_prompt(prompt, recipe.chat)
    if stores is not None and not isinstance(stores, Stores):
        raise UserError(f"stores must be a Stores object, not {type(stores).__name__}: pass specdemo.Stores()")
    if isinstance(pool, LoadedPair):
        recipe, pool = pool.bind(recipe), pool.pool
    if stores is not None and (recipe.chat or stores.began):
        stores.began = stores.began or datetime.now()
        recipe = recipe.at(stores.began)
    inputs = RunInputs(stores, drafter, tuple(processors), names, logprobs=logprobs, score=score)
    if prediction:
        policy = plan_run(recipe).method.policy
        gamma = recipe.gamma if policy is None else policy(recipe).gamma
        inputs = replace(inputs, prediction=prediction, fallback_gamma=gamma)
        longest = max(recipe.gamma, LONGEST_COPY)
        recipe = replace(recipe, policy="fixed", gamma=longest, gamma_min=None, gamma_max=None)
    plan = plan_run(recipe)
    refuse_inputs(plan, inputs)
    request = PlannedRun(plan, prompt, ModelPool() if pool is None else pool, inputs)
    if plan.server is not None:
        yield from run_external(request)
    elif plan.cloud is not None:
        yield from run_edge_cloud(request)
    else:
        models, head = yield from _load(request)
        yield from _run(request, models["target"], head or models.get("drafter"))


def _load(request: PlannedRun) -> Generator[Event, None, tuple[dict[str, LoadedModel], Head | None]]:
    """Load the models by role, and the head, unless a caller's drafter replaces them; yield the progress."""
    plan, pool = request.plan, request.pool
    replaced = request.inputs.drafter is not None
    needed = {role: spec for role, spec in plan.models.items() if role != "drafter" or not replaced}
    head = None if replaced else plan.head
    yield from pool.ensure_loaded(list(needed.values()), _context(request), head)
    models = {role: pool.get(spec) for role, spec in needed.items()}
    if head is None:
        return models, None
    yield from pool.ensure_head_loaded(head)
    return models, pool.get_head(head)


def run_edge_cloud(request: PlannedRun) -> Iterator[Event]:
    plan, hub = request.plan, request.pool.hub
    assert plan.cloud is not None
    models, _ = yield from _load(request)
    edge = models.get("drafter")
    yield Loading(f"connecting to the cloud at {plan.cloud.remote}")
    stores, session = request.inputs.stores, RemoteSession()
    if stores is not None and stores.began is not None:
        session = stores.session = stores.session or RemoteSession(lasts=True)
    remote = connect(plan.cloud, plan.target, plan.recipe.seed, edge=edge, hub=hub, session=session)
    with closing(replace(remote, is_name=request.inputs.names)) as target:
        if target.lost:
            yield Loading("no response from the cloud: the drafter decodes alone", warning=True)
        yield from _run(request, target, edge)


def run_external(request: PlannedRun) -> Iterator[Event]:
    """Run a plan on a server of another engine; prompt and text are token ids of the target."""
    recipe, address = request.plan.recipe, request.plan.server
    assert address is not None
    yield Loading(f"connecting to {address}")
    tokenizer = interruptible(partial(read_tokenizer, request.plan.target, request.pool.hub))
    read = read_prompt(tokenizer, request.prompt, recipe.chat, len(tokenizer), recipe.template_options)
    generation = GenerationRequest(read.tokens, recipe.max_tokens, SamplingParams.of(recipe), recipe.seed)
    with closing(EngineClient(address, key_for(address, os.environ))) as client:
        run = ExternalRun(client, generation, tokenizer, recipe.stop_texts, recipe.stop_tokens)
        yield from run.events(asdict(replace(recipe, template_options=read.options)), read.text, _versions())


def _context(request: PlannedRun) -> int:
    prompt, plan = request.prompt, request.plan
    texts = [prompt] if isinstance(prompt, str) else [part["content"] for part in prompt if isinstance(part, dict)]
    tokens = sum(map(len, texts)) // CHARACTERS_PER_TOKEN if texts else len(prompt)
    copies = 1 + PASSES if plan.cloud and "variance" in plan.cloud.gates else 1
    return copies * (tokens + plan.recipe.max_tokens)


def _run(request: PlannedRun, target: Target, model: LoadedDrafter | None) -> Iterator[Event]:
    plan, recipe = request.plan, request.plan.recipe
    pool, inputs = request.pool, request.inputs
    environment = _environment(target, model)  # measured before the clock starts
    read = read_prompt(target.tokenizer, request.prompt, recipe.chat, target.vocab_size, recipe.template_options)
    tokens = target.opening if target.encoder else read.tokens  # an encoder's input is not part of the text
    prompt = RunPrompt(read.tokens if is_encoded(request.prompt) else read.text, tokens)
    with ExitStack() as opened:
        pipeline = build_pipeline(plan, target, model, inputs, prompt, pool.chats)
        opened.callback(pipeline.close)
        free = pipeline.context - len(tokens)
        if free < 1:
            raise PromptTooLong(len(tokens), pipeline.context)
        pool.free_memory_for_text({cache.model.device for cache in pipeline.caches})
        began = time.perf_counter()
        pipeline.prepare(len(tokens), len(tokens) + min(recipe.max_tokens, free))
        start = read.start + time.perf_counter() - began
        yield Header(
            recipe=asdict(replace(recipe, template_options=read.options)),
            prompt=read.text,
            prompt_tokens=tuple(read.tokens),
            vocab_size=target.vocab_size,
            exact=plan.exact,
            bit_equal=inputs.drafter is None and target.bit_equal(plan.longest_chain, len(tokens) + recipe.max_tokens),
            encoder=target.encoder,
            cached_tokens=pipeline.target_cache.cached_count(tokens) if pipeline.target_cache else 0,
            environment={**environment, **target.environment},
        )
        if inputs.score and inputs.logprobs is not None:
            yield from _scores(pipeline, target, read.text, read.tokens, inputs.logprobs)
        metrics = Metrics()
        stops = stop_texts(target.tokenizer, recipe.stop_texts)
        last = failure = passes = exhausted = None
        steps = _steps(pipeline, target, tokens, min(recipe.max_tokens, free), start, recipe.first_target, stops)
        try:
            for event in steps:
                if isinstance(event, StepEvent):
                    metrics, last = event.metrics, event.step.tokens[-1] if event.step.tokens else last
                    passes = passes or pipeline.passes
                yield event
        except (UserError, RuntimeError, MemoryError) as error:  # a failing model ends its run with a message
            failure, exhausted = memory.describe_failure(error), memory.is_out_of_memory(error)
        kv_bytes, device = pipeline.kv_bytes, pipeline.device
        if exhausted:  # freeing memory inside the handler would fail: its traceback references tensors
            opened.close()
            del pipeline, steps
            pool.recover()
            sizes = f"keys and values took {format_bytes(kv_bytes)}, {format_bytes(memory.free_bytes(device))} are free"
            failure = (
                f"memory ran out ({sizes} again): shorten the prompt or the text, quantize the models, or choose a "
                "smaller pair"
            )
        if failure is not None:
            yield End("error", failure, metrics)
            return
        reason = "stop" if stops.reached or last in pipeline.stop else "length"
        full = reason == "length" and metrics.tokens == free < recipe.max_tokens
        peak = MemoryUse(
            process=memory.peak_process_bytes(),
            device=memory.peak_device_bytes(device),
            kv=kv_bytes,
            store=getattr(pipeline.drafter, "store_bytes", None),
            reserved=memory.peak_reserved_bytes(device),
            read=None if passes is None else pipeline.weights_read(passes),
        )
        yield End(reason, None, metrics, peak, full)


def _scores(
    pipeline: Pipeline, target: Target, text: str, tokens: Sequence[int], count: int
) -> Iterator[Loading | PromptScores]:
    assert pipeline.target_cache is not None
    logprobs: list[TokenLogprob | None] = [None]
    for scored in score_prompt(pipeline.target_cache, tokens, count):
        logprobs += scored
        yield Loading("prompt", len(logprobs), len(tokens))
    texts = prompt_pieces(target.tokenizer, text, tokens)
    yield PromptScores("prompt", len(tokens), len(tokens), texts=texts, logprobs=tuple(logprobs))


def _steps(
    pipeline: Pipeline,
    target: Target,
    tokens: Sequence[int],
    max_tokens: int,
    start: float,
    first_target: bool,
    stops: StopTexts,
) -> Iterator[Loading | StepEvent]:
    metrics, stream = Metrics(), TextStream(target.tokenizer, tokens)
    names = TokenNames(target.tokenizer)
    sampler, stop = memory.MemorySampler(), pipeline.stop
    ends = target.stop
    steps = decode(
        tokens,
        pipeline.verifier,
        pipeline.drafter,
        pipeline.policy,
        max_tokens=max_tokens,
        stop=stop,
        clock=job_clock,
        elapsed=lambda: time.perf_counter() - start,
        first_target=first_target,
    )
    yield from _prefill(pipeline, tokens)
    for i in count():
        drafter_s = (yield from _prefill(pipeline, tokens, drafter=True)) if i == int(first_target) else 0.0
        with torch_threads(1):
            step = next(steps, None)
        if step is None:
            return
        draft_texts = stream.peek(step.draft.tokens, step.draft.parents)
        ended = metrics.tokens + len(step.tokens) >= max_tokens or (bool(step.tokens) and step.tokens[-1] in stop)
        written = _written(stream, step.tokens, ends, ended)
        marked = [text + stops.mark(token) for text, token in zip(written, step.tokens, strict=True)]
        pieces = stops.feed(marked, ended)
        step = step.cut(len(pieces))
        if stops.reached:
            step = replace(step, verdict=replace(step.verdict, pending=()))
        if drafter_s:
            step = replace(step, draft_s=step.seconds.draft + drafter_s)
        metrics, verdict = metrics.plus(step), step.verdict
        pending = stream.peek(verdict.pending, range(-1, len(verdict.pending) - 1))
        yield StepEvent(
            step,
            tuple(pieces),
            tuple(draft_texts),
            names.fresh(token for top in verdict.tops for token, _ in top.top),
            "".join(pending),
            MemoryUse(sampler.process_bytes(), memory.device_bytes(pipeline.device), pipeline.kv_bytes),
            metrics,
            tuple(written[: len(pieces)]),
        )
        if ended or stops.reached:
            return


def _written(stream: TextStream, tokens: Sequence[int], ends: Collection[int], ended: bool) -> list[str]:
    """Return the text of each token; tokens that end a text are not shown."""
    pieces = ["" if token in ends else stream.push(token) for token in tokens]
    if pieces and ended:
        pieces[-1] += stream.flush()
    return pieces


def _prefill(pipeline: Pipeline, tokens: Sequence[int], drafter: bool = False) -> Generator[Loading, None, float]:
    """Yield the progress of a prefill; return its duration, without the time spent in the caller."""
    seconds, chunks = 0.0, pipeline.prefill(tokens, drafter)
    while True:
        start = job_clock()
        done = next(chunks, None)
        seconds += job_clock() - start
        if done is None:
            return seconds
        yield Loading("drafter: prompt" if drafter else "prompt", done, len(tokens))


def _environment(target: Target, model: LoadedDrafter | None) -> dict[str, Any]:
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
