"""The place where a recipe's names become objects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specdemo.core.auto import Prices
from specdemo.core.beam import BeamSearch
from specdemo.core.decode import Drafter, Gamma, Judge
from specdemo.core.errors import Refused
from specdemo.core.gamma import POLICIES, Fixed
from specdemo.core.rules import RULES
from specdemo.core.sampling import Noise, Shared, Warp
from specdemo.core.target import Target
from specdemo.drafters.model import ModelDrafter
from specdemo.edge import judged
from specdemo.methods import DRAFTERS, Kit, Stores, cache_of, warp_of
from specdemo.models.bridge import Bridge
from specdemo.models.cached import CachedModel
from specdemo.models.load import Loaded
from specdemo.models.pairs import check_pair
from specdemo.recipe import Recipe, refuse_with_encoder
from specdemo.remote.connect import Distant


@dataclass(frozen=True)
class Parts:
    """A recipe's objects: what the loop needs, and the caches, to be measured."""

    judge: Judge
    drafter: Drafter
    gamma: Gamma
    caches: tuple[CachedModel, ...]
    context: int  # tokens of a text that every model of this run can hold
    hang_up: Callable[[], None] | None = None

    def close(self) -> None:
        """Hang up, where the judge is at the other end of a wire."""
        if self.hang_up is not None:
            self.hang_up()

    @property
    def device(self) -> torch.device:
        """Where this end computes."""
        return self.caches[0].model.device if self.caches else torch.device("cpu")

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values held now."""
        return sum(cache.kv_bytes for cache in self.caches)


def _bridge(recipe: Recipe, target: Loaded | Distant, drafter: Loaded | None) -> Bridge | None:
    """Between two vocabularies, where there are two. Raises `Refused` unless the recipe allows that."""
    if drafter is None:
        return None
    try:
        check_pair(target.tokenizer, drafter.tokenizer)
    except Refused:
        if not recipe.universal:
            raise
        return Bridge(target.tokenizer, drafter.tokenizer, drafter.opening)
    return None


def build(
    recipe: Recipe,
    target: Loaded | Distant,
    drafter: Loaded | None,
    stores: Stores | None = None,
    prompt: str = "",
) -> Parts:
    """Turn names into objects. `stores` holds what a user's earlier runs taught, if that is to be kept.

    Encoders read the `prompt`. Raises `Refused` for models or a method that do not go together.
    """
    if drafter is not None and target.encoder != drafter.encoder:
        role = "target" if target.encoder else "drafter"
        raise Refused(f"the {role} has an encoder and the other model has none: choose two of one kind")
    if target.encoder:
        refuse_with_encoder(recipe.method)
    warp = warp_of(recipe, target)
    shared = Shared(recipe.seed) if RULES[recipe.rule].shares_noise else None
    ours = () if isinstance(target, Distant) else (cache_of(recipe, stores, target, prompt, target.parity.pad),)
    vocab_size = target.about.vocab_size if isinstance(target, Distant) else ours[0].vocab_size

    def draws(cache: CachedModel, kind: type, **options: Any) -> Drafter:
        noise = shared or Noise(recipe.seed, "draft")
        if kind is ModelDrafter:
            options["extend"] = cache.extend
        return kind(cache.score, warp, noise, vocab_size, cache.vocab_size, **options)

    kit = Kit(recipe, target, drafter, stores, prompt, _bridge(recipe, target, drafter), draws)
    made, caches = DRAFTERS[recipe.method](kit)
    if recipe.method == "lookahead":  # as deep as its window reaches, whatever the policy
        gamma: Gamma = Fixed(recipe.lookahead_window + recipe.lookahead_n)
    else:
        gamma = POLICIES[recipe.policy].make(recipe.gamma, *recipe.gamma_bounds, _prices(target, ours, caches))
    counted = (*ours, *(() if kit.bridge else caches))  # a drafter of another vocabulary counts its own tokens
    context = min([cache.context for cache in counted] + [sys.maxsize])
    if isinstance(target, Distant):
        asking, gamma = judged(recipe, target, warp, gamma, caches)
        return Parts(asking, made, gamma, caches, min(context, target.about.context), asking.close)
    judge = _judge(recipe, target, ours[0], warp, shared)
    return Parts(judge, made, gamma, (*ours, *caches), context)


def _prices(target: Loaded | Distant, ours: Sequence[CachedModel], caches: Sequence[CachedModel]) -> Prices:
    """What is known of costs before anything has run; nothing of a target that is elsewhere."""
    if isinstance(target, Distant):
        return Prices()
    return Prices(target.parity.cost, sum(cache.weight_bytes for cache in caches) / ours[0].weight_bytes)


def _judge(recipe: Recipe, target: Loaded, ours: CachedModel, warp: Warp, shared: Shared | None) -> Judge:
    """The target at hand."""
    if recipe.method == "beam":
        return BeamSearch(
            ours.score,
            warp,
            target.stop,
            max_tokens=recipe.max_tokens,
            context=ours.context,
            num_beams=recipe.num_beams,
            length_penalty=recipe.length_penalty,
            top_k=recipe.top_k,
            min_length=recipe.min_length,
        )
    kind = RULES[recipe.rule]
    rule = kind.apply
    if recipe.skip_sample_adjustment:
        rule = partial(rule, adjust=False)
    if kind.threshold is not None:
        rule = partial(rule, threshold=kind.threshold if recipe.threshold is None else recipe.threshold)
    return Target(
        ours.score,
        warp,
        rule,
        accept=Noise(recipe.seed, "accept"),
        correct=shared or Noise(recipe.seed, "correct"),
        candidates=recipe.candidates,
        top=recipe.top,
    )
