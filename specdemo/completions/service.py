"""Completions of a loaded pair: from a request to the events of a run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from specdemo.completions.fields import InvalidParameter
from specdemo.completions.requests import ChatRequest, CompletionRequest
from specdemo.completions.responses import Answer, ChatFormat, DraftCounts, ResponseFormat, TextFormat
from specdemo.core.errors import PromptTooLong
from specdemo.core.events import End, Event, Header, PromptScores, StepEvent
from specdemo.core.rules import DEFAULT_RULE, RULES
from specdemo.core.step import common_prefix
from specdemo.drafters import METHODS
from specdemo.generate import generate
from specdemo.models.chat_caches import Stores
from specdemo.models.chat_template import format_options
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import TokenBytes
from specdemo.recipe import Recipe, plan_run

DEFAULT_MODEL = "default"
_CHARACTERS_PER_TOKEN = 32  # no text has more on average; longer prompts are refused before they are tokenised
_MOST_CONVERSATIONS = 256  # the memory of their caches is bounded by `ChatCaches`
_MOST_TOKENS = int((Recipe.OPTIONS["max_tokens"].bounds or (0, 0))[1])


@dataclass
class CompletionService:
    """Runs the recipe of a pair, with the values of a request, on the models of `pool`."""

    pool: ModelPool
    recipe: Recipe  # defaults of all requests
    created: int = field(default_factory=lambda: int(time.time()))
    seed: Callable[[], int] = partial(secrets.randbits, 63)  # source of seeds that requests omit
    keep_alive_s: float = 10.0  # longest time without data in a stream
    target: LoadedModel = field(init=False)

    def __post_init__(self) -> None:
        self.target = self.pool.get(plan_run(self.recipe).target)
        self._texts = TokenBytes(self.target.tokenizer)
        self._conversations = ConversationStores()

    @property
    def models(self) -> Sequence[str]:
        return (DEFAULT_MODEL, self.recipe.pair) if self.recipe.pair else (DEFAULT_MODEL,)

    def check_model(self, name: str) -> None:
        if name not in self.models:
            sentence = f"model {name[:100]!r} does not exist: known are {', '.join(self.models)}"
            raise InvalidParameter(sentence, "model", 404, "model_not_found")

    def recipe_of(self, request: CompletionRequest) -> Recipe:
        self.check_model(request.model)
        chat = isinstance(request, ChatRequest)
        if chat and not self.target.tokenizer.chat_template:
            raise InvalidParameter("this model has no chat template: use /v1/completions", "model")
        self._check_lengths(request)
        options = {"seed": self.seed(), "chat": chat, **request.options}
        if request.max_tokens == -1:  # unlimited
            options["max_tokens"] = min(self.target.context, _MOST_TOKENS)
        if request.scores_only:
            options["max_tokens"] = 1
        if given := request.template_options:
            options["template_options"] = (*self.recipe.template_options, *format_options(given))
        recipe = replace(self.recipe, **options)
        if request.speculation:
            return recipe
        rule = recipe.rule if RULES[recipe.rule].shares_noise else DEFAULT_RULE
        return replace(recipe, method="ar", rule=rule, threshold=None)

    def _check_lengths(self, request: CompletionRequest) -> None:
        """Refuse long prompts before they are tokenised. Raises `UserError`."""
        context, prompt = self.target.context, request.prompt_input
        encoded = len(prompt) if prompt and isinstance(prompt[0], int) else 0
        tokens = encoded or len(request.content) // _CHARACTERS_PER_TOKEN
        if tokens > context:
            raise PromptTooLong(tokens, context, least="" if encoded else "at least ")
        if len(request.predicted) > context * _CHARACTERS_PER_TOKEN:
            raise InvalidParameter("the prediction is longer than the context: shorten it", "prediction")

    def events(self, request: CompletionRequest, recipe: Recipe, owner: str) -> Iterator[Event]:
        """Run a request in the worker; a conversation continues on the caches of its last request."""
        method = METHODS[recipe.method].name
        content, answer = f"{method}\n{recipe.chat}\n{request.content}", ""
        limit = request.truncation_length or self.target.context  # beyond the context a run is refused
        scored = request.echoed and request.alternatives is not None
        stores = Stores() if scored else self._conversations.take(owner, content)
        run = generate(
            recipe,
            request.prompt_input,
            self.pool,
            stores,
            prediction=request.predicted,
            logprobs=request.alternatives,
            score=scored,
        )
        try:
            with closing(run):
                for event in run:
                    if isinstance(event, Header) and len(event.prompt_tokens) > limit:
                        raise PromptTooLong(len(event.prompt_tokens), limit, "truncation_length")
                    if isinstance(event, StepEvent):
                        answer += event.text
                    yield event
                    if request.scores_only and isinstance(event, PromptScores if scored else Header):
                        yield End("length")
                        return
        finally:
            if not scored:
                self._conversations.put(owner, content, answer, stores)

    def format(self, request: CompletionRequest) -> ResponseFormat:
        kind = ChatFormat if isinstance(request, ChatRequest) else TextFormat
        return kind(request, self.target.engine.partition(":")[0], self._texts)

    def answers(self, request: CompletionRequest) -> list[Answer]:
        """Return an empty answer per prompt; they share the counts of drafts."""
        counts = DraftCounts()
        return [Answer(request.echoed, counts, request.stream_options.speculation) for _ in request.requests]


class ConversationStores:
    """Stores of earlier requests by content, least recently used first: a resent conversation finds its KV caches."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, str, str, Stores]] = []  # owner, prompt, answer, stores

    def take(self, owner: str, prompt: str) -> Stores:
        """Remove and return the owner's stores that share most text with `prompt`, or new stores.

        They must share the earlier prompt, or half of prompt and answer: otherwise more is lost than reused.
        """
        best, longest = None, 0
        for i, (name, earlier, answer, _) in enumerate(self._entries):
            if name != owner:
                continue
            shared = common_prefix(prompt, earlier + answer)
            if shared > longest and shared >= min(len(earlier), (len(earlier) + len(answer)) / 2):
                best, longest = i, shared
        return Stores(began=datetime.now()) if best is None else self._entries.pop(best)[-1]

    def put(self, owner: str, prompt: str, answer: str, stores: Stores) -> None:
        self._entries.append((owner, prompt, answer, stores))
        del self._entries[:-_MOST_CONVERSATIONS]
