"""Estimate the speed-up of a recipe without generating: acceptance from recorded texts, costs from a few timed steps.

A step may start at any token of a text; its expected tokens follow from beta = sum min(p, q) at the next positions
(2211.17192, Definition 3.3). For greedy decoding, only positions at which the text
continues with the target's choice count. Texts written by the target give the best estimates.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdemo.core.decode import DraftBudget
from specdemo.core.errors import UserError
from specdemo.core.metrics import interval
from specdemo.core.policies import Fixed
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft
from specdemo.drafters.universal import UniversalDrafter
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import PAIRS
from specdemo.pipeline import Pipeline, build_pipeline
from specdemo.prompts import Prompt, load_prompts, load_written
from specdemo.recipe import METHODS, Recipe

MAX_GAMMA = 8
MAX_TEXT_TOKENS = 512
WORTHWHILE_SPEEDUP = 1.03
EXPENSIVE_DRAFT = 0.3  # value of c
BASELINE_RUNS = 5  # consecutive AR steps; CPU caches are cold after a draft
WARMUP_RUNS = 2  # the first of these, not counted

TimedText = tuple[Sequence[int], int]  # tokens and length of the prompt


class StepOutlook(NamedTuple):
    """Outlook of a step from a position of a text."""

    acceptance: list[float]  # of each draft token after its predecessors
    counts: bool  # False if greedy decoding does not reach it


@dataclass(frozen=True)
class StepCosts:
    ar_s: float  # seconds of an AR step
    c: float  # cost of a draft token, in AR steps
    v: tuple[float, ...]  # cost of a pass over 1, 2, ... rows, in AR steps


@dataclass(frozen=True)
class Estimate:
    """Medians over the texts, with the 95 % interval of the speed-up."""

    gamma: int
    tokens_per_pass: float
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class Preflight:
    recipe: Recipe
    alpha: float  # mean of sum min(p, q) at the first draft position
    c: float  # cost of a draft token, in AR passes
    v: dict[int, float]  # cost of a pass by number of rows, in AR passes
    estimates: tuple[Estimate, ...]
    weight_bytes: int  # of all models
    kv_bytes: int  # per 1,000 tokens

    @property
    def best(self) -> Estimate:
        return max(self.estimates, key=lambda estimate: estimate.speedup)

    def as_dict(self) -> dict[str, Any]:
        return {**json.loads(json.dumps(asdict(self))), "advice": self.advice}

    @property
    def advice(self) -> str:
        best = self.best
        if best.speedup < WORTHWHILE_SPEEDUP:
            cause = "drafting costs too much" if self.c > EXPENSIVE_DRAFT else "too few tokens would be accepted"
            return f"don't: at best {best.speedup:.2f}x the speed of AR decoding, because {cause}"
        doubt = "" if best.low > 1 else ", but possibly no difference"
        return f"gamma {best.gamma}: about {best.speedup:.2f}x the speed of AR decoding{doubt}"


def preflight(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Preflight:
    """Estimate `recipe` for drafts of 1 to `MAX_GAMMA` tokens. Raises `UserError` if unsupported."""
    if METHODS[recipe.method].preflight is None:
        supported = [name for name, method in METHODS.items() if method.preflight]
        supported.sort(key=lambda name: METHODS[name].preflight)
        names = ", ".join(supported)
        raise UserError(f"preflight supports the methods {names}, not {recipe.method}: run or bench it")
    target, drafter, pipeline = load_comparable(recipe, pool)
    sampling = SamplingParams(recipe.temperature, recipe.top_k, recipe.top_p)
    texts = usable_texts(target, prompts, recipe.max_tokens, pipeline.context)
    costs = measure_costs(lambda: build_pipeline(recipe, target, drafter), texts, MAX_GAMMA)
    v = dict(enumerate(costs.v, 1))
    outlooks: list[tuple[list[StepOutlook], float]] = []  # per text, with the cost of its prompt
    for tokens, start in texts:
        fresh = build_pipeline(recipe, target, drafter)
        opening = prompt_cost(fresh, (tokens, start), costs)
        steps = step_outlooks(tokens, start, fresh, sampling)
        if any(step.counts for step in steps):
            outlooks.append((steps, opening))
    if not outlooks:
        raise UserError("greedy decoding does not reproduce these texts: provide other texts or raise the temperature")
    first_betas = [step.acceptance[0] for steps, _ in outlooks for step in steps if step.counts and step.acceptance]
    estimates = []
    for gamma in range(1, MAX_GAMMA + 1):
        expected = [expected_speedup(steps, gamma, costs.c, v, opening) for steps, opening in outlooks]
        tokens_per_pass, speedups = zip(*expected, strict=True)
        medians = statistics.median(tokens_per_pass), statistics.median(speedups)
        estimates.append(Estimate(gamma, *medians, *interval(speedups)))
    first, _ = texts[0]
    pipeline.verifier.verify(first, Draft())  # fill the KV cache
    return Preflight(
        recipe,
        statistics.mean(first_betas),
        costs.c,
        v,
        tuple(estimates),
        target.weight_bytes + (drafter.weight_bytes if drafter else 0),
        round(1000 * pipeline.kv_bytes / len(first)),
    )


def load_comparable(recipe: Recipe, pool: ModelPool) -> tuple[LoadedModel, LoadedModel | None, Pipeline]:
    """Return target, drafter and pipeline. Raises `UserError` if their distributions are not comparable."""
    if recipe.encoder or pool.take(recipe.target_spec).encoder:
        raise UserError("preflight does not support encoder-decoders: run or bench the recipe")
    target = pool.take(recipe.target_spec)
    drafter = pool.take(recipe.drafter_spec) if recipe.drafter_spec else None
    pipeline = build_pipeline(recipe, target, drafter)
    if isinstance(pipeline.drafter, UniversalDrafter):
        raise UserError("preflight requires models that share a vocabulary: run or bench the recipe")
    return target, drafter, pipeline


def texts_for(recipe: Recipe, kinds: Sequence[str] = ()) -> list[Prompt]:
    """Return texts recorded from the bundled target, for other targets bundled prompts."""
    if recipe.models[0] == PAIRS["bundled"].target:
        return load_written(recipe.temperature, kinds)
    return load_prompts(kinds=kinds)


def usable_texts(target: LoadedModel, prompts: Sequence[Prompt], length: int, context: int) -> list[TimedText]:
    """Encode and cut the texts; raise `UserError` if all are too short."""
    texts = [encode_text(target, prompt, length) for prompt in prompts]
    texts = [(tokens[: context - MAX_GAMMA], start) for tokens, start in texts]
    texts = [(tokens, start) for tokens, start in texts if len(tokens) - start > MAX_GAMMA]
    if not texts:
        raise UserError(f"the texts are too short: provide texts of more than {2 * MAX_GAMMA} tokens")
    return texts


def encode_text(target: LoadedModel, prompt: Prompt, length: int) -> tuple[list[int], int]:
    """Return the tokens of a text and the length of its prompt (1 without a recorded continuation)."""
    tokens = target.tokenizer.encode(prompt.text)[:MAX_TEXT_TOKENS]
    if not prompt.written:
        return tokens, 1 if len(tokens) > 2 * MAX_GAMMA else len(tokens)
    written = target.tokenizer.encode(prompt.written, add_special_tokens=False)
    return tokens + written[: min(length, MAX_TEXT_TOKENS) + MAX_GAMMA], len(tokens)


def distributions(cached: CachedModel, tokens: Sequence[int], sampling: SamplingParams) -> Tensor:
    """Return the next-token probabilities after each token, `[n, vocab]`."""
    return sampling.logits_to_probs(cached.read(tokens).float())


def step_outlooks(tokens: Sequence[int], start: int, pipeline: Pipeline, sampling: SamplingParams) -> list[StepOutlook]:
    p = distributions(pipeline.caches[0], tokens, sampling)
    predicted = (p.argmax(-1)[:-1] == torch.tensor(tokens[1:], device=p.device)).tolist()
    counts = [hit or sampling.temperature > 0 for hit in predicted]
    positions = range(start - 1, len(tokens) - MAX_GAMMA)
    if len(pipeline.caches) > 1:
        betas = torch.minimum(p, distributions(pipeline.caches[1], tokens, sampling)).sum(-1).tolist()
        return [StepOutlook(betas[i : i + MAX_GAMMA], counts[i]) for i in positions]
    outlooks = []
    for i in positions:
        draft = pipeline.drafter.propose(tokens[: i + 1], DraftBudget(MAX_GAMMA, Fixed(MAX_GAMMA))).tokens
        acceptance = [0.0] * len(draft)  # 0 after the first difference from the text
        for k, token in enumerate(draft, i):
            acceptance[k - i] = float(p[k, token])
            if token != tokens[k + 1]:
                break
        outlooks.append(StepOutlook(acceptance, counts[i]))
    return outlooks


def expected_speedup(
    outlooks: Sequence[StepOutlook], gamma: int, c: float, v: dict[int, float], opening: float = 0.0
) -> tuple[float, float]:
    """Return tokens per pass and speed-up without the prefill; drafts end with the text.

    `opening` is the cost of reading the prompt with the drafter, in AR passes.
    """
    reach = [0.0, 1.0, *[0.0] * len(outlooks)]  # probability that a step starts at each position
    steps, tokens, cost = 0.0, 0.0, opening
    for i, (acceptance, counts) in enumerate(outlooks[:-1]):
        draft = acceptance[: min(gamma, len(outlooks) - i - 2)]  # the target adds a token
        path, expected = 1.0, 1.0
        for k, beta in enumerate(draft):
            reach[i + k + 1] += reach[i] * path * (1 - beta)
            path *= beta
            expected += path
        reach[i + len(draft) + 1] += reach[i] * path
        if counts:
            steps += reach[i]
            tokens += reach[i] * expected
            cost += reach[i] * (v[len(draft) + 1] + c * len(draft))
    return tokens / steps, tokens / cost


def measure_costs(
    pipeline: Callable[[], Pipeline],
    texts: Sequence[TimedText],
    longest: int,
    repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts:
    """Measure drafts of up to `longest` tokens: medians over `repeats` steps of every length.

    A drafter without proposals has c = 0.
    """
    verify_s: list[list[float]] = [[] for _ in range(longest + 1)]
    token_s: list[float] = []
    lengths = cycle([*[0] * BASELINE_RUNS, *range(1, longest + 1)])
    for tokens, start in cycle(texts):
        consecutive = 0
        for gamma, draft_s, pass_s, drafted in _timed_steps(pipeline(), tokens, start, lengths, clock):
            consecutive = 0 if gamma else consecutive + 1
            if gamma or consecutive > WARMUP_RUNS:
                verify_s[gamma].append(pass_s)
            if drafted:
                token_s.append(draft_s / drafted)
            if len(verify_s[longest]) == repeats:
                ar_s = statistics.median(verify_s[0])
                c = statistics.median(token_s) / ar_s if token_s else 0.0
                return StepCosts(ar_s, c, tuple(statistics.median(seconds) / ar_s for seconds in verify_s))
    raise ValueError("there are no texts")


def prompt_cost(
    pipeline: Pipeline, text: TimedText, costs: StepCosts, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the drafter's cost of reading a prompt, in AR steps."""
    tokens, start = text
    began = clock()
    draft = pipeline.drafter.propose(tokens[:start], DraftBudget(1, Fixed(1)))
    return max(0.0, (clock() - began) / costs.ar_s - costs.c * len(draft))


def _timed_steps(
    pipeline: Pipeline, text: Sequence[int], start: int, lengths: Iterator[int], clock: Callable[[], float]
) -> Iterator[tuple[int, float, float, int]]:
    """Yield requested length, seconds of drafting and verification, and drafted tokens of each step."""
    pipeline.verifier.verify(text[:start], Draft())  # prefill
    position = start + 1
    while position < len(text):
        gamma = next(lengths)
        began = clock()
        draft = pipeline.drafter.propose(text[:position], DraftBudget(gamma, Fixed(gamma))) if gamma else Draft()
        draft_s, drafted = clock() - began, len(draft)
        if drafted < gamma:  # keep the number of rows
            draft = Draft.chain(((text[position] + 1) % pipeline.caches[0].vocab_size,) * gamma)
        began = clock()
        pipeline.verifier.verify(text[:position], draft)
        yield gamma, draft_s, clock() - began, drafted
        following = zip(draft.tokens, text[position:], strict=False)
        position += 1 + len(list(takewhile(lambda pair: pair[0] == pair[1], following)))
