"""Loss of a draft-length policy against the best fixed gamma: table `policy_regret` in docs/policies.md.

`python -m benchmarks.policy_regret --write`. Both models read recorded texts of the target once. Given that the text
continues with x, a draft of x was accepted with probability min(1, q(x) / p(x)): of all ways to obtain x, p(x),
min(p, q)(x) are accepted drafts (2211.17192, section 2.2). This defines the distribution of the steps of all runs with
this text, which are sampled with the same random numbers for every policy and replayed in the decoding loop at costs
measured once. The comparison is free of timing noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.tables import publish, run_study, study_parser
from specdemo.bench import recipe_label
from specdemo.cli.arguments import given
from specdemo.cli.commands import at_least_one
from specdemo.core.decode import DraftBudget, DraftLengthPolicy, decode
from specdemo.core.errors import UserError
from specdemo.core.metrics import interval
from specdemo.core.policies import CostModel, Fixed
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft, Step, Verdict
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import build_pipeline
from specdemo.preflight import (
    MAX_GAMMA,
    acceptance_of_text,
    distributions,
    load_comparable,
    measure_costs,
    prompt_cost,
    texts_for,
    usable_texts,
)
from specdemo.prompts import load_prompts
from specdemo.recipe import METHODS, Recipe

TABLES = {"policy_regret": "docs/policies.md"}
COLUMNS = {
    "class": "{kind}",
    "recipe": "{lane}",
    "c": "{c:.2f}",
    "v(4)": "{v4:.2f}",
    "best fixed gamma": "{best_gamma}",
    "its speed-up": "{best:.2f}",
    "speed-up": "{speed:.2f}",
    "median text": "{median:.3f} [{interval[0]:.2f}, {interval[1]:.2f}]",
}


@dataclass(frozen=True)
class RecordedAcceptance:
    """Acceptance probability and sum min(p, q) for each token of a text after its prompt."""

    chance: tuple[float, ...]
    beta: tuple[float, ...]
    prompt_cost: float = 0.0  # cost of reading the prompt with the drafter, in AR passes


class Replay:
    """Drafter, verifier and clock of a sampled run that ends in the recorded text."""

    def __init__(self, recorded: RecordedAcceptance, costs: CostModel, seed: int) -> None:
        rng = random.Random(seed)
        self._hits = [rng.random() < chance for chance in recorded.chance]
        self._beta, self._costs, self._prompt_cost, self.now = recorded.beta, costs, recorded.prompt_cost, 0.0

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """Draft token 1 for a hit and 0 for a miss; tokens after a miss are never tested."""
        position, count = len(tokens) - 1, 0
        while budget.may_extend(count, None):
            count += 1
        self.now += self._costs.token * count + self._prompt_cost
        self._prompt_cost = 0.0
        return Draft.chain(tuple(map(int, self._hits[position : position + count])))

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        """Accept the tokens before the first miss."""
        position, count = len(tokens) - 1, len(draft)
        accepted = (*draft.tokens, 0).index(0)
        tested = min(accepted + 1, count)
        self.now += self._costs.verify(count + 1)
        betas = (*self._beta[position : position + tested], *(None,) * (count - tested))
        draws = (*(0.5,) * tested, *(None,) * (count - tested))
        return Verdict(tuple(range(accepted)), 1, draw=draws, beta=betas)

    def observe(self, step: Step) -> None:
        """Required by the drafter protocol; the replay does not adapt."""

    def clock(self) -> float:
        """Return the replayed time in AR passes."""
        return self.now


def replay_speed(recorded: RecordedAcceptance, costs: CostModel, policy: DraftLengthPolicy, seeds: int) -> float:
    """Return tokens per AR pass after the first token, over runs with `seeds` seeds."""
    tokens, spent = 0, 0.0
    for seed in range(seeds):
        replay = Replay(recorded, costs, seed)
        limits = {"max_tokens": len(recorded.chance), "stop": (), "clock": replay.clock}
        for step in decode([1], replay, replay, deepcopy(policy), **limits):
            if step.i:
                tokens += len(step.tokens)
                spent += step.draft_s + step.verify_s
    return tokens / spent


@dataclass(frozen=True)
class Regret:
    """A policy on a class of texts; speeds are means over texts, relative to AR decoding."""

    kind: str
    recipe: Recipe
    texts: int
    costs: CostModel
    best_gamma: int  # fixed gamma with the best speed in hindsight; 0 is AR decoding
    best: float
    speed: float
    median: float  # over the texts, of the ratio to that gamma
    interval: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Speed of the policy relative to the best fixed gamma."""
        return self.speed / self.best

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        derived = {"lane": recipe_label(self.recipe), "c": self.costs.token, "v4": self.costs.verify(4)}
        return {**asdict(self), "ratio": self.ratio, **derived}


def regret(
    kind: str,
    recipe: Recipe,
    recorded: Sequence[RecordedAcceptance],
    costs: CostModel,
    policy: DraftLengthPolicy,
    seeds: int,
) -> Regret:
    """Compare `policy` with every fixed gamma on the same texts and seeds; greedy texts need a single seed."""
    seeds = seeds if recipe.temperature else 1
    fixed = [[replay_speed(text, costs, Fixed(gamma), seeds) for text in recorded] for gamma in range(MAX_GAMMA + 1)]
    best = max(range(len(fixed)), key=lambda gamma: statistics.fmean(fixed[gamma]))
    speeds = [replay_speed(text, costs, policy, seeds) for text in recorded]
    ratios = [a / b for a, b in zip(speeds, fixed[best], strict=True)]
    means = statistics.fmean(fixed[best]), statistics.fmean(speeds)
    return Regret(kind, recipe, len(recorded), costs, best, *means, statistics.median(ratios), interval(ratios))


def regrets(recipe: Recipe, kinds: Sequence[str], pool: ModelPool, seeds: int) -> Iterator[Regret]:
    """Yield the regret of the policy on each class. Raises `UserError` for unsupported methods and policies."""
    if METHODS[recipe.method].preflight != "distributions":
        names = ", ".join(name for name, method in METHODS.items() if method.preflight == "distributions")
        raise UserError(f"policy_regret supports the methods {names}, not {recipe.method}: bench it")
    target, drafter, pipeline = load_comparable(recipe, pool)
    policy = pipeline.policy
    if policy.needs_logits:
        raise UserError(f"policy {recipe.policy} needs the logits of every draft token, which texts lack: bench it")
    sampling = SamplingParams(recipe.temperature, recipe.top_k, recipe.top_p)
    for kind in kinds:
        texts, _ = usable_texts(recipe, target, texts_for(recipe, [kind]), pipeline.context)
        costs = measure_costs(lambda: build_pipeline(recipe, target, drafter), texts, MAX_GAMMA)
        recorded = []
        for text, start in texts:
            pipeline = build_pipeline(recipe, target, drafter)
            opening = prompt_cost(pipeline, (text, start), costs)
            vocab_size = pipeline.caches[0].vocab_size
            p, q = (distributions(cache, text, sampling, vocab_size)[start - 1 :] for cache in pipeline.caches)
            chance = acceptance_of_text(p, q, text[start - 1 :])
            beta = torch.minimum(p, q).sum(-1)[:-1].tolist()
            recorded.append(RecordedAcceptance(tuple(chance), tuple(beta), opening))
        yield regret(kind, recipe, recorded, CostModel(dict(enumerate(costs.v, 1)), costs.c), policy, seeds)


def study(options: argparse.Namespace) -> None:
    """Replay every combination of method, policy and temperature and publish the table."""
    at_least_one("runs", options.runs)
    varying = ("method", "policy", "temperature")
    common = {name: value for name, value in given(options).items() if name not in varying} | {"top_p": 1.0}
    kinds = list(dict.fromkeys(prompt.kind for prompt in load_prompts(kinds=options.kind)))
    pool, records = ModelPool(), []
    for method in options.method:
        for policy in options.policy:
            for temperature in options.temperature:
                recipe = Recipe(**common, method=method, policy=policy, temperature=temperature)
                records += [result.record() for result in regrets(recipe, kinds, pool, options.runs)]
    publish(options, "policy_regret", COLUMNS, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES, models=True)
    parser.add_argument("--method", nargs="+", default=["draft"], help="draft, self")
    parser.add_argument("--policy", nargs="+", default=["auto"], help="policies that need no logits")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--runs", type=int, default=20, metavar="N", help="sampled runs of each text above temperature 0"
    )
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
