"""Build drafter, verifier and policy of a recipe from loaded models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from specdemo.core.decode import Drafter, DraftLengthPolicy, Verifier
from specdemo.core.errors import UserError
from specdemo.core.policies import POLICIES, BatchLimit, CostModel
from specdemo.core.rules import RULES
from specdemo.core.sampling import LogitsProcessor, Noise, SamplingParams, SharedNoise
from specdemo.core.texts import BannedText
from specdemo.core.verifier import ModelVerifier, Target, VerifierInputs
from specdemo.drafters.method import VocabularyBridge
from specdemo.drafters.suffix import PredictionDrafter
from specdemo.models.cached_head import CachedHead, Head
from specdemo.models.chat_caches import ChatCaches, Stores
from specdemo.models.engines.cuda_graphs import MAX_ROWS, ChainShape
from specdemo.models.engines.engine import RepeatedPasses
from specdemo.models.engines.generic import has_encoder
from specdemo.models.engines.llama import PROMPT_CHUNK
from specdemo.models.engines.llama_weights import layer_count, with_layers
from specdemo.models.engines.select import engine_of
from specdemo.models.heads import LoadedDrafter
from specdemo.models.kv_cache import CachedModel, Model, UncachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.tokenizer import Bridge, encode_prompt, token_bytes
from specdemo.models.zoo import check_kinds, check_pair
from specdemo.option_rules import refuse_with_encoder
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe, RunPlan
from specdemo.remote.gates import EdgeVerifier, IsName, RecordingPolicy
from specdemo.worker import last_pass


@dataclass(frozen=True)
class RunInputs:
    """Objects that a caller adds to a recipe, see `generate`."""

    stores: Stores | None = None
    drafter: Drafter | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    names: IsName | None = None
    prediction: str | None = None  # text that the answer probably repeats
    fallback_gamma: int = 0  # longest draft of the method where it does not
    logprobs: int | None = None
    score: bool = False


@dataclass(frozen=True)
class RunPrompt:
    """Prompt of a run: what an encoder reads, and the tokens that drafts continue."""

    source: str | Sequence[int] = ""
    tokens: Sequence[int] = ()


@dataclass(frozen=True)
class Pipeline:
    """Objects of a run: roles of the decoding loop, and caches."""

    verifier: Verifier
    drafter: Drafter
    policy: DraftLengthPolicy
    target_cache: CachedModel | None  # None if the target is outside this process
    draft_caches: tuple[CachedModel, ...]
    context: int  # longest text, in tokens
    shared_context: int  # longest text that every model supports
    stop: Collection[int]  # tokens that end the text
    repeated: RepeatedPasses  # those of all steps
    close: Callable[[], None] = lambda: None
    bridge: VocabularyBridge | None = None

    @property
    def caches(self) -> tuple[CachedModel, ...]:
        return (*((self.target_cache,) if self.target_cache else ()), *self.draft_caches)

    @property
    def device(self) -> torch.device:
        return self.caches[0].model.device if self.caches else torch.device("cpu")

    @property
    def kv_bytes(self) -> int:
        return sum(cache.kv_bytes for cache in self.caches)

    @property
    def passes(self) -> tuple[int, ...]:
        return tuple(cache.passes for cache in self.caches)

    def weights_read(self, before: Sequence[int]) -> int | None:
        """Return the weight bytes read since `before`; None for remote targets, encoders, heads."""
        target = self.target_cache
        if target is None or target.head is not None or has_encoder(target.model.config):
            return None
        return sum((cache.passes - n) * cache.weight_bytes for cache, n in zip(self.caches, before, strict=True))

    def prefill(self, tokens: Sequence[int], drafter: bool = False) -> Iterator[int]:
        """Feed a prompt to the target or the drafter, see `CachedModel.prefill`."""
        text = self.bridge.read(tokens) if drafter and self.bridge else tokens
        for cache in self.draft_caches if drafter else self.caches[: len(self.caches) - len(self.draft_caches)]:
            if len(text) <= cache.context and max(text, default=0) < cache.vocab_size:
                yield from cache.prefill(text)

    def prepare(self, tokens: int, length: int) -> None:
        """Record the passes of a run from `tokens` to `length` tokens."""
        opening = (tokens - 1) % PROMPT_CHUNK + 1
        passes = replace(self.repeated, start=tokens, end=length + MAX_ROWS, rows=self.repeated.rows | {opening})
        if self.target_cache is not None:
            chain = passes.chain if self.target_cache.head is not None else None
            self.target_cache.prepare(replace(passes, chain=chain))
        prompt = frozenset({1, 2, max(1, opening - 1), opening})
        for cached in self.draft_caches:
            rows = passes.rows if passes.chain is None else prompt
            cached.prepare(replace(passes, rows=rows, compared=None))


class RunCaches:
    """Cached models of a run, opened when first needed.

    In a conversation, `close` keeps the caches that `reusable` returned for the next turn; it closes the others.
    """

    def __init__(self, plan: RunPlan, stores: Stores | None, chats: ChatCaches | None) -> None:
        self.stores = stores
        self._plan = plan
        self._chats = chats
        self._reusable: dict[Hashable, CachedModel] = {}
        self._resources = ExitStack()
        self.drafting: list[CachedModel] = []

    def open(
        self,
        model: Model,
        pad: int = 1,
        source: Sequence[int] = (),
        cache_owner: CachedModel | None = None,
        taps: tuple[int, ...] = (),
    ) -> CachedModel:
        make = CachedModel if self._plan.recipe.use_cache else UncachedModel
        return self._resources.enter_context(closing(make(model, pad, source, cache_owner, taps)))

    def reusable(
        self, loaded: Any, role: str, pad: int = 1, source: Sequence[int] = (), taps: tuple[int, ...] = ()
    ) -> CachedModel:
        """Return the cache of the previous turn if it has the same hidden states, or a new one."""
        recipe = self._plan.recipe
        if self._chats is None or self.stores is None or self.stores.began is None:
            return self.open(loaded.model, pad, source, taps=taps)
        if not recipe.use_cache or loaded.encoder:
            return self.open(loaded.model, pad, source, taps=taps)
        key = (role, self._plan.method.name, taps)
        if key not in self._reusable:
            earlier = self._chats.take(self.stores, key, loaded.model)
            self._reusable[key] = earlier or CachedModel(loaded.model, pad, taps=taps)
        return self._reusable[key]

    def on_close(self, call: Callable[[], object]) -> None:
        self._resources.callback(call)

    def close(self) -> None:
        if self._chats is not None and self.stores is not None:
            for key, cached in self._reusable.items():
                self._chats.put(self.stores, key, cached)
        self._reusable = {}
        self._resources.close()


@dataclass(frozen=True)
class RunBuildContext:
    """`BuildContext` of a run."""

    plan: RunPlan
    target: Target
    drafter: LoadedModel | None
    trained_head: Head | None
    target_cache: CachedModel | None
    caches: RunCaches
    prompt: RunPrompt
    stop: Collection[int]
    sampling: SamplingParams
    bridge: Bridge | None
    shared_noise: SharedNoise | None

    @property
    def options(self) -> Recipe:
        return self.plan.recipe

    @property
    def seed(self) -> int:
        return self.plan.recipe.seed

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @cached_property
    def source(self) -> Sequence[int]:
        return _source(self.target, self.prompt.source)

    @property
    def corpus(self) -> list[list[int]]:
        prompts = (*load_prompts(), *load_prompts(chat=True))
        return [encode_prompt(self.target.tokenizer, prompt.text, False, self.vocab_size) for prompt in prompts]

    @property
    def has_drafter(self) -> bool:
        return self.drafter is not None

    @cached_property
    def draft_sampling(self) -> SamplingParams:
        recipe = self.plan.recipe
        temperature = self.sampling.temperature if recipe.drafter_temperature is None else recipe.drafter_temperature
        top_p = self.sampling.top_p if recipe.drafter_top_p is None else recipe.drafter_top_p
        return replace(self.sampling, temperature=temperature, top_p=top_p)

    @cached_property
    def drafter_sampling(self) -> SamplingParams:
        assert self.drafter is not None
        return _sampling_params(self.plan.recipe, self.drafter)

    def scorer(self, role: str, layers: Callable[[int], Sequence[int]] | None = None) -> CachedModel:
        if role == "target" and layers is None:
            assert self.target_cache is not None
            return self.target_cache
        loaded = self.target_cache if role == "target" else self.drafter
        assert loaded is not None
        if layers is not None:
            cache = self.caches.open(with_layers(loaded.model, list(layers(layer_count(loaded.model)))))
        elif self._is_copy:
            cache = self.caches.open(loaded.model, cache_owner=self.target_cache)
        else:
            cache = self.caches.reusable(loaded, role, source=_source(self.drafter, self.prompt.source))
        self.caches.drafting.append(cache)
        return cache

    @property
    def _is_copy(self) -> bool:
        if self.target_cache is None or self.drafter is None or not self.plan.recipe.use_cache:
            return False
        if self.plan.target.name != self.drafter.spec.name:
            return False
        return engine_of(self.drafter.model).shares_cache(self.target_cache.engine)

    def head(self) -> CachedHead | None:
        if self.trained_head is None or self.target_cache is None:
            return None
        cached = self.target_cache.head
        if cached is None or cached.head is not self.trained_head:
            cached = self.target_cache.head = self.trained_head.open(self.target_cache)
        return cached

    def noise(self, name: str, *, shared: bool = True) -> Noise | SharedNoise:
        return self.shared_noise if shared and self.shared_noise is not None else Noise(self.seed, name)

    def with_store(self, make: Callable[[Any], Any], *key: Any) -> Any:
        stores = self.caches.stores
        if stores is None or not self.plan.recipe.ngram_keep:
            return make(None)
        key = (self.plan.method.name, self.plan.target.name, *key)
        drafter = make(stores.drafts.pop(key, None))
        stores.drafts[key] = drafter.store
        self.caches.on_close(stores.drop_oldest)
        return drafter


def build_pipeline(
    plan: RunPlan,
    target: Target,
    drafter: LoadedDrafter | None,
    inputs: RunInputs = RunInputs(),  # noqa: B008
    prompt: RunPrompt = RunPrompt(),  # noqa: B008
    chats: ChatCaches | None = None,
) -> Pipeline:
    """Build caches, drafter, policy and verifier of a run, in this order.

    Raises `UserError` for models or methods that do not fit together.
    """
    recipe, method = plan.recipe, plan.method
    if drafter is not None:
        check_kinds(target.encoder, drafter.encoder)
    if target.encoder and method.name == recipe.method:
        refuse_with_encoder(recipe)
    head = drafter if isinstance(drafter, Head) else None
    model = None if isinstance(drafter, Head) else drafter
    with ExitStack() as on_failure:
        caches = RunCaches(plan, inputs.stores, chats)
        on_failure.callback(caches.close)
        context = RunBuildContext(
            plan=plan,
            target=target,
            drafter=model,
            trained_head=head,
            target_cache=target.open_cache(
                partial(caches.reusable, source=_source(target, prompt.source)), head.taps if head else ()
            ),
            caches=caches,
            prompt=prompt,
            stop={*target.stop, *_checked_ids(recipe.stop_tokens, target.vocab_size)},
            sampling=replace(_sampling_params(recipe, target), processors=inputs.processors),
            bridge=_bridge(recipe, target, model),
            shared_noise=SharedNoise(recipe.seed) if RULES[recipe.rule].shares_noise else None,
        )
        drafting = _drafter(context, inputs)
        policy = _policy(context)
        verifier = _verifier(context, inputs, policy)
        on_failure.pop_all()
    draft_caches = tuple(caches.drafting)
    same_tokens = () if context.bridge else draft_caches  # a drafter of another vocabulary has other counts
    shared = min(target.context, *(cache.context for cache in same_tokens), sys.maxsize)
    continues_alone = plan.cloud is not None and plan.cloud.on_loss == "edge"
    return Pipeline(
        verifier=verifier,
        drafter=drafting,
        policy=policy,
        target_cache=context.target_cache,
        draft_caches=draft_caches,
        context=shared if continues_alone else target.context,
        shared_context=shared,
        stop=context.stop,
        repeated=_repeated_passes(context, verifier),
        close=caches.close,
        bridge=context.bridge,
    )


def _drafter(context: RunBuildContext, inputs: RunInputs) -> Drafter:
    """Build the drafter, or take that of the caller. Raises `UserError` for forests that a model cannot read."""
    target, method = context.target, context.plan.method
    drafter = method.build(context) if inputs.drafter is None else inputs.drafter
    if method.shape == "forest":
        models = [(type(cache.model).__name__, cache.chains_only) for cache in context.caches.drafting]
        for name, reason in [(target.name, target.chains_only), *models]:
            if reason:
                raise UserError(
                    f"method {method.name} verifies several continuations in one pass, and {name} {reason}: choose "
                    "method draft, nasd, suffix or ar"
                )
    if inputs.prediction is None:
        return drafter
    tokens = target.tokenizer.encode(inputs.prediction, add_special_tokens=False)
    return PredictionDrafter(context.prompt.tokens, tokens, drafter, inputs.fallback_gamma)


def _repeated_passes(context: RunBuildContext, verifier: Verifier) -> RepeatedPasses:
    longest, sampling = context.plan.longest_chain, context.draft_sampling
    chain = None
    if longest and context.bridge is None and not sampling.needs_paths:
        chain = ChainShape(longest, sampling, context.vocab_size)
    is_chain = context.plan.method.shape == "chain"
    compares = isinstance(verifier, ModelVerifier) and verifier.compares_chains and is_chain
    rows = frozenset(range(1, (longest or MAX_ROWS) + 3))
    return RepeatedPasses(rows, chain=chain, compared=context.sampling if compares else None)


def _policy(context: RunBuildContext) -> DraftLengthPolicy:
    """Return the policy; shared passes limit it where the text does not depend on draft lengths."""
    plan = context.plan
    if plan.method.policy is not None:
        return plan.method.policy(plan.recipe)
    costs = _cost_model(context)
    policy: DraftLengthPolicy = POLICIES[plan.recipe.policy].make(plan.lengths, costs)
    if context.target_cache is not None and plan.fixed_text and plan.method.shape == "chain":
        policy = BatchLimit(policy, costs, last_pass, plan.lengths.most)
    return RecordingPolicy(policy) if plan.cloud is not None and plan.cloud.gates else policy


def _verifier(context: RunBuildContext, inputs: RunInputs, policy: DraftLengthPolicy) -> Verifier:
    plan = context.plan
    if plan.method.verifier is not None:
        return plan.method.verifier(context)
    verifier = context.target.verifier(
        VerifierInputs(
            options=plan.recipe,
            sampling=context.sampling,
            policy=policy,
            target_cache=context.target_cache,
            draft_caches=tuple(context.caches.drafting),
            candidates=plan.method.candidates(plan.recipe),
            accept=context.noise("accept", shared=False),
            correct=context.noise("correct"),
            logprobs=inputs.logprobs,
            open=context.caches.open,
            on_close=context.caches.on_close,
        )
    )
    return EdgeVerifier(verifier) if plan.edge_alone else verifier


def _checked_ids(stop_tokens: Sequence[int], vocab_size: int) -> Sequence[int]:
    for token in stop_tokens:
        if not 0 <= token < vocab_size:
            raise UserError(f"stop token {token:,} is not among the {vocab_size:,} token ids of the model: remove it")
    return stop_tokens


def _bridge(recipe: Recipe, target: Target, drafter: LoadedModel | None) -> Bridge | None:
    if drafter is None:
        return None
    try:
        check_pair(target.tokenizer, drafter.tokenizer)
    except UserError:
        if not recipe.universal:
            raise
        return Bridge(target.tokenizer, drafter.tokenizer, drafter.opening)
    return None


def _cost_model(context: RunBuildContext) -> CostModel:
    costs = context.target.pass_costs
    if costs is None:
        return CostModel()
    head = context.trained_head.weight_bytes if context.trained_head else 0
    drafting = head + sum(cache.weight_bytes for cache in context.caches.drafting)
    return CostModel(costs, drafting / context.target.weight_bytes)


def _sampling_params(recipe: Recipe, loaded: Target) -> SamplingParams:
    banned = BannedText(recipe.bad_words, token_bytes(loaded.tokenizer)) if recipe.bad_words else None
    return SamplingParams.of(recipe, banned=banned)


def _source(loaded: Target | LoadedModel | None, prompt: str | Sequence[int]) -> list[int]:
    if loaded is None or not loaded.encoder:
        return []
    return loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
