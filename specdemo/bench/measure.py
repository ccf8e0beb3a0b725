"""Run every recipe, and `generate` of transformers on the same weights, on every prompt and record figures.

All lanes decode a prompt in shuffled order before the next one. The caller's time between steps is `paused_s`.
"""

from __future__ import annotations

import random
import time
from bisect import bisect
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime
from functools import cache
from itertools import count, product
from typing import Any

import torch
from transformers import set_seed
from transformers.generation.streamers import BaseStreamer

from specdemo.core.errors import UserError
from specdemo.core.events import End, Header, Loading, MemoryUse, StepEvent
from specdemo.core.policies import POLICIES
from specdemo.core.rules import DEFAULT_RULE
from specdemo.core.step import Step
from specdemo.drafters import METHODS
from specdemo.generate import generate
from specdemo.models.engines.generic import has_encoder
from specdemo.models.load import load_with_transformers
from specdemo.models.memory_plan import check_memory, plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.tokenizer import ChatMessage
from specdemo.option_rules import has_effect
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe, plan_run

VARIED = ("ngram", "filler_top_k", "filler_weight", "corpus_order")  # options of methods that take lists
_COPY_BYTES = 256 << 20  # larger than any CPU cache
TEXT_LENGTHS = (64, 128, 256, 512, 1024)  # tokens before the draft token
CONFIDENCES = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class Baseline:
    """Arguments of `generate` and settings of the assistant."""

    title: str
    family: str  # only its fastest setting is reported
    arguments: dict[str, Any] = field(default_factory=dict)
    assistant: dict[str, Any] | None = None


def _assisted(schedule: str, threshold: float) -> Baseline:
    settings = {"num_assistant_tokens_schedule": schedule, "assistant_confidence_threshold": threshold}
    return Baseline(f"assisted {schedule} {threshold:g}", "assisted", assistant=settings)


BASELINES = {
    baseline.title: baseline
    for baseline in (
        Baseline("generate", "generate"),
        _assisted("constant", 0.0),
        _assisted("constant", 0.4),
        _assisted("heuristic", 0.0),
        _assisted("heuristic", 0.4),
        Baseline("prompt lookup 4", "prompt lookup", {"prompt_lookup_num_tokens": 4}),
        Baseline("prompt lookup 10", "prompt lookup", {"prompt_lookup_num_tokens": 10}),
    )
}


class TokenClock(BaseStreamer):
    """Time and size of every batch of tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Required by transformers."""


class Baselines:
    """A pair loaded by transformers. Raises `UserError` if memory is short."""

    def __init__(self, target: ModelSpec, drafter: ModelSpec | None) -> None:
        check_memory([plan_spec(spec.resolved(), 0) for spec in (target, drafter) if spec is not None])
        self._target, self._tokenizer = load_with_transformers(target)
        if has_encoder(self._target.config):
            raise UserError(f"the transformers baselines do not support encoder-decoders ({target.name}): omit --peers")
        self._drafter = load_with_transformers(drafter)[0] if drafter else None

    def run(
        self, baseline: Baseline, text: str, temperature: float, gamma: int, max_tokens: int, seed: int
    ) -> dict[str, Any]:
        """Continue `text`; return its tokens and the figures measurable outside `generate`."""
        ids = self._tokenizer(text, return_tensors="pt").input_ids.to(self._target.device)
        free_positions = self._target.config.max_position_embeddings - ids.shape[1]
        arguments: dict[str, Any] = dict(baseline.arguments)
        if temperature > 0:
            arguments |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        else:
            arguments |= {"do_sample": False}
        if baseline.assistant is not None:
            assert self._drafter is not None
            for name, value in {**baseline.assistant, "num_assistant_tokens": gamma}.items():
                setattr(self._drafter.generation_config, name, value)
            arguments["assistant_model"] = self._drafter
        clock = TokenClock()
        set_seed(seed)
        generate: Any = self._target.generate  # a method of all loaded models, unknown to the type checker
        start = time.perf_counter()
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(max_tokens, free_positions),
            streamer=clock,
            pad_token_id=self._tokenizer.eos_token_id,
            **arguments,
        )
        tokens = output[0, ids.shape[1] :].tolist()
        first, wall = clock.times[1], time.perf_counter() - clock.times[1]
        decoded = len(tokens) - clock.counts[1]
        return {
            "text": tokens,
            "tokens": len(tokens),
            "ttft_s": first - start,
            "wall_s": wall,
            "tokens_per_second": decoded / wall if decoded else None,
            "tokens_per_target_pass": decoded / (len(clock.times) - 2) if len(clock.times) > 2 else None,
        }


@dataclass(frozen=True)
class BenchProgress:
    """Benchmark progress: run `number` of `total` (0 during warm-up)."""

    number: int
    total: int
    doing: str

    @property
    def share(self) -> float:
        return max(self.number - 1, 0) / self.total

    def __str__(self) -> str:
        return f"{self.number} of {self.total}: {self.doing}" if self.number else f"warming up: {self.doing}"


def recipe_label(recipe: Recipe) -> str:
    length = f" gamma={recipe.gamma}" if recipe.policy == "fixed" else f" {recipe.policy}"
    length = length if METHODS[recipe.method].uses_policy else ""
    own = (name for name in VARIED if name in METHODS[recipe.method].option_names)
    changed = "".join(f" {name}={value}" for name in own if (value := getattr(recipe, name)) != getattr(Recipe, name))
    if (server := plan_run(recipe).server) is not None:
        return f"{server} T={recipe.temperature:g}"
    rule = "" if recipe.rule == DEFAULT_RULE else f" {recipe.rule}"
    mode = f" {recipe.cloud.mode}" if recipe.cloud else ""
    return f"{recipe.method}{length}{changed}{rule}{mode} T={recipe.temperature:g}"


def grid(
    methods: Sequence[str],
    gammas: Sequence[int],
    policies: Sequence[str],
    temperatures: Sequence[float],
    external: Sequence[str] = (),
    **varied: Sequence[Any],
) -> Iterator[dict[str, Any]]:
    """Yield recipe settings: for each temperature AR decoding, servers, then every combination, once if some are equal.

    Policies other than `fixed` start from the last of `gammas`. Top-p and top-k are off, as in the papers.
    `varied`: lists of options of methods.
    """
    for temperature in temperatures:
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
        yield {"method": "ar", **sampling}
        yield from ({"external": server, **sampling} for server in external)
        for method in methods:
            lengths = _lengths(method, gammas, policies) if method != "ar" else ()
            for length, own in product(lengths, _combinations(method, varied)):
                yield {"method": method, **length, **own, **sampling}


def _combinations(method: str, varied: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    names = [name for name in varied if method in METHODS and name in METHODS[method].option_names]
    combinations = (dict(zip(names, values, strict=True)) for values in product(*(varied[name] for name in names)))
    distinct: list[dict[str, Any]] = []
    for values in combinations:
        if values.get("filler_top_k") == 1:
            values.pop("filler_weight", None)  # has no effect without fillers
        distinct += [] if values in distinct else [values]
    return distinct


def _lengths(method: str, gammas: Sequence[int], policies: Sequence[str]) -> list[dict[str, Any]]:
    if method not in METHODS or not METHODS[method].uses_policy:
        return [{}]
    pairs = [(policy, gamma) for policy in policies for gamma in (gammas if policy == "fixed" else gammas[-1:])]
    used = [(policy if policy not in POLICIES or has_effect(policy, method) else "fixed", n) for policy, n in pairs]
    return [{"policy": policy, "gamma": gamma} for policy, gamma in dict.fromkeys(used)]


def measure(
    recipes: Sequence[Recipe],
    prompts: Sequence[Prompt],
    pool: ModelPool,
    baselines: Sequence[str] = (),
    seed: int = 0,
    repeat: int = 1,
) -> Iterator[BenchProgress | dict[str, Any]]:
    """Yield a `BenchProgress` per run and step, and a record per message.

    A record contains name and class of the prompt and the figures of each run: `recipes`, then `baselines` for each AR
    recipe. Later messages follow the answer of the first recipe. `repeat` uses other seeds. Raises `RuntimeError` if a
    run fails.
    """
    now = datetime.now()
    recipes = [recipe.at(now) for recipe in recipes]
    plans = [plan_run(recipe) for recipe in recipes]
    ar = [plan.recipe for plan in plans if plan.baseline]
    drafting = next((plan for plan in plans if plan.drafter and plan.server is None), None)
    lanes: list[tuple[Recipe, str | None]] = [(recipe, None) for recipe in recipes]
    lanes += [(recipe, baseline) for recipe in ar for baseline in baselines]
    pair = Baselines(plan_run(ar[0]).target, drafting.drafter if drafting else None) if baselines else None
    order = list(range(len(lanes)))
    total = len(lanes) * sum(1 + len(prompt.later) for prompt in prompts) * repeat

    def run(
        lane: tuple[Recipe, str | None], prompt: Prompt, number: int, repetition: int = 0
    ) -> Generator[BenchProgress, None, dict[str, Any]]:
        recipe, baseline = replace(lane[0], seed=lane[0].seed + repetition), lane[1]
        name = recipe_label(recipe) if baseline is None else f"transformers {baseline} T={recipe.temperature:g}"
        turn = BenchProgress(number, total, f"{prompt.name}, {name}" if number else name)
        yield turn
        if baseline is None:
            return (yield from _measured_run(recipe, recipe.chat and prompt.messages or prompt.text, pool, turn))
        assert pair is not None
        gamma = drafting.recipe.gamma if drafting else recipe.gamma
        return pair.run(BASELINES[baseline], prompt.text, recipe.temperature, gamma, recipe.max_tokens, recipe.seed)

    for lane in lanes:
        yield from run(lane, prompts[0], 0)
    rng, numbers = random.Random(seed), count(1)
    for repetition, prompt in product(range(repeat), prompts):
        answers: list[str] = []
        for _ in range(1 + len(prompt.later)):
            asked = _turn(prompt, answers)
            rng.shuffle(order)
            runs: list[Any] = [None] * len(lanes)
            for i in order:
                runs[i] = yield from run(lanes[i], asked, next(numbers), repetition)
            yield {"kind": prompt.kind, "name": prompt.name, "runs": runs}
            answers.append(runs[0].get("answer", ""))


def _turn(prompt: Prompt, answers: Sequence[str]) -> Prompt:
    """Return the message after `answers`: a conversation, and a text of all messages."""
    if not prompt.later:
        return prompt
    messages = [prompt.text, *(text for pair in zip(answers, prompt.later, strict=False) for text in pair)]
    chat = tuple({"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(messages))
    name = f"{prompt.name}, turn {1 + len(answers)}"
    return replace(prompt, name=name, text="\n".join(messages), messages=chat)


def _measured_run(
    recipe: Recipe, prompt: str | Sequence[ChatMessage], pool: ModelPool, turn: BenchProgress
) -> Generator[BenchProgress, None, dict[str, Any]]:
    environment: Mapping[str, Any] = {}
    prompt_length = 0
    steps: list[Step] = []
    texts: list[str] = []
    pauses: list[float] = []
    end = End("error")
    with closing(generate(recipe, prompt, pool)) as events:
        for event in events:
            match event:
                case Loading():
                    since = time.perf_counter()
                    yield replace(turn, doing=event.text)
                    pauses += [time.perf_counter() - since] if steps else []
                case Header():
                    environment, prompt_length = event.environment, len(event.prompt_tokens)
                case StepEvent():
                    steps.append(event.step)
                    texts.append(event.text)
                    since = time.perf_counter()
                    yield turn
                    pauses.append(time.perf_counter() - since)
                case End():
                    end = event
    if end.reason == "error":
        raise RuntimeError(f"{recipe_label(recipe)} failed: {end.error}")
    metrics, peak = end.metrics, end.peak or MemoryUse()
    paused = sum(pauses[:-1])
    return {
        **metrics.as_dict(),
        "acceptance": Acceptance.of(steps, prompt_length),
        "peak_rss_bytes": peak.process,
        "peak_device_bytes": peak.device,
        "peak_reserved_bytes": peak.reserved,
        "kv_bytes": peak.kv,
        "text": [token for step in steps for token in step.tokens],
        "answer": "".join(texts),
        "decode_tokens": metrics.decode_tokens,
        "wall_s": steps[-1].t - steps[0].t - paused,
        "paused_s": paused,
        **_memory(environment, peak),
        "environment": environment,
    }


def _memory(environment: Mapping[str, Any], peak: MemoryUse) -> dict[str, float]:
    """Return bytes of weights and KV cache and, if known, bytes read; nothing for other engines."""
    target, drafter = environment.get("target_bytes"), environment.get("drafter_bytes") or 0
    if target is None:
        return {}
    held = target + drafter + (peak.kv or 0)
    return {"held_bytes": held} if peak.read is None else {"held_bytes": held, "bytes_read": peak.read}


@dataclass(frozen=True)
class AcceptanceCount:
    """Tested and accepted draft tokens, and the sum of their confidences."""

    tested: int = 0
    accepted: int = 0
    confidence: float = 0.0

    def __add__(self, other: AcceptanceCount) -> AcceptanceCount:
        return AcceptanceCount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def share(self) -> float:
        return self.accepted / self.tested


Counts = Mapping[int, AcceptanceCount]  # keys: draft position from 1, or index of an interval


@dataclass(frozen=True)
class Acceptance:
    """Counts of tested tokens; the confidence of a token is the drafter's estimate, otherwise q."""

    position: Counts = field(default_factory=dict)
    text_length: Counts = field(default_factory=dict)
    confidence: Counts = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Iterable[Step], prompt_length: int) -> Acceptance:
        return cls.total(_tested(steps, prompt_length))

    @classmethod
    def total(cls, parts: Iterable[Acceptance]) -> Acceptance:
        sums: tuple[dict[int, AcceptanceCount], ...] = ({}, {}, {})
        for part in parts:
            for total, counts in zip(sums, (part.position, part.text_length, part.confidence), strict=True):
                for key, counted in counts.items():
                    total[key] = total.get(key, AcceptanceCount()) + counted
        return cls(*(dict(sorted(total.items())) for total in sums))


def _tested(steps: Iterable[Step], length: int) -> Iterator[Acceptance]:
    for step in steps:
        draft = step.draft
        if draft.undisclosed is not None:
            for depth in step.depths[0]:
                yield _of_token(depth, length + depth - 1, depth <= step.accepted, None)
        for node, beta in enumerate(step.verdict.beta):
            if beta is not None and not step.unverified:
                depth = len(draft.path(node))
                estimate = draft.origin[node].confidence if draft.origin else None
                q = draft.token_probs[node] if draft.token_probs else None
                confidence = q if estimate is None else estimate
                yield _of_token(depth, length + depth - 1, node in step.verdict.accepted, confidence)
        length += len(step.tokens)


def _of_token(position: int, length: int, accepted: bool, confidence: float | None) -> Acceptance:
    count = AcceptanceCount(1, int(accepted), confidence or 0.0)
    known = {} if confidence is None else {bisect(CONFIDENCES, confidence): count}
    return Acceptance({position: count}, {bisect(TEXT_LENGTHS, length): count}, known)


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second read and written by a tensor copy (best of five)."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        target[-1].item()  # synchronise the device
        best = min(best, time.perf_counter() - start)
    return 2 * _COPY_BYTES / best
