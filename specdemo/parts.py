"""The place where a recipe's names become objects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specdemo.core.beam import BeamSearch
from specdemo.core.decode import Drafter, Gamma, Judge, Plain
from specdemo.core.gamma import POLICIES, Fixed
from specdemo.core.rules import RULES, Target
from specdemo.core.sampling import Certain, Noise, Shared, Warp
from specdemo.drafters.hybrid import HybridDrafter
from specdemo.drafters.lookahead import LookaheadDrafter
from specdemo.drafters.lookup import LookupDrafter
from specdemo.drafters.model import ModelDrafter
from specdemo.drafters.ngram import NGramDrafter
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.drafters.tree import TreeDrafter
from specdemo.edge import judged
from specdemo.models.cached import CachedModel
from specdemo.models.early import layer_count, with_layers
from specdemo.models.load import Loaded
from specdemo.models.pairs import check_pair
from specdemo.recipe import Recipe
from specdemo.remote.connect import Distant

Stores = dict[Any, Any]  # what a user's earlier runs taught, by what it was learnt from


@dataclass(frozen=True)
class Parts:
    """A recipe's objects: what the loop needs, and the caches, to be measured."""

    judge: Judge
    drafter: Drafter
    gamma: Gamma
    caches: tuple[CachedModel, ...]
    context: int  # tokens that every model of this run can hold
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


@dataclass(frozen=True)
class Kit:
    """What a drafter may be made of."""

    recipe: Recipe
    target: Loaded | Distant
    drafter: Loaded | None
    stores: Stores | None
    draws: Callable[..., Drafter]  # `draws(cache, kind, **options)`: a drafter of this kind on this model's law

    def kept(self, make: Callable[[Any], Any], *key: Any) -> Any:
        """A drafter with the store of earlier runs, if those are to be kept; its own store is kept then."""
        if self.stores is None or not self.recipe.ngram_keep:
            return make(None)
        key = (self.recipe.method, self.recipe.target_spec.name, *key)
        made = make(self.stores.get(key))
        self.stores[key] = made.store
        return made


Made = tuple[Drafter, tuple[CachedModel, ...]]  # a drafter, and the caches that it brings


def _plain(kit: Kit) -> Made:
    return Plain(), ()


def _model(kit: Kit, kind: type = ModelDrafter, **options: int) -> Made:
    assert kit.drafter is not None
    check_pair(kit.target.tokenizer, kit.drafter.tokenizer)
    cache = CachedModel(kit.drafter.model)
    return kit.draws(cache, kind, **options), (cache,)


def _self(kit: Kit) -> Made:
    assert isinstance(kit.target, Loaded)
    model, recipe = kit.target.model, kit.recipe
    count = layer_count(model)
    first = count // 2 if recipe.exit_layer is None else recipe.exit_layer
    kept = [i for i in range(count) if i not in recipe.skip_layers] if recipe.skip_layers else list(range(first))
    cache = CachedModel(with_layers(model, kept))
    return kit.draws(cache, ModelDrafter), (cache,)


def _ngrams(kit: Kit) -> Made:
    order, levels, filler = kit.recipe.ngram, kit.recipe.ngram_levels, kit.recipe.filler_top_k
    return kit.kept(lambda store: NGramDrafter(order, levels, filler, store), order, levels), ()


def _suffix(kit: Kit) -> Made:
    return kit.kept(lambda store: SuffixDrafter(store=store)), ()


def _tree(kit: Kit) -> Made:
    return _model(kit, TreeDrafter, nodes=kit.recipe.tree_nodes, width=kit.recipe.tree_width)


def _hybrid(kit: Kit) -> Made:
    model, caches = _model(kit)
    return HybridDrafter(_suffix(kit)[0], model), caches


def _lookahead(kit: Kit) -> Made:
    recipe = kit.recipe
    return LookaheadDrafter(recipe.lookahead_window, recipe.lookahead_n, recipe.lookahead_guesses, recipe.seed), ()


def _lookup(kit: Kit) -> Made:
    return LookupDrafter(), ()


DRAFTERS: dict[str, Callable[[Kit], Made]] = {
    "ar": _plain,
    "beam": _plain,
    "draft": _model,
    "tree": _tree,
    "self": _self,
    "nasd": _ngrams,
    "suffix": _suffix,
    "hybrid": _hybrid,
    "lookahead": _lookahead,
    "lookup": _lookup,
}


def build(recipe: Recipe, target: Loaded | Distant, drafter: Loaded | None, stores: Stores | None = None) -> Parts:
    """Turn names into objects. `stores` holds what a user's earlier runs taught, if that is to be kept."""
    words = tuple(tuple(target.tokenizer.encode(word, add_special_tokens=False)) for word in recipe.bad_words)
    warp = Warp(recipe.temperature, recipe.top_k, recipe.top_p, recipe.repetition_penalty, words)
    shared = Shared(recipe.seed) if RULES[recipe.rule].shares_noise else None
    ours = () if isinstance(target, Distant) else (CachedModel(target.model, target.parity.pad),)
    vocab_size = target.about.vocab_size if isinstance(target, Distant) else ours[0].vocab_size

    def draws(cache: CachedModel, kind: type, **options: Any) -> Drafter:
        noise = shared or Noise(recipe.seed, "draft")
        if kind is ModelDrafter:
            options["extend"] = cache.extend
        return kind(cache.score, warp, noise, vocab_size, cache.vocab_size, **options)

    made, caches = DRAFTERS[recipe.method](Kit(recipe, target, drafter, stores, draws))
    if recipe.method == "lookahead":  # as deep as its window reaches, whatever the policy
        gamma: Gamma = Fixed(recipe.lookahead_window + recipe.lookahead_n)
    else:
        gamma = POLICIES[recipe.policy].make(recipe.gamma, *recipe.gamma_bounds)
    context = min([cache.context for cache in (*ours, *caches)] + [sys.maxsize])
    if isinstance(target, Distant):
        asking, gamma = judged(recipe, target, warp, gamma, caches)
        return Parts(asking, made, gamma, caches, min(context, target.about.context), asking.close)
    judge = _judge(recipe, target, ours[0], warp, shared)
    return Parts(judge, made, gamma, (*ours, *caches), context)


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
        correct=shared or (Noise if recipe.temperature else Certain)(recipe.seed, "correct"),
        candidates=recipe.candidates,
        top=recipe.top,
    )
