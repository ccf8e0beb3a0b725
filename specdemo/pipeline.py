"""Build drafter, verifier and policy of a recipe from loaded models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from specdemo.core.banned_text import BannedText
from specdemo.core.batch_limit import BatchLimit
from specdemo.core.decode import Drafter, DraftLengthPolicy, Verifier
from specdemo.core.errors import UserError
from specdemo.core.policies import POLICIES, CostModel
from specdemo.core.rules import RULES
from specdemo.core.sampling import LogitsProcessor, Noise, SamplingParams, SharedNoise
from specdemo.core.target import Target
from specdemo.drafters import METHODS
from specdemo.drafters.method import VocabularyBridge
from specdemo.drafters.prediction import PredictedText, PredictionDrafter
from specdemo.models.cached_head import CachedHead, Head
from specdemo.models.chat_caches import ChatCaches, Conversation
from specdemo.models.engines.cuda_graphs import MAX_ROWS
from specdemo.models.engines.generic import has_encoder
from specdemo.models.engines.llama import PROMPT_CHUNK
from specdemo.models.engines.llama_weights import layer_count, with_layers
from specdemo.models.engines.select import engine_of
from specdemo.models.heads import LoadedDrafter, LoadedHead
from specdemo.models.kv_cache import CachedModel, Model
from specdemo.models.load import LoadedModel
from specdemo.models.tokenizer import Bridge, check_vocabulary, encode_prompt, token_bytes
from specdemo.models.uncached import UncachedModel
from specdemo.models.zoo import check_pair
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe, refuse_with_encoder
from specdemo.worker import pass_load

CONVERSATION = "conversation"  # key of the `Conversation` in `Stores`
Stores = dict[Any, Any]  # state of earlier runs: n-grams, and the key of KV caches
MAX_STORE_BYTES = 64 << 20  # n-grams and suffixes of a `Stores`


@dataclass(frozen=True)
class Pipeline(AbstractContextManager["Pipeline"]):
    """Objects of a run: roles of the decoding loop, and caches."""

    verifier: Verifier
    drafter: Drafter
    policy: DraftLengthPolicy
    target_cache: CachedModel | None  # None if the target is outside this process
    draft_caches: tuple[CachedModel, ...]
    context: int  # longest text, in tokens
    shared_context: int  # longest text that every model supports
    stop: Collection[int]  # tokens that end the text
    close: Callable[[], None] = lambda: None
    bridge: VocabularyBridge | None = None

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

    def prepare(self, recipe: Recipe, tokens: int, length: int) -> None:
        """Record the passes of a run from `tokens` to `length` tokens."""
        longest = longest_chain(recipe) or MAX_ROWS
        opening = (tokens - 1) % PROMPT_CHUNK + 1
        for cached in self.caches:
            cached.prepare({*range(1, longest + 3), opening}, tokens, length + MAX_ROWS)


def stored_bytes(stores: Stores) -> int:
    return sum(getattr(store, "size_bytes", 0) for store in list(stores.values()))


def _drop_oldest(stores: Stores) -> None:
    for key in [key for key in list(stores) if key != CONVERSATION]:
        if stored_bytes(stores) > MAX_STORE_BYTES:
            stores.pop(key, None)


def longest_chain(recipe: Recipe) -> int | None:
    """Return the largest draft length of fixed-length chains that are cached."""
    fixed = recipe.policy == "fixed" and recipe.use_cache
    return recipe.gamma if fixed and METHODS[recipe.method].shape == "chain" else None


class ModelContext:
    """`BuildContext` and `TargetContext` of a run; cached models are created when first needed."""

    policy: DraftLengthPolicy  # chosen when the drafter has been built

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        drafter: LoadedDrafter | None,
        stores: Stores | None = None,
        prompt: str | Sequence[int] = "",
        chats: ChatCaches | None = None,
        processors: Sequence[LogitsProcessor] = (),
        logprobs: int | None = None,
    ) -> None:
        self.options = self.recipe = recipe
        self.target = target
        self.drafter: LoadedModel | None = None if isinstance(drafter, LoadedHead) else drafter
        self._head: Head | None = drafter.head if isinstance(drafter, LoadedHead) else None
        self.taps: tuple[int, ...] = self._head.taps if self._head else ()
        self._stores, self._chats = stores, chats
        self.logprobs = logprobs
        self._prompt = prompt
        self._conversation: dict[Any, CachedModel] = {}  # caches that stay open for the next turn
        self._resources = ExitStack()  # caches of this run
        self.seed = recipe.seed
        self.sampling = replace(sampling_params(recipe, target), processors=tuple(processors))
        self.bridge: VocabularyBridge | None = _bridge(recipe, target, self.drafter)
        self.source: Sequence[int] = _source(target, prompt)
        self.stop: Collection[int] = {*target.stop, *_checked_ids(recipe.stop_tokens, target.vocab_size)}
        self.draft_caches: list[CachedModel] = []
        self._shared = SharedNoise(recipe.seed) if RULES[recipe.rule].shares_noise else None
        self.vocab_size = target.vocab_size
        self.candidates = METHODS[recipe.method].candidates(recipe)
        self.method_verifier = METHODS[recipe.method].verifier
        self.target_cache: CachedModel | None = target.open_cache(self)

    @cached_property
    def draft_sampling(self) -> SamplingParams:
        return draft_sampling_params(self.recipe, self.sampling)

    @cached_property
    def drafter_sampling(self) -> SamplingParams:
        assert self.drafter is not None
        return sampling_params(self.recipe, self.drafter)

    def scorer(self, role: str, layers: Callable[[int], Sequence[int]] | None = None) -> CachedModel:
        if role == "target" and layers is None:
            assert self.target_cache is not None
            return self.target_cache
        source = self.target_cache if role == "target" else self.drafter
        assert source is not None
        if layers is not None:
            cache = self.open(with_layers(source.model, list(layers(layer_count(source.model)))))
        elif self._is_copy:
            cache = self.open(source.model, owner=self.target_cache)
        else:
            cache = self.cached(source, role)
        self.draft_caches.append(cache)
        return cache

    @property
    def corpus(self) -> list[list[int]]:
        prompts = (*load_prompts(), *load_prompts(chat=True))
        return [encode_prompt(self.target.tokenizer, prompt.text, False, self.vocab_size) for prompt in prompts]

    @property
    def has_drafter(self) -> bool:
        return self.drafter is not None

    @property
    def _is_copy(self) -> bool:
        if self.target_cache is None or self.drafter is None or not self.recipe.use_cache:
            return False
        if self.recipe.target_spec.name != self.drafter.spec.name:
            return False
        return engine_of(self.drafter.model).shares_cache(self.target_cache.engine)

    @property
    def drafter_bytes(self) -> int:
        head = self._head.weight_bytes if self._head else 0
        return head + sum(cache.weight_bytes for cache in self.draft_caches)

    def head(self) -> CachedHead | None:
        if self._head is None or self.target_cache is None:
            return None
        cached = self.target_cache.head
        if cached is None or cached.head is not self._head:
            cached = self.target_cache.head = self._head.open(self.target_cache)
        return cached

    def noise(self, name: str, *, shared: bool = True) -> Noise | SharedNoise:
        return self._shared if shared and self._shared is not None else Noise(self.seed, name)

    def with_store(self, make: Callable[[Any], Any], *key: Any) -> Any:
        if self._stores is None or not self.recipe.ngram_keep:
            return make(None)
        key = (self.recipe.method, self.recipe.target_spec.name, *key)
        drafter = make(self._stores.pop(key, None))
        self._stores[key] = drafter.store
        self.on_close(partial(_drop_oldest, self._stores))
        return drafter

    def cached(self, loaded: Any, role: str, pad: int = 1, taps: tuple[int, ...] = ()) -> CachedModel:
        """In a conversation the KV cache of earlier turns is reused, if it has the same hidden states."""
        stored = self._stores is not None and (self.recipe.chat or CONVERSATION in self._stores)
        reusable = stored and self.recipe.use_cache and not loaded.encoder
        if not reusable or self._stores is None or self._chats is None:
            return self.open(loaded.model, pad, _source(loaded, self._prompt), taps=taps)
        conversation, key = self._stores.setdefault(CONVERSATION, Conversation()), (role, self.recipe.method, taps)
        cache = self._conversation.get(key) or self._chats.take(conversation, key, loaded.model)
        self._conversation[key] = cache or CachedModel(loaded.model, pad, taps=taps)
        return self._conversation[key]

    def open(
        self,
        model: Model,
        pad: int = 1,
        source: Sequence[int] = (),
        owner: CachedModel | None = None,
        taps: tuple[int, ...] = (),
    ) -> CachedModel:
        """Return a cached model, closed with this context."""
        make = CachedModel if self.recipe.use_cache else UncachedModel
        return self._resources.enter_context(closing(make(model, pad, source, owner, taps)))

    def on_close(self, call: Callable[[], None]) -> None:
        self._resources.callback(call)

    def close(self) -> None:
        """Keep the caches of a conversation for its next turn; close the others."""
        if self._chats is not None and self._stores is not None:
            for key, cached in self._conversation.items():
                self._chats.put(self._stores[CONVERSATION], key, cached)
        self._conversation = {}
        self._resources.close()


def build_pipeline(
    recipe: Recipe,
    target: Target,
    drafter: LoadedDrafter | None,
    stores: Stores | None = None,
    prompt: str | Sequence[int] = "",
    chats: ChatCaches | None = None,
    proposer: Drafter | None = None,
    processors: Sequence[LogitsProcessor] = (),
    prediction: PredictedText | None = None,
    logprobs: int | None = None,
) -> Pipeline:
    """Build the objects of a run; encoders process `prompt`, and `proposer` replaces the drafter of the method.

    `processors` change the logits of the target and of drafters with its vocabulary.

    Raises `UserError` for models or methods that do not fit together.
    """
    if drafter is not None and target.encoder != drafter.encoder:
        role = "target" if target.encoder else "drafter"
        raise UserError(f"the {role} has an encoder and the other model is a decoder: choose two of the same kind")
    if target.encoder:
        refuse_with_encoder(recipe.method)
    context = ModelContext(recipe, target, drafter, stores, prompt, chats, processors, logprobs)
    try:
        return _assemble(context, proposer, prediction)
    except BaseException:
        context.close()
        raise


def _assemble(context: ModelContext, proposer: Drafter | None, prediction: PredictedText | None) -> Pipeline:
    recipe, target = context.recipe, context.target
    method = METHODS[recipe.method]
    drafter = method.build(context) if proposer is None else proposer
    if prediction is not None:
        drafter = PredictionDrafter(prediction, drafter)
    caches = tuple(context.draft_caches)
    if method.shape == "forest":
        drafting = [(type(cache.model).__name__, cache.chains_only) for cache in caches]
        _refuse_forests(method.name, [(target.name, target.chains_only), *drafting])
    if method.policy is not None:
        context.policy = method.policy(recipe)
    else:
        context.policy = _policy(context)
    verifier = target.verifier(context)
    same_tokens = () if context.bridge else caches  # a drafter of another vocabulary has other counts
    shared = min(target.context, *(cache.context for cache in same_tokens), sys.maxsize)
    alone = recipe.cloud is not None and recipe.cloud.on_loss == "edge"  # the drafter may have to continue
    lengths = shared if alone else target.context, shared
    roles = verifier, drafter, context.policy
    return Pipeline(*roles, context.target_cache, caches, *lengths, context.stop, context.close, context.bridge)


def _policy(context: ModelContext) -> DraftLengthPolicy:
    """Return the policy; shared passes limit it where the text does not depend on draft lengths."""
    recipe, costs = context.recipe, _cost_model(context)
    policy: DraftLengthPolicy = POLICIES[recipe.policy].make(recipe.draft_lengths, costs)
    fixed_text = recipe.exact and (recipe.temperature == 0 or RULES[recipe.rule].shares_noise)
    if context.target_cache is None or not fixed_text or METHODS[recipe.method].shape != "chain":
        return policy
    return BatchLimit(policy, costs, pass_load, recipe.draft_lengths.most)


def _checked_ids(stop_tokens: Sequence[int], vocab_size: int) -> Sequence[int]:
    for token in stop_tokens:
        if not 0 <= token < vocab_size:
            raise UserError(f"stop token {token:,} is not among the {vocab_size:,} token ids of the model: remove it")
    return stop_tokens


def _refuse_forests(method: str, models: Sequence[tuple[str, str]]) -> None:
    for name, reason in models:
        if reason:
            raise UserError(
                f"method {method} verifies several continuations in one pass, and {name} {reason}: choose method "
                "draft, nasd, suffix or ar"
            )


def _bridge(recipe: Recipe, target: Target, drafter: LoadedModel | None) -> Bridge | None:
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
    costs = context.target.pass_costs
    if costs is None:
        return CostModel()
    return CostModel(costs, context.drafter_bytes / context.target.weight_bytes)


def sampling_params(recipe: Recipe, loaded: Target) -> SamplingParams:
    banned = BannedText(recipe.bad_words, token_bytes(loaded.tokenizer)) if recipe.bad_words else None
    return SamplingParams(recipe.temperature, recipe.top_k, recipe.top_p, recipe.repetition_penalty, banned=banned)


def draft_sampling_params(recipe: Recipe, target: SamplingParams) -> SamplingParams:
    """Return the parameters of drafts, which are those of `target` unless the recipe has others for the drafter."""
    temperature = target.temperature if recipe.drafter_temperature is None else recipe.drafter_temperature
    top_p = target.top_p if recipe.drafter_top_p is None else recipe.drafter_top_p
    return replace(target, temperature=temperature, top_p=top_p)


def _source(loaded: Target, prompt: str | Sequence[int]) -> list[int]:
    if not loaded.encoder:
        return []
    return loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
