"""What a draft-length policy loses to the best fixed gamma, without the noise of a clock or of chance.

Texts that the target wrote are read once by both models. Given that x is the token that came, a draft of it was
accepted with min(1, q(x) / p(x)): of all that comes to x with p(x), min(p, q)(x) comes that way (2211.17192, section
2.2). So the rounds of any number of runs that all wrote this text can be drawn, and the same coins thrown for every
policy. Each runs through the one loop, at costs that were measured once: what then differs is what they decided.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specdemo.bench import recipe_label
from specdemo.cli.arguments import Parser, add_model_options, given
from specdemo.cli.commands import at_least_one, run_command
from specdemo.core.decode import DraftBudget, DraftLengthPolicy, decode
from specdemo.core.errors import UserError
from specdemo.core.intervals import interval
from specdemo.core.policies import CostModel, Fixed
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft, Step, Verdict
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import build_pipeline
from specdemo.preflight import (
    MAX_GAMMA,
    distributions,
    load_comparable,
    measure_costs,
    prompt_cost,
    texts_for,
    usable_texts,
)
from specdemo.prompts import load_prompts
from specdemo.recipe import METHODS, Recipe


@dataclass(frozen=True)
class RecordedAcceptance:
    """A text after its prompt: for each token the chance that a draft of it was accepted, and sum min(p, q)."""

    chance: tuple[float, ...]
    beta: tuple[float, ...]
    prompt_cost: float = 0.0  # the drafter's first look at the prompt, in plain passes


class Replay:
    """Drafter, judge and clock of a run that is known to end in this text."""

    def __init__(self, told: RecordedAcceptance, costs: CostModel, seed: int) -> None:
        rng = random.Random(seed)
        self._right = [rng.random() < chance for chance in told.chance]
        self._told, self._costs, self._reading, self.now = told, costs, told.prompt_cost, 0.0

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """Token 1 where the text confirms the draft, 0 where not; what follows a wrong one is never tested."""
        place, count = len(tokens) - 1, 0
        while budget.may_extend(count, None):
            count += 1
        self.now += self._costs.token * count + self._reading
        self._reading = 0.0
        return Draft.chain(tuple(map(int, self._right[place : place + count])))

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        """Accepts up to the first wrong token."""
        place, count = len(tokens) - 1, len(draft)
        kept = (*draft.tokens, 0).index(0)
        tested = min(kept + 1, count)
        self.now += self._costs.verify(count + 1)
        betas = (*self._told.beta[place : place + tested], *(None,) * (count - tested))
        draws = (*(0.5,) * tested, *(None,) * (count - tested))
        return Verdict(tuple(range(kept)), 1, draw=draws, beta=betas)

    def observe(self, step: Step) -> None:
        """Nothing to learn."""


def speed(told: RecordedAcceptance, costs: CostModel, policy: DraftLengthPolicy, seeds: int) -> float:
    """Tokens per plain pass after the first token, over runs of `seeds` seeds; the speed-up over plain decoding."""
    tokens, spent = 0, 0.0
    for seed in range(seeds):
        replay = Replay(told, costs, seed)
        gamma = deepcopy(policy)
        steps = decode(
            [1], replay, replay, gamma, max_tokens=len(told.chance), stop=(), clock=lambda replay=replay: replay.now
        )
        for step in steps:
            if step.i:
                tokens += len(step.tokens)
                spent += step.draft_s + step.verify_s
    return tokens / spent


@dataclass(frozen=True)
class Regret:
    """One policy on one class of texts; speeds are means over texts, as speed-ups over plain decoding."""

    kind: str
    recipe: Recipe
    texts: int
    costs: CostModel
    best_gamma: int  # of those that are fixed, known afterwards; 0 is plain decoding
    best: float
    speed: float
    median: float  # over the texts, of the ratio to that gamma
    interval: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The policy's speed over that of the best fixed gamma: 1 where it loses nothing."""
        return self.speed / self.best


def regret(
    kind: str,
    recipe: Recipe,
    told: Sequence[RecordedAcceptance],
    costs: CostModel,
    policy: DraftLengthPolicy,
    seeds: int,
) -> Regret:
    """`policy` against every fixed gamma on the same texts, with the same coins. A greedy text has no coins."""
    seeds = seeds if recipe.temperature else 1
    fixed = [[speed(one, costs, Fixed(gamma), seeds) for one in told] for gamma in range(MAX_GAMMA + 1)]
    best = max(range(len(fixed)), key=lambda gamma: statistics.fmean(fixed[gamma]))
    ours = [speed(one, costs, policy, seeds) for one in told]
    ratios = [a / b for a, b in zip(ours, fixed[best], strict=True)]
    return Regret(
        kind,
        recipe,
        len(told),
        costs,
        best,
        statistics.fmean(fixed[best]),
        statistics.fmean(ours),
        statistics.median(ratios),
        interval(ratios),
    )


def study(recipe: Recipe, kinds: Sequence[str], pool: ModelPool, seeds: int) -> Iterator[Regret]:
    """The recipe's policy on the texts of every class. Raises `UserError` for what cannot be told from texts."""
    if METHODS[recipe.method].preflight != "distributions":
        names = [name for name, method in METHODS.items() if method.preflight == "distributions"]
        raise UserError(f"texts tell of the methods {', '.join(names)}, not of {recipe.method}: bench it")
    target, drafter, pipeline = load_comparable(recipe, pool)
    policy = pipeline.policy
    if policy.needs_logits:
        raise UserError(f"policy {recipe.policy} reads a law before every drafted token, also off the text: bench it")
    sampling = SamplingParams(recipe.temperature, recipe.top_k, recipe.top_p)
    for kind in kinds:
        texts = usable_texts(target, texts_for(recipe, [kind]), recipe.max_tokens, pipeline.context)
        priced = measure_costs(lambda: build_pipeline(recipe, target, drafter), texts, MAX_GAMMA)
        told = []
        for text, start in texts:
            pipeline = build_pipeline(recipe, target, drafter)
            first = prompt_cost(pipeline, (text, start), priced)
            p, q = (distributions(cache, text, sampling)[start - 1 : -1] for cache in pipeline.caches)
            x = torch.tensor(text[start:], device=p.device)[:, None]
            px, qx = p.gather(1, x)[: recipe.max_tokens, 0], q.gather(1, x)[: recipe.max_tokens, 0]
            chance = torch.where(px > 0, qx / px, 0.0).clamp(max=1)  # a text that was encoded anew may be none of p's
            beta = torch.minimum(p, q).sum(-1)[: len(chance)]
            told.append(RecordedAcceptance(tuple(chance.tolist()), tuple(beta.tolist()), first))
        yield regret(kind, recipe, told, CostModel(dict(enumerate(priced.v, 1)), priced.c), policy, seeds)


def markdown(found: Sequence[Regret]) -> str:
    """A row per class and recipe."""
    head = ["class", "recipe", "texts", "c", "v(4)", "best fixed gamma", "its speed-up"]
    head += ["speed-up", "over that gamma", "median text", "95 %"]
    rows = [
        [
            one.kind,
            recipe_label(one.recipe),
            str(one.texts),
            f"{one.costs.token:.2f}",
            f"{one.costs.verify(4):.2f}",
            str(one.best_gamma),
            f"{one.best:.2f}",
            f"{one.speed:.2f}",
            f"{one.ratio:.3f}",
            f"{one.median:.3f}",
            "{:.2f}-{:.2f}".format(*one.interval),
        ]
        for one in found
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def as_json(found: Sequence[Regret]) -> str:
    """All rows in one line."""
    rows: list[dict[str, Any]] = [{**asdict(one), "ratio": one.ratio} for one in found]
    return json.dumps({"regret": rows})


def run(options: argparse.Namespace) -> int:
    """Measure and print the table."""
    at_least_one("runs", options.runs)
    varying = ("method", "policy", "temperature")
    common = {name: value for name, value in given(options).items() if name not in varying} | {"top_p": 1.0}
    kinds = list(dict.fromkeys(prompt.kind for prompt in load_prompts(kinds=options.kind)))
    pool, found = ModelPool(), []
    for method in options.method:
        for policy in options.policy:
            for temperature in options.temperature:
                recipe = Recipe(**common, method=method, policy=policy, temperature=temperature)
                found += study(recipe, kinds, pool, options.runs)
    print(markdown(found))
    print(as_json(found))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run the benchmark."""
    parser = Parser(description="what a draft-length policy loses to the best fixed gamma, without a clock")
    add_model_options(parser)
    parser.add_argument("--method", nargs="+", default=["draft", "self"], help="one or more of draft, self")
    parser.add_argument("--policy", nargs="+", default=["auto"], help="one or more that read no laws of the drafter")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="of every text, where coins are thrown")
    return run_command(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
