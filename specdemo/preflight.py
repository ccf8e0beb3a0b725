"""Will this pair help? Acceptance from one pass over a few texts, costs from a few timed rounds, nothing generated.

The texts stand for what will be written. A round may start at any of their tokens: how many it would commit follows
from beta = sum min(p, q) at the tokens after it (2211.17192, Definition 3.3), one after the other, so acceptance that
comes in runs is priced as it comes. Where greedy decoding is asked about, only places count at which the target would
have gone on as the text does: elsewhere its own text would be another. A text of the target's own is the best thing to
read, since it repeats itself as the next one will: n-grams promise far too little on anything else.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from specdemo.core.decode import DraftBudget
from specdemo.core.errors import UserError
from specdemo.core.intervals import interval
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

MAX_GAMMA = 8  # tokens of a draft
MAX_TEXT_TOKENS = 512  # tokens of a text that are read


@dataclass(frozen=True)
class Estimate:
    """What drafts of one length would give: a median over the texts, with an interval of 95 %."""

    gamma: int
    tokens_per_pass: float
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class Preflight:
    """What is to be expected of a recipe on texts like these."""

    recipe: Recipe
    alpha: float  # mean sum min(p, q) where a draft would be tested first
    c: float  # a drafted token, in plain passes
    v: dict[int, float]  # a pass over so many rows, in plain passes
    estimates: tuple[Estimate, ...]
    weight_bytes: int  # of all models
    kv_bytes: int  # of keys and values, for a thousand tokens

    @property
    def best(self) -> Estimate:
        """The draft length that promises most."""
        return max(self.estimates, key=lambda one: one.speedup)

    def as_dict(self) -> dict[str, Any]:
        """Everything, and the advice, as JSON has it."""
        return {**json.loads(json.dumps(asdict(self))), "advice": self.advice}

    @property
    def advice(self) -> str:
        """One plain sentence."""
        best = self.best
        if best.speedup < 1.03:
            why = "the drafter is too dear for what is accepted" if self.c > 0.3 else "too little would be accepted"
            return f"don't: at best {best.speedup:.2f}x the speed of plain decoding, since {why}"
        sure = "" if best.low > 1 else ", though it may make no difference"
        return f"gamma {best.gamma}: about {best.speedup:.2f}x the speed of plain decoding{sure}"


def texts_for(recipe: Recipe, kinds: Sequence[str] = ()) -> list[Prompt]:
    """What there is to read for a recipe: the bundled target's own texts if it is the target, else bare prompts."""
    if recipe.models[0] == PAIRS["bundled"].target:
        return load_written(recipe.temperature, kinds)
    return load_prompts(kinds=kinds)


def preflight(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Preflight:
    """Estimates for `recipe` with drafts of every length. Raises `UserError` where models or method do not fit."""
    if METHODS[recipe.method].preflight is None:
        names = sorted((method.preflight, name) for name, method in METHODS.items() if method.preflight)
        raise UserError(f"preflight knows the methods {', '.join(name for _, name in names)}, not {recipe.method}")
    target, drafter, pipeline = load_comparable(recipe, pool)
    sampling = SamplingParams(recipe.temperature, recipe.top_k, recipe.top_p)
    texts = usable_texts(target, prompts, recipe.max_tokens, pipeline.context)
    priced = measure_costs(lambda: build_pipeline(recipe, target, drafter), texts, MAX_GAMMA)
    c, v = priced.c, dict(enumerate(priced.v, 1))
    rounds, openings = [], []
    for text, start in texts:
        fresh = build_pipeline(recipe, target, drafter)
        opening = prompt_cost(fresh, (text, start), priced)
        one = _rounds(text, start, fresh, sampling)
        if any(counts for _, counts in one):
            rounds.append(one)
            openings.append(opening)
    if not rounds:
        raise UserError("the target would write none of these texts: give some of its kind, or a temperature above 0")
    estimates = []
    for gamma in range(1, MAX_GAMMA + 1):
        found = [_expected(one, gamma, c, v, opening) for one, opening in zip(rounds, openings, strict=True)]
        ratios = [speedup for _, speedup in found]
        estimates.append(
            Estimate(
                gamma,
                statistics.median(tokens for tokens, _ in found),
                statistics.median(ratios),
                *interval(ratios),
            )
        )
    first, _ = texts[0]
    pipeline.verifier.verify(first, Draft())  # so that keys and values of a text are held, to be weighed
    return Preflight(
        recipe,
        statistics.mean(betas[0] for one in rounds for betas, counts in one if counts and betas),
        c,
        v,
        tuple(estimates),
        target.weight_bytes + (drafter.weight_bytes if drafter else 0),
        round(1000 * pipeline.kv_bytes / len(first)),
    )


StepOutlook = tuple[
    list[float], bool
]  # chances of the tokens drafted at a place, one after the other; whether it counts


def load_comparable(recipe: Recipe, pool: ModelPool) -> tuple[LoadedModel, LoadedModel | None, Pipeline]:
    """The models, and parts made of them. Raises `UserError` where their laws cannot be compared along a text."""
    if recipe.encoder or pool.take(recipe.target_spec).encoder:
        raise UserError("texts are read as they go on, and a model with an encoder begins anew: run or bench it")
    target = pool.take(recipe.target_spec)
    drafter = pool.take(recipe.drafter_spec) if recipe.drafter_spec else None
    pipeline = build_pipeline(recipe, target, drafter)
    if isinstance(pipeline.drafter, UniversalDrafter):
        raise UserError("laws can be compared over one vocabulary and these models have two: run or bench them instead")
    return target, drafter, pipeline


def usable_texts(
    target: LoadedModel, prompts: Sequence[Prompt], length: int, context: int
) -> list[tuple[list[int], int]]:
    """The texts that a draft can be made for and that fit the context. Raises `UserError` where there are none."""
    texts = [read_text(target, prompt, length) for prompt in prompts]
    texts = [(text[: context - MAX_GAMMA], start) for text, start in texts]
    texts = [(text, start) for text, start in texts if len(text) - start > MAX_GAMMA]
    if not texts:
        raise UserError(f"the texts are too short to tell: give some of more than {2 * MAX_GAMMA} tokens")
    return texts


def read_text(target: LoadedModel, prompt: Prompt, length: int) -> tuple[list[int], int]:
    """Tokens of a text, and how many of them are there before a first round: one, or the prompt of a written text."""
    text = target.tokenizer.encode(prompt.text)[:MAX_TEXT_TOKENS]
    if not prompt.written:
        return text, 1 if len(text) > 2 * MAX_GAMMA else len(text)
    written = target.tokenizer.encode(prompt.written, add_special_tokens=False)
    return text + written[: min(length, MAX_TEXT_TOKENS) + MAX_GAMMA], len(text)


def _rounds(text: Sequence[int], start: int, pipeline: Pipeline, sampling: SamplingParams) -> list[StepOutlook]:
    """For each token of the text from `start` on that has enough behind it: the betas of a draft that starts there."""
    p = distributions(pipeline.caches[0], text, sampling)
    right = (p.argmax(-1)[:-1] == torch.tensor(text[1:], device=p.device)).tolist()
    counts = [one or sampling.temperature > 0 for one in right]
    if len(pipeline.caches) > 1:
        betas = torch.minimum(p, distributions(pipeline.caches[1], text, sampling)).sum(-1).tolist()
        return [(betas[i : i + MAX_GAMMA], counts[i]) for i in range(start - 1, len(text) - MAX_GAMMA)]
    rounds = []
    for i in range(start - 1, len(text) - MAX_GAMMA):
        draft = pipeline.drafter.propose(text[: i + 1], DraftBudget(MAX_GAMMA, Fixed(MAX_GAMMA))).tokens
        chances: list[float] = []
        for place, token in enumerate(draft[: len(text) - 1 - i], i):
            chances.append(float(p[place, token]))
            if token != text[place + 1]:
                chances += [0.0] * (len(draft) - len(chances))  # what would follow another text is not known
                break
        rounds.append((chances, counts[i]))
    return rounds


def distributions(cached: CachedModel, text: Sequence[int], sampling: SamplingParams) -> Tensor:
    """The law after each token, `[n, vocab]`."""
    return sampling.logits_to_probs(cached.read(text).float())


def _expected(
    rounds: Sequence[StepOutlook], gamma: int, c: float, v: dict[int, float], opening: float = 0.0
) -> tuple[float, float]:
    """Tokens per round and speed-up, over the places at which rounds would start if each began where one ended.

    It is a run that ends with the text: its first pass drafts nothing and is no part of this, and the last drafts are
    as short as what is left. `opening` is what the drafter's first look at the prompt costs, in plain passes.
    """
    reach = [0.0, 1.0, *[0.0] * len(rounds)]  # how likely a round starts here
    weight, tokens, cost = 0.0, 0.0, opening
    for i, (betas, counts) in enumerate(rounds[:-1]):
        drafted = betas[: min(gamma, len(rounds) - i - 2)]  # and a token of the target's own
        path, expected = 1.0, 1.0
        for k, beta in enumerate(drafted):
            reach[i + k + 1] += reach[i] * path * (1 - beta)
            path *= beta
            expected += path
        reach[i + len(drafted) + 1] += reach[i] * path
        if counts:
            weight += reach[i]
            tokens += reach[i] * expected
            cost += reach[i] * (v[len(drafted) + 1] + c * len(drafted))
    return tokens / weight, tokens / cost


@dataclass(frozen=True)
class StepCosts:
    """What was found."""

    plain_s: float  # seconds of a plain pass, with all that makes a token of it
    c: float  # a drafted token, in plain passes
    v: tuple[float, ...]  # a pass over 1, 2, ... rows, in plain passes


BASELINE_RUNS = 5  # plain rounds in a row,
WARMING = 2  # of which the first are not counted

TimedText = tuple[Sequence[int], int]  # tokens, and how many of them are there before the first round


def measure_costs(
    pipeline: Callable[[], Pipeline],
    texts: Sequence[TimedText],
    longest: int,
    rounds: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts:
    """Costs of drafts of up to `longest` tokens.

    Medians over `rounds` rounds of every length. Every text has room for two rounds; each is begun anew, with parts of
    its own, until there have been enough. A drafter that never proposes anything costs nothing.
    """
    judged: list[list[float]] = [[] for _ in range(longest + 1)]
    drafted: list[float] = []
    lengths = cycle([*[0] * BASELINE_RUNS, *range(1, longest + 1)])
    for text in cycle(texts):
        idle = 0
        for n, draft_s, judge_s, tokens in _timed_rounds(pipeline(), *text, lengths, clock):
            idle = 0 if n else idle + 1
            if n or idle > WARMING:
                judged[n].append(judge_s)
            if tokens:
                drafted.append(draft_s / tokens)
            if len(judged[longest]) == rounds:
                plain = statistics.median(judged[0])
                c = statistics.median(drafted) / plain if drafted else 0.0
                return StepCosts(plain, c, tuple(statistics.median(seconds) / plain for seconds in judged))
    raise ValueError("there are no texts")


def prompt_cost(
    pipeline: Pipeline, text: TimedText, priced: StepCosts, clock: Callable[[], float] = time.perf_counter
) -> float:
    """What it costs a drafter that has seen nothing yet to read a text's prompt, in plain passes."""
    tokens, start = text
    began = clock()
    draft = pipeline.drafter.propose(tokens[:start], DraftBudget(1, Fixed(1)))
    return max(0.0, (clock() - began) / priced.plain_s - priced.c * len(draft))


def _timed_rounds(
    pipeline: Pipeline, text: Sequence[int], start: int, lengths: Iterator[int], clock: Callable[[], float]
) -> Iterator[tuple[int, float, float, int]]:
    """One round after the other: the length asked for, seconds of drafting and judging, and how many were drafted."""
    pipeline.verifier.verify(text[:start], Draft())  # reads the prompt
    place = start + 1
    while place < len(text):
        n = next(lengths)
        began = clock()
        draft = pipeline.drafter.propose(text[:place], DraftBudget(n, Fixed(n))) if n else Draft()
        draft_s, tokens = clock() - began, len(draft)
        if tokens < n:  # the pass is timed with as many rows all the same
            draft = Draft.chain(((text[place] + 1) % pipeline.caches[0].vocab_size,) * n)
        since = clock()
        pipeline.verifier.verify(text[:place], draft)
        yield n, draft_s, clock() - since, tokens
        kept = 0  # what the text confirms is held, and the token after it is news
        while kept < n and place + kept < len(text) and draft.tokens[kept] == text[place + kept]:
            kept += 1
        place += kept + 1
