"""The drafter of each method, made of a recipe's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specdemo.core.decode import Drafter, Plain
from specdemo.core.errors import Refused
from specdemo.core.sampling import Noise, Warp
from specdemo.drafters.hybrid import HybridDrafter
from specdemo.drafters.lookahead import LookaheadDrafter
from specdemo.drafters.lookup import LookupDrafter
from specdemo.drafters.model import ModelDrafter
from specdemo.drafters.ngram import NGramDrafter
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.drafters.tree import TreeDrafter
from specdemo.drafters.universal import UniversalDrafter
from specdemo.models.bridge import Bridge
from specdemo.models.cached import CachedModel
from specdemo.models.early import layer_count, with_layers
from specdemo.models.load import Loaded
from specdemo.recipe import Recipe
from specdemo.remote.connect import Distant

Stores = dict[Any, Any]  # what a user's earlier runs taught, by what it was learnt from


@dataclass(frozen=True)
class Kit:
    """What a drafter may be made of."""

    recipe: Recipe
    target: Loaded | Distant
    drafter: Loaded | None
    stores: Stores | None
    prompt: str  # for an encoder to read; n-grams may draft from it too
    bridge: Bridge | None  # to a drafter of another vocabulary
    draws: Callable[..., Drafter]  # `draws(cache, kind, **options)`: a drafter of this kind on this model's law

    @property
    def source(self) -> list[int]:
        """What the target's encoder reads; nothing if it has none."""
        return source_of(self.target, self.prompt)

    def kept(self, make: Callable[[Any], Any], *key: Any) -> Any:
        """A drafter with the store of earlier runs, if those are to be kept; its own store is kept then."""
        if self.stores is None or not self.recipe.ngram_keep:
            return make(None)
        key = (self.recipe.method, self.recipe.target_spec.name, *key)
        made = make(self.stores.get(key))
        self.stores[key] = made.store
        return made


Made = tuple[Drafter, tuple[CachedModel, ...]]  # a drafter, and the caches that it brings


def cache_of(recipe: Recipe, stores: Stores | None, loaded: Loaded, prompt: str, pad: int = 1) -> CachedModel:
    """A model with its keys and values; in a conversation, those of the turns before, so that only news are read."""
    if not recipe.chat or stores is None or loaded.encoder:  # an encoder reads all of it anew
        return CachedModel(loaded.model, pad, source_of(loaded, prompt))
    key = ("keys and values", loaded.spec, recipe.method)  # lanes that are compared share nothing
    kept = stores.get(key)
    if kept is None or kept.model is not loaded.model:
        kept = stores[key] = CachedModel(loaded.model, pad)
    return kept


def warp_of(recipe: Recipe, loaded: Loaded | Distant) -> Warp:
    """What the recipe does to a model's logits; words are banned in the tokens of that model."""
    words = tuple(tuple(loaded.tokenizer.encode(word, add_special_tokens=False)) for word in recipe.bad_words)
    return Warp(recipe.temperature, recipe.top_k, recipe.top_p, recipe.repetition_penalty, words)


def source_of(loaded: Loaded, prompt: str) -> list[int]:
    """The prompt in the tokens of a model whose encoder reads it; without an encoder there is nothing apart to read."""
    return loaded.tokenizer.encode(prompt) if loaded.encoder else []


def _plain(kit: Kit) -> Made:
    return Plain(), ()


def _model(kit: Kit, kind: type = ModelDrafter, **options: int) -> Made:
    assert kit.drafter is not None
    cache = cache_of(kit.recipe, kit.stores, kit.drafter, kit.prompt)
    if kit.bridge is None:
        return kit.draws(cache, kind, **options), (cache,)
    if kind is not ModelDrafter:
        raise Refused(
            "the branches of a tree cannot be put into the tokens of another vocabulary: choose method draft or hybrid"
        )
    # Judged as point masses, the likeliest continuation is accepted more often than one that was drawn.
    warp, noise = replace(warp_of(kit.recipe, kit.drafter), temperature=0), Noise(kit.recipe.seed, "draft")
    inner = ModelDrafter(cache.score, warp, noise, cache.vocab_size, extend=cache.extend)
    return UniversalDrafter(inner, kit.bridge.read, kit.bridge.write, cache.context), (cache,)


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
    return kit.kept(lambda store: NGramDrafter(order, levels, filler, store, kit.source), order, levels), ()


def _suffix(kit: Kit) -> Made:
    return kit.kept(lambda store: SuffixDrafter(store=store, source=kit.source)), ()


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
