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

from specdemo.core.decode import More
from specdemo.core.errors import Refused
from specdemo.core.intervals import interval
from specdemo.core.policies import Fixed
from specdemo.core.sampling import Warp
from specdemo.core.step import Draft
from specdemo.drafters.universal import UniversalDrafter
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import Loaded
from specdemo.models.model_pool import Shelf
from specdemo.models.zoo import PAIRS
from specdemo.pipeline import Parts, build
from specdemo.prompts import Prompt, load_prompts, load_written
from specdemo.recipe import Recipe

MODELS, STORES = ("draft", "self"), ("nasd", "suffix", "lookup")
LONGEST = 8  # tokens of a draft
MOST = 512  # tokens of a text that are read


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


def preflight(recipe: Recipe, prompts: Sequence[Prompt], shelf: Shelf) -> Preflight:
    """Estimates for `recipe` with drafts of every length. Raises `Refused` where models or method do not fit."""
    if recipe.method not in MODELS + STORES:
        raise Refused(f"preflight knows the methods {', '.join(MODELS + STORES)}, not {recipe.method}")
    target, drafter, parts = fitting(recipe, shelf)
    warp = Warp(recipe.temperature, recipe.top_k, recipe.top_p)
    texts = readable(target, prompts, recipe.max_tokens, parts.context)
    priced = price(lambda: build(recipe, target, drafter), texts, LONGEST)
    c, v = priced.c, dict(enumerate(priced.v, 1))
    rounds, openings = [], []
    for text, start in texts:
        fresh = build(recipe, target, drafter)
        opening = reading(fresh, (text, start), priced)
        one = _rounds(text, start, fresh, warp)
        if any(counts for _, counts in one):
            rounds.append(one)
            openings.append(opening)
    if not rounds:
        raise Refused("the target would write none of these texts: give some of its kind, or a temperature above 0")
    estimates = []
    for gamma in range(1, LONGEST + 1):
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
    parts.judge.judge(first, Draft())  # so that keys and values of a text are held, to be weighed
    return Preflight(
        recipe,
        statistics.mean(betas[0] for one in rounds for betas, counts in one if counts and betas),
        c,
        v,
        tuple(estimates),
        target.weight_bytes + (drafter.weight_bytes if drafter else 0),
        round(1000 * parts.kv_bytes / len(first)),
    )


Round = tuple[list[float], bool]  # chances of the tokens drafted at a place, one after the other; whether it counts


def fitting(recipe: Recipe, shelf: Shelf) -> tuple[Loaded, Loaded | None, Parts]:
    """The models, and parts made of them. Raises `Refused` where their laws cannot be compared along a text."""
    if recipe.encoder or shelf.take(recipe.target_spec).encoder:
        raise Refused("texts are read as they go on, and a model with an encoder begins anew: run or bench it")
    target = shelf.take(recipe.target_spec)
    drafter = shelf.take(recipe.drafter_spec) if recipe.drafter_spec else None
    parts = build(recipe, target, drafter)
    if isinstance(parts.drafter, UniversalDrafter):
        raise Refused("laws can be compared over one vocabulary and these models have two: run or bench them instead")
    return target, drafter, parts


def readable(target: Loaded, prompts: Sequence[Prompt], length: int, context: int) -> list[tuple[list[int], int]]:
    """The texts that a draft can be made for and that fit the context. Raises `Refused` where there are none."""
    texts = [read(target, prompt, length) for prompt in prompts]
    texts = [(text[: context - LONGEST], start) for text, start in texts]
    texts = [(text, start) for text, start in texts if len(text) - start > LONGEST]
    if not texts:
        raise Refused(f"the texts are too short to tell: give some of more than {2 * LONGEST} tokens")
    return texts


def read(target: Loaded, prompt: Prompt, length: int) -> tuple[list[int], int]:
    """Tokens of a text, and how many of them are there before a first round: one, or the prompt of a written text."""
    text = target.tokenizer.encode(prompt.text)[:MOST]
    if not prompt.written:
        return text, 1 if len(text) > 2 * LONGEST else len(text)
    written = target.tokenizer.encode(prompt.written, add_special_tokens=False)
    return text + written[: min(length, MOST) + LONGEST], len(text)


def _rounds(text: Sequence[int], start: int, parts: Parts, warp: Warp) -> list[Round]:
    """For each token of the text from `start` on that has enough behind it: the betas of a draft that starts there."""
    p = laws(parts.caches[0], text, warp)
    right = (p.argmax(-1)[:-1] == torch.tensor(text[1:], device=p.device)).tolist()
    counts = [one or warp.temperature > 0 for one in right]
    if len(parts.caches) > 1:
        betas = torch.minimum(p, laws(parts.caches[1], text, warp)).sum(-1).tolist()
        return [(betas[i : i + LONGEST], counts[i]) for i in range(start - 1, len(text) - LONGEST)]
    rounds = []
    for i in range(start - 1, len(text) - LONGEST):
        draft = parts.drafter.propose(text[: i + 1], More(LONGEST, Fixed(LONGEST))).tokens
        chances: list[float] = []
        for place, token in enumerate(draft[: len(text) - 1 - i], i):
            chances.append(float(p[place, token]))
            if token != text[place + 1]:
                chances += [0.0] * (len(draft) - len(chances))  # what would follow another text is not known
                break
        rounds.append((chances, counts[i]))
    return rounds


def laws(cached: CachedModel, text: Sequence[int], warp: Warp) -> Tensor:
    """The law after each token, `[n, vocab]`."""
    return warp.law(cached.read(text).float())


def _expected(
    rounds: Sequence[Round], gamma: int, c: float, v: dict[int, float], opening: float = 0.0
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
class Priced:
    """What was found."""

    plain_s: float  # seconds of a plain pass, with all that makes a token of it
    c: float  # a drafted token, in plain passes
    v: tuple[float, ...]  # a pass over 1, 2, ... rows, in plain passes


PLAIN = 5  # plain rounds in a row,
WARMING = 2  # of which the first are not counted

Text = tuple[Sequence[int], int]  # tokens, and how many of them are there before the first round


def price(
    parts: Callable[[], Parts],
    texts: Sequence[Text],
    longest: int,
    rounds: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> Priced:
    """Costs of drafts of up to `longest` tokens.

    Medians over `rounds` rounds of every length. Every text has room for two rounds; each is begun anew, with parts of
    its own, until there have been enough. A drafter that never proposes anything costs nothing.
    """
    judged: list[list[float]] = [[] for _ in range(longest + 1)]
    drafted: list[float] = []
    lengths = cycle([*[0] * PLAIN, *range(1, longest + 1)])
    for text in cycle(texts):
        idle = 0
        for n, draft_s, judge_s, tokens in _timed_rounds(parts(), *text, lengths, clock):
            idle = 0 if n else idle + 1
            if n or idle > WARMING:
                judged[n].append(judge_s)
            if tokens:
                drafted.append(draft_s / tokens)
            if len(judged[longest]) == rounds:
                plain = statistics.median(judged[0])
                c = statistics.median(drafted) / plain if drafted else 0.0
                return Priced(plain, c, tuple(statistics.median(seconds) / plain for seconds in judged))
    raise ValueError("there are no texts")


def reading(parts: Parts, text: Text, priced: Priced, clock: Callable[[], float] = time.perf_counter) -> float:
    """What it costs a drafter that has seen nothing yet to read a text's prompt, in plain passes."""
    tokens, start = text
    began = clock()
    draft = parts.drafter.propose(tokens[:start], More(1, Fixed(1)))
    return max(0.0, (clock() - began) / priced.plain_s - priced.c * len(draft))


def _timed_rounds(
    parts: Parts, text: Sequence[int], start: int, lengths: Iterator[int], clock: Callable[[], float]
) -> Iterator[tuple[int, float, float, int]]:
    """One round after the other: the length asked for, seconds of drafting and judging, and how many were drafted."""
    parts.judge.judge(text[:start], Draft())  # reads the prompt
    place = start + 1
    while place < len(text):
        n = next(lengths)
        began = clock()
        draft = parts.drafter.propose(text[:place], More(n, Fixed(n))) if n else Draft()
        draft_s, tokens = clock() - began, len(draft)
        if tokens < n:  # the pass is timed with as many rows all the same
            draft = Draft.chain(((text[place] + 1) % parts.caches[0].vocab_size,) * n)
        since = clock()
        parts.judge.judge(text[:place], draft)
        yield n, draft_s, clock() - since, tokens
        kept = 0  # what the text confirms is held, and the token after it is news
        while kept < n and place + kept < len(text) and draft.tokens[kept] == text[place + kept]:
            kept += 1
        place += kept + 1
