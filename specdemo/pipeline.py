"""Build drafter, verifier and policy of a recipe from loaded models."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdemo.core.banned_text import BannedText
from specdemo.core.decode import Drafter, DraftLengthPolicy, Verifier
from specdemo.core.errors import UserError
from specdemo.core.policies import POLICIES, CostModel
from specdemo.core.rules import DEFAULT_RULE, RULES
from specdemo.core.sampling import Noise, SamplingParams, SharedNoise, fitted
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier, configured_rule
from specdemo.drafters import METHODS
from specdemo.models.chat_caches import ChatCaches, Conversation
from specdemo.models.engines.cuda_graphs import MAX_ROWS
from specdemo.models.engines.llama import PROMPT_CHUNK
from specdemo.models.engines.llama_weights import layer_count, with_dropout, with_layers
from specdemo.models.engines.select import engine_of
from specdemo.models.kv_cache import CachedModel, Model
from specdemo.models.load import LoadedModel
from specdemo.models.tokenizer import Bridge, check_vocabulary, token_bytes
from specdemo.models.zoo import check_pair
from specdemo.recipe import Recipe, refuse_with_encoder
from specdemo.remote.client import RemoteModel, remote_verifier
from specdemo.remote.gates import (
    AlwaysVerify,
    ClosableVerifier,
    GatedVerifier,
    RecordingPolicy,
    document_frequency,
    mc_dropout,
)
from specdemo.remote.protocol import VerifyConfig

PASSES = 4  # of the drafter with dropout, for gate `variance`
_CONTEXT_TOKENS = 8  # decoded before a draft, for rules about words

CONVERSATION = "conversation"  # key of the `Conversation` in `Stores`
Stores = dict[Any, Any]  # state of earlier runs: n-grams, and the key of KV caches


@dataclass(frozen=True)
class Pipeline:
    """Objects of a run: roles of the decoding loop, and caches."""

    verifier: Verifier
    drafter: Drafter
    policy: DraftLengthPolicy
    target_cache: CachedModel | None  # None if the target is remote
    draft_caches: tuple[CachedModel, ...]
    context: int  # longest text, in tokens, that every model supports
    close: Callable[[], None] = lambda: None

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def caches(self) -> tuple[CachedModel, ...]:
        return (*((self.target_cache,) if self.target_cache else ()), *self.draft_caches)

    @property
    def device(self) -> torch.device:
        return self.caches[0].model.device if self.caches else torch.device("cpu")

    @property
    def kv_bytes(self) -> int:
        return sum(cache.kv_bytes for cache in self.caches)

    def prepare(self, recipe: Recipe, tokens: int, length: int) -> None:
        """Record the passes of a run from `tokens` to `length` tokens."""
        longest = longest_chain(recipe) or MAX_ROWS
        opening = (tokens - 1) % PROMPT_CHUNK + 1
        for cached in self.caches:
            cached.prepare({*range(1, longest + 3), opening}, tokens, length + MAX_ROWS)


def longest_chain(recipe: Recipe) -> int | None:
    """Return the largest draft length of fixed-length chains."""
    return recipe.gamma if recipe.policy == "fixed" and METHODS[recipe.method].shape == "chain" else None


class ModelContext:
    """`BuildContext` of a run; cached models are created when first needed."""

    def __init__(
        self,
        recipe: Recipe,
        target: LoadedModel | RemoteModel,
        drafter: LoadedModel | None,
        stores: Stores | None = None,
        prompt: str = "",
        chats: ChatCaches | None = None,
    ) -> None:
        self.options = self.recipe = recipe
        self.target, self.drafter = target, drafter
        self._stores, self._prompt, self._chats = stores, prompt, chats
        self._kept: dict[Any, CachedModel] = {}  # for the next turn
        self._resources = ExitStack()  # caches of this run
        self.seed = recipe.seed
        self.sampling = sampling_params(recipe, target)
        self.bridge = _bridge(recipe, target, drafter)
        self.source = _source(target, prompt)
        self.stop = target.stop
        self.draft_caches: list[CachedModel] = []
        self._shared = SharedNoise(recipe.seed) if RULES[recipe.rule].shares_noise else None
        self.target_cache: CachedModel | None = None
        if not isinstance(target, RemoteModel):
            self.target_cache = self._cached(target, "target", target.invariance.pad)

    @property
    def vocab_size(self) -> int:
        return self.target_cache.vocab_size if self.target_cache else self.target.info.vocab_size

    @cached_property
    def drafter_sampling(self) -> SamplingParams:
        assert self.drafter is not None
        return sampling_params(self.recipe, self.drafter)

    def scorer(self, role: str, layers: Callable[[int], Sequence[int]] | None = None) -> CachedModel:
        if role == "target" and layers is None:
            assert self.target_cache is not None
            return self.target_cache
        model = self.target if role == "target" else self.drafter
        assert model is not None and not isinstance(model, RemoteModel)
        if layers is None and role == "drafter" and self._is_copy:
            cache = self.open(model.model, owner=self.target_cache)
        elif layers is None:
            cache = self._cached(model, role)
        else:
            cache = self.open(with_layers(model.model, list(layers(layer_count(model.model)))))
        self.draft_caches.append(cache)
        return cache

    @property
    def _is_copy(self) -> bool:
        if self.target_cache is None or self.drafter is None or self.target.spec.name != self.drafter.spec.name:
            return False
        return engine_of(self.drafter.model).shares_cache(self.target_cache.engine)

    def noise(self, name: str, *, shared: bool = True) -> Noise | SharedNoise:
        return self._shared if shared and self._shared is not None else Noise(self.seed, name)

    def with_store(self, make: Callable[[Any], Any], *key: Any) -> Any:
        if self._stores is None or not self.recipe.ngram_keep:
            return make(None)
        key = (self.recipe.method, self.recipe.target_spec.name, *key)
        drafter = make(self._stores.get(key))
        self._stores[key] = drafter.store
        return drafter

    def _cached(self, loaded: LoadedModel, role: str, pad: int = 1) -> CachedModel:
        """In a conversation the KV cache of earlier turns is reused."""
        if not self.recipe.chat or self._stores is None or self._chats is None or loaded.encoder:
            return self.open(loaded.model, pad, _source(loaded, self._prompt))
        conversation, key = self._stores.setdefault(CONVERSATION, Conversation()), (role, self.recipe.method)
        cache = self._kept.get(key) or self._chats.take(conversation, key, loaded.model)
        self._kept[key] = cache or CachedModel(loaded.model, pad)
        return self._kept[key]

    def open(
        self,
        model: Model,
        pad: int = 1,
        source: Sequence[int] = (),
        owner: CachedModel | None = None,
    ) -> CachedModel:
        """Return a cached model, closed with this context."""
        return self._resources.enter_context(closing(CachedModel(model, pad, source, owner)))

    def close(self) -> None:
        """Keep the caches of a conversation for its next turn; close the others."""
        for key, cached in self._kept.items():
            self._chats.put(self._stores[CONVERSATION], key, cached)
        self._kept = {}
        self._resources.close()


def build_pipeline(
    recipe: Recipe,
    target: LoadedModel | RemoteModel,
    drafter: LoadedModel | None,
    stores: Stores | None = None,
    prompt: str = "",
    chats: ChatCaches | None = None,
) -> Pipeline:
    """Build the objects of a run; encoders process `prompt`.

    Raises `UserError` for models or methods that do not fit together.
    """
    if drafter is not None and target.encoder != drafter.encoder:
        role = "target" if target.encoder else "drafter"
        raise UserError(f"the {role} has an encoder and the other model is a decoder: choose two of the same kind")
    if target.encoder:
        refuse_with_encoder(recipe.method)
    context = ModelContext(recipe, target, drafter, stores, prompt, chats)
    try:
        return _assemble(context)
    except BaseException:
        context.close()
        raise


def _assemble(context: ModelContext) -> Pipeline:
    recipe, target = context.recipe, context.target
    method = METHODS[recipe.method]
    proposer, caches = method.build(context), tuple(context.draft_caches)
    local = (context.target_cache,) if context.target_cache else ()
    if method.shape == "forest":
        _refuse_forests(
            method.name, [(type(cached.model).__name__, cached.chains_only) for cached in (*local, *caches)]
        )
        if isinstance(target, RemoteModel):
            _refuse_forests(method.name, [(target.info.name, target.info.chains_only)])
    if method.policy is not None:
        policy = method.policy(recipe)
    else:
        policy = POLICIES[recipe.policy].make(recipe.draft_lengths, _cost_model(context))
    same_tokens = (*local, *(() if context.bridge else caches))  # a drafter of another vocabulary has other counts
    context_length = min([cache.context for cache in same_tokens] + [sys.maxsize])
    if isinstance(target, RemoteModel):
        remote, policy = build_remote_verifier(context, target, policy, caches)
        context_length = min(context_length, target.info.context)

        def close() -> None:
            context.close()
            remote.close()

        return Pipeline(remote, proposer, policy, None, caches, context_length, close)
    verifier = method.verifier(context) if method.verifier else _verifier(context)
    return Pipeline(verifier, proposer, policy, context.target_cache, caches, context_length, context.close)


def _refuse_forests(method: str, models: Sequence[tuple[str, str]]) -> None:
    """Raise `UserError` if one of `models`, as (name, reason), supports chains only."""
    for name, reason in models:
        if reason:
            raise UserError(
                f"method {method} verifies several continuations in one pass, and {name} {reason}: choose method "
                "draft, nasd, suffix or ar"
            )


def _bridge(recipe: Recipe, target: LoadedModel | RemoteModel, drafter: LoadedModel | None) -> Bridge | None:
    """Return a bridge if the vocabularies differ. Raises `UserError` unless the recipe allows it."""
    if drafter is None:
        return None
    try:
        check_pair(target.tokenizer, drafter.tokenizer)
    except UserError:
        if not recipe.universal:
            raise
        check_vocabulary("the target", target.tokenizer, target.vocab_size)
        check_vocabulary("the drafter", drafter.tokenizer, drafter.vocab_size)
        return Bridge(target.tokenizer, drafter.tokenizer, drafter.opening)
    return None


def _cost_model(context: ModelContext) -> CostModel:
    if context.target_cache is None:
        return CostModel()
    weights = sum(cache.weight_bytes for cache in context.draft_caches)
    return CostModel(context.target.invariance.cost, weights / context.target_cache.weight_bytes)


def _verifier(context: ModelContext) -> ModelVerifier:
    recipe = context.recipe
    return ModelVerifier(
        context.scorer("target").score,
        context.sampling,
        configured_rule(recipe.rule, adjust=not recipe.skip_sample_adjustment, threshold=recipe.threshold),
        accept=context.noise("accept", shared=False),
        correct=context.noise("correct"),
        candidates=METHODS[recipe.method].candidates(recipe),
        top=recipe.top,
    )


def build_remote_verifier(
    context: ModelContext, target: RemoteModel, policy: DraftLengthPolicy, caches: Sequence[CachedModel]
) -> tuple[ClosableVerifier, DraftLengthPolicy]:
    """Return the remote verifier, gated if the recipe has gates, and the policy that records for the gate."""
    recipe, sampling = context.recipe, context.sampling
    cloud, candidates = target.cloud, METHODS[recipe.method].candidates(recipe)
    settings = VerifyConfig(
        temp=float(sampling.temperature),
        top_k=sampling.top_k,
        top_p=float(sampling.top_p),
        rep_penalty=float(sampling.repetition_penalty),
        bad_texts=list(recipe.bad_words),
        seed=recipe.seed,
        rule=recipe.rule,
        threshold=RULES[recipe.rule].threshold if recipe.threshold is None else recipe.threshold,
        adjust=not recipe.skip_sample_adjustment,
    )
    edge = None
    if cloud.on_loss == "edge" and caches:

        def score(tokens: Sequence[int], draft: Draft) -> Tensor:
            return fitted(caches[0].score(tokens, draft), target.info.vocab_size)

        accept, correct = Noise(recipe.seed, "edge accept"), Noise(recipe.seed, "edge")
        rule = configured_rule(DEFAULT_RULE)
        edge = ModelVerifier(score, sampling, rule, accept, correct, candidates, recipe.top)
    verifier = remote_verifier(
        target,
        settings,
        max_tokens=recipe.max_tokens,
        edge=edge,
        candidates=candidates,
        top=recipe.top,
    )
    return _gated(verifier, context, target, policy, caches) if cloud.gates else (verifier, policy)


def _gated(
    verifier: ClosableVerifier,
    context: ModelContext,
    target: RemoteModel,
    policy: DraftLengthPolicy,
    caches: Sequence[CachedModel],
) -> tuple[ClosableVerifier, DraftLengthPolicy]:
    cloud, recorder, variance = target.cloud, RecordingPolicy(policy), None
    if "variance" in cloud.gates:
        variance = mc_dropout([context.open(with_dropout(caches[0].model, seed)).score for seed in range(PASSES)])
    always = word_rules(target, cloud.always) if cloud.always else None
    gate = GatedVerifier(verifier, recorder, cloud.thresholds, cloud.gate_ratio, always=always, variance=variance)
    return gate, recorder


def word_rules(target: RemoteModel, rules: Sequence[str]) -> Callable[[Sequence[int], Draft], bool]:
    """Return a test of drafts by rules about words."""
    always = AlwaysVerify(rules, _library() if "rare" in rules else None)

    def needs_verification(tokens: Sequence[int], draft: Draft) -> bool:
        tail = tokens[-_CONTEXT_TOKENS:]
        before = target.tokenizer.decode(tail)
        return always(target.tokenizer.decode([*tail, *draft.tokens])[len(before) :])

    return needs_verification


@cache
def _library() -> Counter[str]:
    """Count files per word in Python's standard library, the bundled pair's training data."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return document_frequency(path.read_text("utf-8", errors="replace") for path in files)


def sampling_params(recipe: Recipe, loaded: LoadedModel | RemoteModel) -> SamplingParams:
    banned = BannedText(recipe.bad_words, token_bytes(loaded.tokenizer)) if recipe.bad_words else None
    return SamplingParams(recipe.temperature, recipe.top_k, recipe.top_p, recipe.repetition_penalty, banned=banned)


def _source(loaded: LoadedModel | RemoteModel, prompt: str) -> list[int]:
    return loaded.tokenizer.encode(prompt) if loaded.encoder else []
