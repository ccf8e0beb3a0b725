"""All choices of one run in a frozen dataclass, and the place where names become objects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specdemo.core.decode import Drafter, Gamma, Judge, Plain
from specdemo.core.errors import Refused
from specdemo.core.gamma import POLICIES
from specdemo.core.rules import RULES, Target
from specdemo.core.sampling import Certain, Noise, Shared, Warp
from specdemo.drafters.model import ModelDrafter
from specdemo.drafters.ngram import NGramDrafter, NGramStore
from specdemo.models.cached import CachedModel
from specdemo.models.load import DTYPES, QUANTIZATIONS, Loaded, Spec
from specdemo.models.pairs import PAIRS, check_pair

METHODS = {
    "draft": "a smaller model drafts, the target verifies",
    "nasd": "n-grams of the prompt and the output draft (NASD; NAPD with filler top-k 1)",
    "ar": "plain autoregressive decoding: the baseline",
}
NGRAM_LEVELS = {"multi": "back off to shorter contexts", "one": "contexts of one length only"}


def known(kind: str, name: str, names: Any) -> None:
    """Refuse a name that is not among `names`."""
    if name not in names:
        raise Refused(f"unknown {kind} {name!r}: known are {', '.join(names)}")


@dataclass(frozen=True)
class Recipe:
    """What to run. Construction refuses what cannot be meant."""

    pair: str | None = None  # with neither pair nor models, the bundled one
    target: str | None = None
    drafter: str | None = None
    method: str = "draft"
    gamma: int = 4
    policy: str = "fixed"
    gamma_min: int | None = None  # a policy's bounds; None: its own
    gamma_max: int | None = None
    rule: str = "rejection"
    temperature: float = 0.5  # with top-p, where the bundled pair writes best
    top_k: int = 0
    top_p: float = 0.95
    repetition_penalty: float = 1.0
    bad_words: tuple[str, ...] = ()
    seed: int = 0
    max_tokens: int = 256
    dtype: str = "auto"
    quantization: str = "none"
    drafter_quantization: str = "none"
    device: str = "auto"
    ngram: int = 4
    ngram_levels: str = "multi"
    filler_top_k: int = 3
    ngram_keep: bool = False
    threshold: float | None = None  # of a rule that has one; None: its usual one
    skip_sample_adjustment: bool = False  # draw corrections from p: lossy

    def __post_init__(self) -> None:
        if self.pair and (self.target or self.drafter):
            raise Refused("give either a pair or a target and a drafter, not both")
        if self.drafter and not self.target:
            raise Refused("a drafter needs a target: give both")
        if self.pair:
            known("pair", self.pair, PAIRS)
        known("method", self.method, METHODS)
        known("policy", self.policy, POLICIES)
        known("rule", self.rule, RULES)
        known("dtype", self.dtype, DTYPES)
        known("quantization", self.quantization, QUANTIZATIONS)
        known("quantization", self.drafter_quantization, QUANTIZATIONS)
        known("n-gram storage", self.ngram_levels, NGRAM_LEVELS)
        for name, least, most in (
            ("gamma", 1, 64),
            ("gamma_min", 0, 64),
            ("gamma_max", 1, 64),
            ("max_tokens", 1, 1 << 20),
            ("temperature", 0, 100),
            ("top_k", 0, 1 << 20),
            ("ngram", 2, 16),
            ("filler_top_k", 1, 64),
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and least <= value <= most):
                raise Refused(f"{name} must be from {least} to {most}, not {value}{self._way_out(name)}")
        if self.gamma_bounds[0] > self.gamma_bounds[1]:
            raise Refused("gamma_min {} is above gamma_max {}: exchange them".format(*self.gamma_bounds))
        if not 0 < self.top_p <= 1:
            raise Refused(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise Refused(f"repetition_penalty must be above 0 (1 is none), not {self.repetition_penalty}")
        if self.method == "draft" and self.models[1] is None:
            raise Refused("method draft needs a drafter: give one, or choose method nasd or ar")
        if self.threshold is not None:
            if RULES[self.rule].threshold is None:
                having = ", ".join(name for name, rule in RULES.items() if rule.threshold is not None)
                raise Refused(f"rule {self.rule} has no threshold: rules that have one are {having}")
            if not 0 < self.threshold <= 1:
                raise Refused(f"threshold must be above 0 and at most 1, not {self.threshold}")
        if self.skip_sample_adjustment and not RULES[self.rule].adjusts:
            raise Refused(f"rule {self.rule} has no sample adjustment to skip: choose rule rejection")

    @staticmethod
    def _way_out(name: str) -> str:
        return {"gamma": " (method ar decodes without drafts)", "temperature": " (0 is greedy)"}.get(name, "")

    @property
    def gamma_bounds(self) -> tuple[int, int]:
        """The shortest and the longest draft of a policy that varies gamma."""
        own = POLICIES[self.policy]
        return (
            own.least if self.gamma_min is None else self.gamma_min,
            own.most if self.gamma_max is None else self.gamma_max,
        )

    @property
    def models(self) -> tuple[str, str | None]:
        """Names of target and drafter."""
        if self.target:
            return self.target, self.drafter
        pair = PAIRS[self.pair or "bundled"]
        return pair.target, pair.drafter

    @property
    def target_spec(self) -> Spec:
        """How to load the target."""
        return Spec(self.models[0], self.dtype, self.quantization, self.device)

    @property
    def drafter_spec(self) -> Spec | None:
        """How to load the drafter; None where the method needs none."""
        name = self.models[1]
        if self.method != "draft" or name is None:
            return None
        return Spec(name, self.dtype, self.drafter_quantization, self.device)

    @property
    def exact(self) -> bool:
        """Whether the text keeps the target's own law."""
        if self.method == "ar":
            return True
        corrected = not self.skip_sample_adjustment or self.temperature == 0
        return RULES[self.rule].exact(Warp(temperature=self.temperature)) and corrected


@dataclass(frozen=True)
class Parts:
    """A recipe's objects: what the loop needs, and the caches, to be measured."""

    judge: Judge
    drafter: Drafter
    gamma: Gamma
    caches: tuple[CachedModel, ...] = field(default=())

    @property
    def context(self) -> int:
        """Tokens that every model of this run can hold."""
        return min(cache.context for cache in self.caches)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values held now."""
        return sum(cache.kv_bytes for cache in self.caches)


def build(recipe: Recipe, target: Loaded, drafter: Loaded | None, stores: dict[Any, NGramStore] | None = None) -> Parts:
    """Turn names into objects. `stores` holds the n-grams of a user's earlier runs, if they are to be kept."""
    words = tuple(tuple(target.tokenizer.encode(word, add_special_tokens=False)) for word in recipe.bad_words)
    warp = Warp(recipe.temperature, recipe.top_k, recipe.top_p, recipe.repetition_penalty, words)
    ours = CachedModel(target.model, target.parity.pad)
    kind = RULES[recipe.rule]
    rule = kind.apply
    if recipe.skip_sample_adjustment:
        rule = partial(rule, adjust=False)
    if kind.threshold is not None:
        rule = partial(rule, threshold=kind.threshold if recipe.threshold is None else recipe.threshold)
    shared = Shared(recipe.seed) if kind.shares_noise else None
    judge = Target(
        ours.score,
        warp,
        rule,
        accept=Noise(recipe.seed, "accept"),
        correct=shared or (Noise if recipe.temperature else Certain)(recipe.seed, "correct"),
        candidates=recipe.filler_top_k if recipe.method == "nasd" else 1,
    )
    gamma = POLICIES[recipe.policy].make(recipe.gamma, *recipe.gamma_bounds)
    if recipe.method == "ar":
        return Parts(judge, Plain(), gamma, (ours,))
    if recipe.method == "nasd":
        key = (recipe.target_spec.name, recipe.ngram, recipe.ngram_levels)
        store = stores.get(key) if stores is not None and recipe.ngram_keep else None
        ngrams = NGramDrafter(recipe.ngram, recipe.ngram_levels, recipe.filler_top_k, store)
        if stores is not None and recipe.ngram_keep:
            stores[key] = ngrams.store
        return Parts(judge, ngrams, gamma, (ours,))
    assert drafter is not None
    check_pair(target.tokenizer, drafter.tokenizer)
    theirs = CachedModel(drafter.model)
    return Parts(
        judge,
        ModelDrafter(theirs.score, warp, shared or Noise(recipe.seed, "draft"), ours.vocab_size, theirs.vocab_size),
        gamma,
        (ours, theirs),
    )
