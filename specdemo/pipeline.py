"""The place where a recipe's names become objects."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdemo.core.beam import BeamSearch
from specdemo.core.decode import Drafter, Gamma, Judge, Plain
from specdemo.core.errors import Refused
from specdemo.core.policies import POLICIES, Fixed, Prices
from specdemo.core.rules import RULES, rejection
from specdemo.core.sampling import Noise, Shared, Warp
from specdemo.core.step import Draft
from specdemo.core.verifier import Target
from specdemo.drafters.hybrid import HybridDrafter
from specdemo.drafters.lookahead import LookaheadDrafter
from specdemo.drafters.lookup import LookupDrafter
from specdemo.drafters.model import ModelDrafter, fitted
from specdemo.drafters.ngram import NGramDrafter
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.drafters.tree import TreeDrafter
from specdemo.drafters.universal import UniversalDrafter
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import Loaded
from specdemo.models.model_variants import layer_count, with_dropout, with_layers
from specdemo.models.vocabulary_bridge import Bridge
from specdemo.models.zoo import check_pair
from specdemo.recipe import Recipe, refuse_with_encoder
from specdemo.remote.gates import Always, Asked, Gated, Gauge, document_frequency, mc_dropout
from specdemo.remote.protocol import Sampling
from specdemo.remote.remote_model import Distant, judge_at


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
