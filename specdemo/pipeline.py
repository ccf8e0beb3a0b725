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
from specdemo.core.decode import Drafter, DraftLengthPolicy, EmptyDrafter, Verifier
from specdemo.core.errors import UserError
from specdemo.core.policies import POLICIES, CostModel, Fixed
from specdemo.core.rules import RULES, rejection
from specdemo.core.sampling import Noise, SamplingParams, SharedNoise
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.hybrid import HybridDrafter
from specdemo.drafters.lookahead import LookaheadDrafter
from specdemo.drafters.lookup import LookupDrafter
from specdemo.drafters.model import ModelDrafter, fitted
from specdemo.drafters.ngram import NGramDrafter
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.drafters.tree import TreeDrafter
from specdemo.drafters.universal import UniversalDrafter
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_variants import layer_count, with_dropout, with_layers
from specdemo.models.vocabulary_bridge import Bridge
from specdemo.models.zoo import check_pair
from specdemo.recipe import Recipe, refuse_with_encoder
from specdemo.remote.gates import (
    AlwaysVerify,
    ClosableVerifier,
    GatedVerifier,
    RecordingPolicy,
    document_frequency,
    mc_dropout,
)
from specdemo.remote.protocol import VerifyConfig
from specdemo.remote.remote_model import RemoteModel, remote_verifier


@dataclass(frozen=True)
class Pipeline:
    """A recipe's objects: what the loop needs, and the caches, to be measured."""

    verifier: Verifier
    drafter: Drafter
    policy: DraftLengthPolicy
    caches: tuple[CachedModel, ...]
    context: int  # tokens of a text that every model of this run can hold
    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        """Hang up, where the judge is at the other end of a wire."""
        if self.on_close is not None:
            self.on_close()

    @property
    def device(self) -> torch.device:
        """Where this end computes."""
        return self.caches[0].model.device if self.caches else torch.device("cpu")

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values held now."""
        return sum(cache.kv_bytes for cache in self.caches)


def _bridge(recipe: Recipe, target: LoadedModel | RemoteModel, drafter: LoadedModel | None) -> Bridge | None:
    """Between two vocabularies, where there are two. Raises `UserError` unless the recipe allows that."""
    if drafter is None:
        return None
    try:
        check_pair(target.tokenizer, drafter.tokenizer)
    except UserError:
        if not recipe.universal:
            raise
        return Bridge(target.tokenizer, drafter.tokenizer, drafter.opening)
    return None


def build_pipeline(
    recipe: Recipe,
    target: LoadedModel | RemoteModel,
    drafter: LoadedModel | None,
    stores: Stores | None = None,
    prompt: str = "",
) -> Pipeline:
    """Turn names into objects. `stores` holds what a user's earlier runs taught, if that is to be kept.

    Encoders read the `prompt`. Raises `UserError` for models or a method that do not go together.
    """
    if drafter is not None and target.encoder != drafter.encoder:
        role = "target" if target.encoder else "drafter"
        raise UserError(f"the {role} has an encoder and the other model has none: choose two of one kind")
    if target.encoder:
        refuse_with_encoder(recipe.method)
    sampling = sampling_params_of(recipe, target)
    shared = SharedNoise(recipe.seed) if RULES[recipe.rule].shares_noise else None
    ours = () if isinstance(target, RemoteModel) else (cache_of(recipe, stores, target, prompt, target.invariance.pad),)
    vocab_size = target.info.vocab_size if isinstance(target, RemoteModel) else ours[0].vocab_size

    def draws(cache: CachedModel, kind: type, **options: Any) -> Drafter:
        noise = shared or Noise(recipe.seed, "draft")
        if kind is ModelDrafter:
            options["extend"] = cache.extend
        return kind(cache.score, sampling, noise, vocab_size, cache.vocab_size, **options)

    context = BuildContext(recipe, target, drafter, stores, prompt, _bridge(recipe, target, drafter), draws)
    made, caches = DRAFTERS[recipe.method](context)
    if recipe.method == "lookahead":  # as deep as its window reaches, whatever the policy
        gamma: DraftLengthPolicy = Fixed(recipe.lookahead_window + recipe.lookahead_n)
    else:
        gamma = POLICIES[recipe.policy].make(recipe.gamma, *recipe.gamma_bounds, _cost_model(target, ours, caches))
    counted = (*ours, *(() if context.bridge else caches))  # a drafter of another vocabulary counts its own tokens
    context_length = min([cache.context for cache in counted] + [sys.maxsize])
    if isinstance(target, RemoteModel):
        asking, gamma = build_remote_verifier(recipe, target, sampling, gamma, caches)
        return Pipeline(asking, made, gamma, caches, min(context_length, target.info.context), asking.close)
    verifier = _verifier(recipe, target, ours[0], sampling, shared)
    return Pipeline(verifier, made, gamma, (*ours, *caches), context_length)


def _cost_model(
    target: LoadedModel | RemoteModel, ours: Sequence[CachedModel], caches: Sequence[CachedModel]
) -> CostModel:
    """What is known of costs before anything has run; nothing of a target that is elsewhere."""
    if isinstance(target, RemoteModel):
        return CostModel()
    return CostModel(target.invariance.cost, sum(cache.weight_bytes for cache in caches) / ours[0].weight_bytes)


def _verifier(
    recipe: Recipe, target: LoadedModel, ours: CachedModel, sampling: SamplingParams, shared: SharedNoise | None
) -> Verifier:
    """The target at hand."""
    if recipe.method == "beam":
        return BeamSearch(
            ours.score,
            sampling,
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
    return ModelVerifier(
        ours.score,
        sampling,
        rule,
        accept=Noise(recipe.seed, "accept"),
        correct=shared or Noise(recipe.seed, "correct"),
        candidates=recipe.candidates,
        top=recipe.top,
    )


PASSES = 4  # of the drafter under dropout
BEFORE = 8  # tokens of context in which a draft is spelt out


def build_remote_verifier(
    recipe: Recipe,
    target: RemoteModel,
    sampling: SamplingParams,
    gamma: DraftLengthPolicy,
    caches: Sequence[CachedModel],
) -> tuple[ClosableVerifier, DraftLengthPolicy]:
    """The judge that asks the cloud, behind a gate if there is one, and the policy that the gate listens to."""
    cloud = target.cloud
    rule = RULES[recipe.rule]
    settings = VerifyConfig(
        temp=float(sampling.temperature),
        top_k=sampling.top_k,
        top_p=float(sampling.top_p),
        rep_penalty=float(sampling.repetition_penalty),
        bad_words=[list(word) for word in sampling.bad_words],
        seed=recipe.seed,
        rule=recipe.rule,
        threshold=rule.threshold if recipe.threshold is None else recipe.threshold,
        adjust=not recipe.skip_sample_adjustment,
    )
    vocab_size = target.info.vocab_size
    edge = None
    if cloud.on_loss == "edge" and caches:

        def score(tokens: Sequence[int], draft: Draft) -> Tensor:
            return fitted(caches[0].score(tokens, draft), vocab_size)

        noise = Noise(recipe.seed, "edge")
        edge = ModelVerifier(
            score, sampling, rejection, Noise(recipe.seed, "edge accept"), noise, recipe.candidates, recipe.top
        )
    verifier = remote_verifier(
        target,
        settings,
        max_tokens=recipe.max_tokens,
        edge=edge,
        candidates=recipe.candidates,
        top=recipe.top,
    )
    if not cloud.gates:
        return verifier, gamma
    gauge = RecordingPolicy(gamma)
    variance = None
    if "variance" in cloud.gates:
        variance = mc_dropout([CachedModel(with_dropout(caches[0].model, seed)).score for seed in range(PASSES)])
    gate = GatedVerifier(
        verifier,
        gauge,
        cloud.thresholds,
        cloud.gate_ratio,
        always=word_rules(target, cloud.always) if cloud.always else None,
        variance=variance,
    )
    return gate, gauge


def word_rules(target: RemoteModel, rules: Sequence[str]) -> Callable[[Sequence[int], Draft], bool]:
    """The rules that look at words, for tokens."""
    always = AlwaysVerify(rules, _library() if "rare" in rules else None)

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
class BuildContext:
    """What a drafter may be made of."""

    recipe: Recipe
    target: LoadedModel | RemoteModel
    drafter: LoadedModel | None
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


def cache_of(recipe: Recipe, stores: Stores | None, loaded: LoadedModel, prompt: str, pad: int = 1) -> CachedModel:
    """A model with its keys and values; in a conversation, those of the turns before, so that only news are read."""
    if not recipe.chat or stores is None or loaded.encoder:  # an encoder reads all of it anew
        return CachedModel(loaded.model, pad, source_of(loaded, prompt))
    key = ("keys and values", loaded.spec, recipe.method)  # lanes that are compared share nothing
    kept = stores.get(key)
    if kept is None or kept.model is not loaded.model:
        kept = stores[key] = CachedModel(loaded.model, pad)
    return kept


def sampling_params_of(recipe: Recipe, loaded: LoadedModel | RemoteModel) -> SamplingParams:
    """What the recipe does to a model's logits; words are banned in the tokens of that model."""
    words = tuple(tuple(loaded.tokenizer.encode(word, add_special_tokens=False)) for word in recipe.bad_words)
    return SamplingParams(recipe.temperature, recipe.top_k, recipe.top_p, recipe.repetition_penalty, words)


def source_of(loaded: LoadedModel, prompt: str) -> list[int]:
    """The prompt in the tokens of a model whose encoder reads it; without an encoder there is nothing apart to read."""
    return loaded.tokenizer.encode(prompt) if loaded.encoder else []


def _plain(context: BuildContext) -> Made:
    return EmptyDrafter(), ()


def _model(context: BuildContext, kind: type = ModelDrafter, **options: int) -> Made:
    assert context.drafter is not None
    cache = cache_of(context.recipe, context.stores, context.drafter, context.prompt)
    if context.bridge is None:
        return context.draws(cache, kind, **options), (cache,)
    if kind is not ModelDrafter:
        raise UserError(
            "the branches of a tree cannot be put into the tokens of another vocabulary: choose method draft or hybrid"
        )
    # Judged as point masses, the likeliest continuation is accepted more often than one that was drawn.
    sampling, noise = (
        replace(sampling_params_of(context.recipe, context.drafter), temperature=0),
        Noise(context.recipe.seed, "draft"),
    )
    inner = ModelDrafter(cache.score, sampling, noise, cache.vocab_size, extend=cache.extend)
    return UniversalDrafter(inner, context.bridge.read, context.bridge.write, cache.context), (cache,)


def _self(context: BuildContext) -> Made:
    assert isinstance(context.target, LoadedModel)
    model, recipe = context.target.model, context.recipe
    count = layer_count(model)
    first = count // 2 if recipe.exit_layer is None else recipe.exit_layer
    kept = [i for i in range(count) if i not in recipe.skip_layers] if recipe.skip_layers else list(range(first))
    cache = CachedModel(with_layers(model, kept))
    return context.draws(cache, ModelDrafter), (cache,)


def _ngrams(context: BuildContext) -> Made:
    order, levels, filler = context.recipe.ngram, context.recipe.ngram_levels, context.recipe.filler_top_k
    return context.kept(lambda store: NGramDrafter(order, levels, filler, store, context.source), order, levels), ()


def _suffix(context: BuildContext) -> Made:
    return context.kept(lambda store: SuffixDrafter(store=store, source=context.source)), ()


def _tree(context: BuildContext) -> Made:
    return _model(context, TreeDrafter, nodes=context.recipe.tree_nodes, width=context.recipe.tree_width)


def _hybrid(context: BuildContext) -> Made:
    model, caches = _model(context)
    return HybridDrafter(_suffix(context)[0], model), caches


def _lookahead(context: BuildContext) -> Made:
    recipe = context.recipe
    return LookaheadDrafter(recipe.lookahead_window, recipe.lookahead_n, recipe.lookahead_guesses, recipe.seed), ()


def _lookup(context: BuildContext) -> Made:
    return LookupDrafter(), ()


DRAFTERS: dict[str, Callable[[BuildContext], Made]] = {
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
