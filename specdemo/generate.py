"""Generation: from a prompt to events."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache, partial
from importlib.metadata import version
from itertools import count
from typing import Any, cast

import torch

from specdemo import __version__
from specdemo.core.decode import Drafter, decode
from specdemo.core.errors import PromptTooLong, UserError
from specdemo.core.events import End, Event, Header, Loading, MemoryUse, PromptScores, StepEvent
from specdemo.core.formats import format_bytes
from specdemo.core.metrics import Metrics
from specdemo.core.sampling import LogitsProcessor
from specdemo.core.step import Step, TokenLogprob
from specdemo.core.stop_text import StopTexts
from specdemo.core.target import Target
from specdemo.drafters.prediction import LONGEST_COPY, PredictedText
from specdemo.external.address import key_for
from specdemo.external.client import EngineClient
from specdemo.external.run import ExternalRun
from specdemo.external.schema import GenerationRequest
from specdemo.loaded_pair import LoadedPair
from specdemo.models import memory
from specdemo.models.chat_caches import Conversation
from specdemo.models.chat_prompt import PromptOrChat, is_encoded, read_prompt
from specdemo.models.heads import LoadedDrafter, LoadedHead
from specdemo.models.load import LoadedModel, read_tokenizer
from specdemo.models.model_pool import ModelPool
from specdemo.models.prompt_scores import prompt_pieces, score_prompt
from specdemo.models.spec import HeadSpec, ModelSpec
from specdemo.models.threads import torch_threads
from specdemo.models.tokenizer import TextStream, TokenNames, stop_texts
from specdemo.pipeline import CONVERSATION, Pipeline, Stores, build_pipeline
from specdemo.plan import RunPlan, plan_run
from specdemo.recipe import Recipe
from specdemo.remote.gates import PASSES, EdgeVerifier
from specdemo.remote.session import RemoteSession
from specdemo.remote.target import connect
from specdemo.remote.word_rules import IsName
from specdemo.worker import interruptible, job_clock

CHARACTERS_PER_TOKEN = 3  # rough


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

    `pool` provides models (default: a new pool), `stores` the n-grams of earlier runs, in a dictionary that runs share;
    `drafter` replaces the recipe's; `processors` change the logits of every position, see `LogitsProcessor`; `names`
    recognises names in drafted text for gate `names`; `prediction` is an expected text that is drafted; `logprobs` is
    the number of alternatives in `Verdict.logprobs`; `score` adds `PromptScores` of the prompt after the header.
    Raises `UserError` before the header; later failures end the run with `End("error")`. Closing the iterator releases
    all resources, without an `End`.
    """
    if not prompt:
        raise UserError("the prompt is empty: type something to continue")
    if isinstance(pool, LoadedPair):
        recipe, pool = pool.bind(recipe), pool.pool
    pool = ModelPool() if pool is None else pool
    recipe = _at_conversation(recipe, stores)
    resources = Resources(pool, stores, drafter, tuple(processors), names, logprobs=logprobs, score=score)
    if prediction:
        recipe, resources = _with_prediction(recipe, resources, prediction)
    plan = plan_run(recipe)
    _refuse_ineffective_objects(plan, resources)
    run = run_external if plan.server else run_local if plan.cloud is None else run_edge_cloud
    yield from run(plan, prompt, resources)


def _with_prediction(recipe: Recipe, resources: Resources, prediction: str) -> tuple[Recipe, Resources]:
    method = plan_run(recipe).method
    if not method.drafts:
        raise UserError(f"method {method.name} does not draft: choose another method, or omit the prediction")
    gamma = method.policy(recipe).gamma if method.policy else recipe.gamma
    longest = max(recipe.gamma, LONGEST_COPY)
    recipe = replace(recipe, policy="fixed", gamma=longest, gamma_min=None, gamma_max=None)
    return recipe, replace(resources, predict=partial(_predicted, prediction, gamma))


def _refuse_ineffective_objects(plan: RunPlan, given: Resources) -> None:
    recipe, method = plan.recipe, plan.method
    if recipe.ngram_keep and given.stores is None:
        raise UserError("ngram_keep has no effect without stores: pass the same dictionary as stores to every run")
    if given.drafter is not None and not method.drafts:
        raise UserError(f"method {method.name} does not draft: choose another method to use a drafter with it")
    if given.processors and plan.cloud is not None:
        raise UserError("custom logits processors need a local target: omit them, or choose mode off")
    if given.names is not None and (plan.cloud is None or "names" not in plan.cloud.gates):
        raise UserError("names has no effect without gate names: add names to the gates of a remote target")
    _check_logprobs(plan, given.logprobs, given.score)
    local = (given.drafter, given.processors or None, given.predict, given.logprobs, given.names)
    if plan.server is not None and any(value is not None for value in local):
        raise UserError("drafters, processors, predictions and log-probabilities need a local target: omit external")


def _at_conversation(recipe: Recipe, stores: Stores | None) -> Recipe:
    if not recipe.chat or stores is None:
        return recipe
    conversation = stores.setdefault(CONVERSATION, Conversation())
    conversation.began = conversation.began or datetime.now()
    return recipe.at(conversation.began)


def _check_logprobs(plan: RunPlan, logprobs: int | None, score: bool) -> None:
    if logprobs is not None and plan.method.verifier is not None:
        raise UserError(f"method {plan.method.name} has no log-probabilities of tokens: choose another method")
    if score and (logprobs is None or plan.recipe.encoder):
        raise UserError("score needs logprobs and a decoder: set logprobs, or choose another target")


def _predicted(prediction: str, gamma: int, target: Target, prompt: Sequence[int]) -> PredictedText:
    return PredictedText(prompt, target.tokenizer.encode(prediction, add_special_tokens=False), gamma)


@dataclass(frozen=True)
class Resources:
    """Objects that a run receives from its caller."""

    pool: ModelPool
    stores: Stores | None = None  # n-grams of earlier runs
    drafter: Drafter | None = None  # replaces that of the recipe
    processors: tuple[LogitsProcessor, ...] = ()
    names: IsName | None = None
    predict: Callable[[Target, Sequence[int]], PredictedText] | None = None  # predicted answer to a prompt
    logprobs: int | None = None  # recorded alternatives per token
    score: bool = False  # log-probabilities of the prompt, too

    def load_head(self, spec: HeadSpec | None) -> Generator[Event, None, LoadedHead | None]:
        """Load the head unless it is replaced; yield the progress."""
        if spec is None or self.drafter is not None:
            return None
        with closing(self.pool.bring_head(spec)) as loading:
            for progress in loading:
                yield Loading(progress.text, progress.done, progress.total)
        return self.pool.take_head(spec)

    def load(
        self, specs: Mapping[str, ModelSpec], context: int, head: HeadSpec | None = None
    ) -> Generator[Event, None, dict[str, LoadedModel]]:
        """Load the models by role, except a drafter that is replaced, for `context` tokens; yield the progress."""
        needed = {role: spec for role, spec in specs.items() if role != "drafter" or self.drafter is None}
        tapped = head if self.drafter is None else None
        with closing(self.pool.bring(list(needed.values()), context, tapped)) as loading:
            for progress in loading:
                yield Loading(progress.text, progress.done, progress.total)
        return {role: self.pool.take(spec) for role, spec in needed.items()}

    def session(self, recipe: Recipe) -> RemoteSession:
        """Return the session of the conversation, or a new one."""
        if self.stores is None or not (recipe.chat or CONVERSATION in self.stores):
            return RemoteSession()
        conversation = self.stores.setdefault(CONVERSATION, Conversation())
        conversation.session = conversation.session or RemoteSession(lasts=True)
        return cast(RemoteSession, conversation.session)

    def pipeline(
        self,
        plan: RunPlan,
        target: Target,
        model: LoadedDrafter | None,
        prompt: str | Sequence[int],
        tokens: Sequence[int],
    ) -> Pipeline:
        """Build the pipeline of a run; an encoder reads `prompt`, drafts continue `tokens`."""
        prediction = self.predict(target, tokens) if self.predict else None
        inputs = (self.stores, prompt, self.pool.chats, self.drafter, self.processors)
        return build_pipeline(plan, target, model, *inputs, prediction, self.logprobs)


def run_local(plan: RunPlan, prompt: PromptOrChat, resources: Resources) -> Iterator[Event]:
    """Run a plan whose target is in this process."""
    models = yield from resources.load(plan.models, _context(plan, prompt), plan.head)
    head = yield from resources.load_head(plan.head)
    yield from _run(plan, prompt, resources, models["target"], head or models.get("drafter"))


def run_edge_cloud(plan: RunPlan, prompt: PromptOrChat, resources: Resources) -> Iterator[Event]:
    """Run a plan whose target is a service."""
    assert plan.cloud is not None
    edge = (yield from resources.load(plan.models, _context(plan, prompt))).get("drafter")
    yield Loading(f"connecting to the cloud at {plan.cloud.remote}")
    hub = resources.pool.hub
    session = resources.session(plan.recipe)
    remote = connect(plan.cloud, plan.target, plan.recipe.seed, edge=edge, hub=hub, session=session)
    with closing(replace(remote, is_name=resources.names)) as target:
        if target.lost:
            yield Loading("no response from the cloud: the drafter decodes alone", warning=True)
        yield from _run(plan, prompt, resources, target, edge)


def run_external(plan: RunPlan, prompt: PromptOrChat, resources: Resources) -> Iterator[Event]:
    """Run a plan on a server of another engine; prompt and text are token ids of the target."""
    recipe, address = plan.recipe, plan.server
    assert address is not None
    yield Loading(f"connecting to {address}")
    tokenizer = interruptible(partial(read_tokenizer, plan.target, resources.pool.hub))
    read = read_prompt(tokenizer, prompt, recipe.chat, len(tokenizer), recipe.template_options)
    sampling = (recipe.temperature, recipe.top_k, recipe.top_p, recipe.repetition_penalty, recipe.seed)
    request = GenerationRequest(read.tokens, recipe.max_tokens, *sampling)
    with closing(EngineClient(address, key_for(address, os.environ))) as client:
        run = ExternalRun(client, request, tokenizer, recipe.stop_texts, recipe.stop_tokens)
        yield from run.events(asdict(replace(recipe, template_options=read.options)), read.text, _versions())


def _context(plan: RunPlan, prompt: PromptOrChat) -> int:
    texts = [prompt] if isinstance(prompt, str) else [part["content"] for part in prompt if isinstance(part, dict)]
    tokens = sum(map(len, texts)) // CHARACTERS_PER_TOKEN if texts else len(prompt)
    copies = 1 + PASSES if plan.cloud and "variance" in plan.cloud.gates else 1
    return copies * (tokens + plan.recipe.max_tokens)


def _run(
    plan: RunPlan, prompt: PromptOrChat, resources: Resources, target: Target, model: LoadedDrafter | None
) -> Iterator[Event]:
    recipe = plan.recipe
    environment = _environment(target, model)  # measured before the clock starts
    read = read_prompt(target.tokenizer, prompt, recipe.chat, target.vocab_size, recipe.template_options)
    tokens = target.opening if target.encoder else read.tokens  # an encoder's input is not part of the text
    with ExitStack() as opened:
        pipeline = resources.pipeline(plan, target, model, read.tokens if is_encoded(prompt) else read.text, tokens)
        opened.callback(pipeline.close)
        if plan.edge_alone:
            pipeline = replace(pipeline, verifier=EdgeVerifier(pipeline.verifier))
        free = _free_positions(pipeline, tokens)
        start = read.start + _prepare(resources.pool, pipeline, plan, len(tokens), free)
        yield Header(
            recipe=asdict(replace(recipe, template_options=read.options)),
            prompt=read.text,
            prompt_tokens=tuple(read.tokens),
            vocab_size=target.vocab_size,
            exact=plan.exact,
            bit_equal=resources.drafter is None
            and target.bit_equal(plan.longest_chain, len(tokens) + recipe.max_tokens),
            encoder=target.encoder,
            cached_tokens=pipeline.target_cache.held(tokens) if pipeline.target_cache else 0,
            environment={**environment, **target.environment},
        )
        if resources.score and resources.logprobs is not None:
            yield from _scores(pipeline, target, read.text, read.tokens, resources.logprobs)
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
            failure = _memory_ran_out(resources.pool, kv_bytes, device)
        if failure is not None:
            yield End("error", failure, metrics)
            return
        reason = "stop" if stops.reached or last in pipeline.stop else "length"
        full = reason == "length" and metrics.tokens == free < recipe.max_tokens
        yield End(reason, None, metrics, _peak(pipeline, passes), full)


def _peak(pipeline: Pipeline, passes: Sequence[int] | None) -> MemoryUse:
    device, store = pipeline.device, getattr(pipeline.drafter, "store_bytes", None)
    read = None if passes is None else pipeline.weights_read(passes)
    return MemoryUse(*memory.peaks(device), pipeline.kv_bytes, store, memory.peak_reserved_bytes(device), read)


def _free_positions(pipeline: Pipeline, tokens: Sequence[int]) -> int:
    free = pipeline.context - len(tokens)
    if free < 1:
        raise PromptTooLong(len(tokens), pipeline.context)
    return free


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


def _memory_ran_out(pool: ModelPool, kv_bytes: int, device: torch.device) -> str:
    pool.recover()
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
        step = _with_prefill(_cut(step, len(pieces), stops.reached), drafter_s)
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
        pieces[-1] += stream.rest()
    return pieces


def _cut(step: Step, keep: int, stopped: bool) -> Step:
    step = step.cut(keep)
    return replace(step, verdict=replace(step.verdict, pending=())) if stopped else step


def _with_prefill(step: Step, seconds: float) -> Step:
    return replace(step, draft_s=step.seconds.draft + seconds) if seconds else step


def _prefill(pipeline: Pipeline, tokens: Sequence[int], drafter: bool = False) -> Generator[Loading, None, float]:
    """Yield the progress; return the seconds, without those of the caller."""
    seconds, chunks = 0.0, pipeline.prefill(tokens, drafter)
    while True:
        start = job_clock()
        done = next(chunks, None)
        seconds += job_clock() - start
        if done is None:
            return seconds
        yield Loading("drafter: prompt" if drafter else "prompt", done, len(tokens))


def _prepare(pool: ModelPool, pipeline: Pipeline, plan: RunPlan, tokens: int, free: int) -> float:
    length = tokens + min(plan.recipe.max_tokens, free)
    pool.free_memory_for(pipeline.caches, length)
    start = time.perf_counter()
    pipeline.prepare(plan.longest_chain, tokens, length)
    return time.perf_counter() - start


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
