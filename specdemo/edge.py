"""The place where a recipe's names become objects when the target is at the other end of a wire."""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from specdemo.core.decode import Gamma
from specdemo.core.rules import RULES, rejection
from specdemo.core.sampling import Noise, Warp
from specdemo.core.step import Draft
from specdemo.core.target import Target
from specdemo.drafters.model import fitted
from specdemo.models.cached import CachedModel
from specdemo.models.dropout import with_dropout
from specdemo.recipe import Recipe
from specdemo.remote.connect import Distant, judge_at
from specdemo.remote.gates import Always, Asked, Gated, Gauge, document_frequency, mc_dropout
from specdemo.remote.wire import Sampling

PASSES = 4  # of the drafter under dropout
BEFORE = 8  # tokens of context in which a draft is spelt out


def judged(
    recipe: Recipe, target: Distant, warp: Warp, gamma: Gamma, caches: Sequence[CachedModel]
) -> tuple[Asked, Gamma]:
    """The judge that asks the cloud, behind a gate if there is one, and the policy that the gate listens to."""
    cloud = target.cloud
    rule = RULES[recipe.rule]
    settings = Sampling(
        temp=float(warp.temperature),
        top_k=warp.top_k,
        top_p=float(warp.top_p),
        rep_penalty=float(warp.repetition_penalty),
        bad_words=[list(word) for word in warp.bad_words],
        seed=recipe.seed,
        rule=recipe.rule,
        threshold=rule.threshold if recipe.threshold is None else recipe.threshold,
        adjust=not recipe.skip_sample_adjustment,
    )
    vocab_size = target.about.vocab_size
    edge = None
    if cloud.on_loss == "edge" and caches:

        def score(tokens: Sequence[int], draft: Draft) -> Tensor:
            return fitted(caches[0].score(tokens, draft), vocab_size)

        noise = Noise(recipe.seed, "edge")
        edge = Target(score, warp, rejection, Noise(recipe.seed, "edge accept"), noise, recipe.candidates, recipe.top)
    judge = judge_at(
        target,
        settings,
        plain=cloud.mode == "cloud_only",
        max_tokens=recipe.max_tokens,
        edge=edge,
        candidates=recipe.candidates,
        top=recipe.top,
    )
    if not cloud.gates:
        return judge, gamma
    gauge = Gauge(gamma)
    variance = None
    if "variance" in cloud.gates:
        variance = mc_dropout([CachedModel(with_dropout(caches[0].model, seed)).score for seed in range(PASSES)])
    gate = Gated(
        judge,
        gauge,
        cloud.thresholds,
        cloud.gate_ratio,
        always=spelt(target, cloud.always) if cloud.always else None,
        variance=variance,
    )
    return gate, gauge


def spelt(target: Distant, rules: Sequence[str]) -> Callable[[Sequence[int], Draft], bool]:
    """The rules that look at words, for tokens."""
    always = Always(rules, _library() if "rare" in rules else None)

    def asks(tokens: Sequence[int], draft: Draft) -> bool:
        before = target.tokenizer.decode(tokens[-BEFORE:])
        return always(target.tokenizer.decode([*tokens[-BEFORE:], *draft.tokens])[len(before) :])

    return asks


@cache
def _library() -> Counter[str]:
    """In how many files of Python's own library each word stands: what the bundled pair knows."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return document_frequency(path.read_text("utf-8", errors="replace") for path in files)
