"""Server-side verification: text and KV cache per edge.

After an eviction the edge sends its complete text again. Noise is keyed by position: repeated requests get the same
response.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specdemo.core.distributions import Comparison, ProbRows, SparseRow, node_probs
from specdemo.core.errors import UserError, check_name
from specdemo.core.rules import RULES, check_rule
from specdemo.core.sampling import Noise, SamplingParams, SharedNoise
from specdemo.core.step import Draft, Verdict
from specdemo.core.texts import BannedText
from specdemo.core.verifier import ModelVerifier, configured_rule
from specdemo.models.engines.engine import torch_threads
from specdemo.models.kv_cache import CachedModel
from specdemo.remote.protocol import PrefillPosition, StreamRequest, VerifyConfig, VerifyRequest, VerifyResponse, digest

_ID_BYTES = 48  # bytes of a Python int in a list
_KEYS = 32  # Idempotency-Keys of a context
Score = Callable[[Sequence[int], Draft], Tensor]
Ban = Callable[[tuple[str, ...]], BannedText]
ObserveStep = Callable[[VerifyRequest, VerifyResponse], object]
NoiseSources = Callable[[VerifyConfig, int], tuple[Any, Any]]  # config, position -> acceptance noise, token noise


def position_noise(config: VerifyConfig, position: int) -> tuple[Any, Any]:
    accept = Noise(config.seed, f"accept/{position}")
    if RULES[config.rule].shares_noise:
        return accept, SharedNoise(config.seed)
    return accept, Noise(config.seed, f"correct/{position}")


class RowNeeded(Exception):
    """An acceptance rule needs a draft distribution that was not transmitted."""

    def __init__(self, node: int) -> None:
        self.node = node


@dataclass(frozen=True)
class SentRows:
    """Received draft distributions by node; missing rows raise `RowNeeded`. Overlaps are estimated from drafted tokens.

    min(1, p / q) is an unbiased estimate of sum min(p, q). Without `rows`, a row contains only the drafted token
    (practice guide, 3.1), which is exact for point masses.
    """

    tokens: tuple[int, ...]
    token_probs: tuple[float, ...]
    vocab_size: int
    rows: Mapping[int, Tensor] | None
    device: torch.device = torch.device("cpu")

    def row(self, node: int) -> Tensor | SparseRow:
        if self.rows is None:
            token, prob = torch.tensor([self.tokens[node]]), torch.tensor([self.token_probs[node]], dtype=torch.float32)
            return SparseRow(token.to(self.device), prob.to(self.device), self.vocab_size)
        if node not in self.rows:
            raise RowNeeded(node)
        return self.rows[node]

    def dense(self) -> None:
        return None

    def to(self, device: torch.device) -> SentRows:
        rows = None if self.rows is None else {node: row.to(device) for node, row in self.rows.items()}
        return replace(self, device=device, rows=rows)

    def compare(self, p: ProbRows, tokens: Sequence[int], parents: Sequence[int]) -> Comparison:
        probs = node_probs(p, tokens, parents)
        return probs, [min(1.0, p / q) if q > 0 else 0.0 for p, q in zip(probs, self.token_probs, strict=True)]


def check_token_ids(tokens: Sequence[int], vocab_size: int) -> None:
    if max(tokens, default=0) >= vocab_size:
        raise UserError(f"a token is not among the model's {vocab_size:,} ids: use the tokenizer of the target")


def draft_from_request(request: VerifyRequest, vocab_size: int) -> Draft:
    n = len(request.draft_tokens)
    if request.k != n:
        raise UserError(f"k is {request.k} and {n} tokens were drafted: send k tokens")
    lists = {"parents": request.parents, "q_token_probs": request.token_probs, "hard_mask": request.hard_mask}
    for name, values in lists.items():
        if values is not None and len(values) != n:
            raise UserError(f"{name} has {len(values)} entries for {n} draft tokens: send {n} entries")
    check_token_ids([*request.draft_tokens, *request.tokens], vocab_size)
    parents = request.parents if request.parents is not None else list(range(-1, n - 1))
    if any(parent >= node for node, parent in enumerate(parents)):
        raise UserError("a node's parent must precede it: order the draft from the root")
    q = None if request.token_probs is None else tuple(request.token_probs)
    draft = Draft(tuple(request.draft_tokens), tuple(parents), q)
    if q is None:
        return draft
    if any(row.node >= n for row in request.rows or ()):
        raise UserError(f"a row belongs to no node of the {n} draft tokens: send rows of the draft")
    rows = None if request.rows is None else {row.node: row.probs(vocab_size) for row in request.rows}
    return replace(draft, probs=SentRows(draft.tokens, q, vocab_size, rows))


@dataclass(frozen=True)
class TextVerifier:
    """Verifier of a text; its noise depends on the position."""

    config: VerifyConfig
    sampling: SamplingParams
    rule: Callable[..., Verdict]
    noise_sources: NoiseSources

    @classmethod
    def of(
        cls, config: VerifyConfig, vocab_size: int, noise_sources: NoiseSources = position_noise, ban: Ban | None = None
    ) -> TextVerifier:
        """Check the configuration. Raises `UserError`."""
        check_name("rule", config.rule, RULES)
        check_rule(config.rule, adjust=config.adjust, forest=False)
        check_token_ids([token for word in config.bad_words for token in word], vocab_size)
        rule = configured_rule(config.rule, adjust=config.adjust, threshold=config.threshold)
        sampling = config.sampling
        if config.bad_texts:
            if ban is None:
                raise UserError("this service has no tokenizer for bad_texts: send bad_words")
            sampling = replace(sampling, banned=ban(tuple(config.bad_texts)))
        return cls(config, sampling, rule, noise_sources)

    def verify(self, score: Score, tokens: Sequence[int], draft: Draft, candidates: int = 1, top: int = 0) -> Verdict:
        """Raises `RowNeeded`."""
        accept, correct = self.noise_sources(self.config, len(tokens))
        verifier = ModelVerifier(score, self.sampling, self.rule, accept, correct, candidates, top)
        with torch_threads(1):
            return verifier.verify(tokens, draft)

    def respond(self, request: VerifyRequest, score: Score, tokens: Sequence[int], draft: Draft) -> VerifyResponse:
        """Return the verdict about a draft, or a request for rows."""
        block = RULES[self.config.rule].chains_only
        check_rule(self.config.rule, adjust=self.config.adjust, forest=not draft.is_chain)
        try:
            verdict = self.verify(score, tokens, draft, request.candidates, request.top)
        except RowNeeded as missing:
            response = VerifyResponse(epoch=request.epoch, step=request.step or 0, accepted_len=0)
            if block:
                response.wanted_rows = list(range(len(draft)))
            else:
                response.wanted_row = missing.node
            return response
        return VerifyResponse.of(request, draft, verdict, block=block, lossy=_is_lossy(self.config, draft))


def _is_lossy(config: VerifyConfig, draft: Draft) -> bool:
    rule, sampling = RULES[config.rule], config.sampling
    if not rule.exact(sampling) or sampling.temperature == 0:
        return not rule.exact(sampling)
    lacks_rows = isinstance(draft.probs, SentRows) and draft.probs.rows is None
    scalar = rule.needs_rows and lacks_rows and min(draft.token_probs or (1.0,)) < 1
    return scalar or (rule.adjusts and not config.adjust)


class ContextInUse(RuntimeError):
    """Another request uses the context."""


class UnknownContext(UserError):
    """Context missing or different from the edge's text."""


class StaleRequest(UserError):
    """Request of an earlier epoch or step."""


@dataclass
class EdgeContext:
    """Text of an edge, and its last request with response."""

    epoch: int
    verifier: TextVerifier
    cache: CachedModel
    last_used: float
    tokens: list[int] = field(default_factory=list)
    request: VerifyRequest | None = None
    response: VerifyResponse | None = None
    keys: deque[str] = field(default_factory=lambda: deque(maxlen=_KEYS))  # Idempotency-Keys of the latest steps

    @property
    def reserved_bytes(self) -> int:
        rows = self.request.rows or () if self.request else ()
        ids = len(self.tokens) + (len(self.request.tokens) if self.request else 0)
        ids += sum(len(word) + 2 for word in self.verifier.config.bad_words)
        row_bytes = sum(len(row.values) + len(row.ids or b"") for row in rows)
        return self.cache.reserved_bytes + _ID_BYTES * ids + sum(map(len, self.keys)) + row_bytes

    def record(self, request: VerifyRequest, response: VerifyResponse, tokens: list[int]) -> None:
        """Append the verdict to the text `tokens`."""
        self.request = request
        self.response = response
        accepted = [request.draft_tokens[node] for node in response.accepted_nodes]
        self.tokens = [*tokens, *accepted, *([] if response.token is None else [response.token])]


@dataclass(eq=False)
class Contexts:
    """Contexts, evicted by count, total bytes and idle time.

    All methods run in the worker's thread, without locks. The worker changes jobs between the chunks of a prefill, and
    where a step waits. A context in use is neither evicted nor deleted; a second request for it raises `ContextInUse`.
    """

    make_cache: Callable[[], CachedModel]
    _: KW_ONLY
    vocab_size: int
    context: int  # longest text, in tokens
    stop: frozenset[int] = frozenset()
    budget_bytes: int = 2 << 30
    max_contexts: int = 256
    expiry_s: float = 600.0
    clock: Callable[[], float] = time.monotonic
    noise_sources: NoiseSources = position_noise
    ban: Ban | None = None
    observe: ObserveStep = lambda request, response: None  # called for each verdict, not for its repetitions

    def __post_init__(self) -> None:
        # Keys are owner and id; the least recently used context is first.
        self._contexts: OrderedDict[tuple[str, str], EdgeContext] = OrderedDict()
        self._in_use: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def reserved_bytes(self) -> int:
        return sum(context.reserved_bytes for context in self._contexts.values())

    def delete(self, context_id: str, owner: str = "") -> bool:
        key = (owner, context_id)
        if key in self._in_use or key not in self._contexts:
            return False
        self._contexts.pop(key).cache.close()
        return True

    def verify(
        self, request: VerifyRequest, owner: str = "", retry_key: str = ""
    ) -> Generator[PrefillPosition | VerifyResponse]:
        """Yield positions while the text is read, then the response to the client `owner`.

        A repeated request gets the same response; after an interruption it continues the prefill.

        Raises: UnknownContext, StaleRequest, ContextInUse, UserError.
        """
        self._evict(self.clock() - self.expiry_s)
        key = (owner, request.context_id)
        if key in self._in_use:
            raise ContextInUse(f"context {key[1]} is in use: send the request again")
        self._in_use.add(key)
        try:
            draft = draft_from_request(request, self.vocab_size)
            stored = self._contexts.get(key)
            step = next_step(request, stored, retry_key)
            if step is None:
                assert stored is not None and stored.response is not None
                response = stored.response
            else:
                context = self._open(stored, step) if step.base == 0 else self._continue(stored, step)
                tokens = [*context.tokens[: step.base], *step.tokens]
                self._check_length(len(tokens) + draft.depth)
                self._store(key, context)
                yield from map(PrefillPosition, context.cache.prefill(tokens))
                start = self.clock()
                response = context.verifier.respond(step, context.cache.score, tokens, draft)
                response.metrics.cloud_s = self.clock() - start
                if request.step is None:
                    response = response.model_copy(update={"bonus": None})
                    context.keys.append(retry_key)
                context.record(step, response, tokens)
                self._store(key, context)
                if not response.wanted:
                    self.observe(step, response)
        finally:
            self._in_use.remove(key)
        self._evict()
        yield response

    def _store(self, key: tuple[str, str], context: EdgeContext) -> None:
        context.last_used = self.clock()
        self._contexts[key] = context
        self._contexts.move_to_end(key)

    def stream(self, request: StreamRequest) -> Iterator[int | PrefillPosition]:
        """Decode autoregressively up to a stop token or the context length, after the prefill."""
        verifier = TextVerifier.of(request.config, self.vocab_size, self.noise_sources, self.ban)
        tokens = list(request.tokens)
        check_token_ids(tokens, self.vocab_size)
        self._check_length(len(tokens))
        with closing(self.make_cache()) as cache:
            yield from map(PrefillPosition, cache.prefill(tokens))
            for _ in range(min(request.max_tokens, self.context - len(tokens) + 1)):
                token = verifier.verify(cache.score, tokens, Draft()).token
                assert token is not None
                tokens.append(token)
                yield token
                if token in self.stop:
                    return

    def _open(self, old: EdgeContext | None, request: VerifyRequest) -> EdgeContext:
        if request.config is None:
            raise UserError("a new context requires sampling_cfg: send it with the complete text")
        if not request.tokens:
            raise UserError("the text is empty: send its tokens")
        verifier = TextVerifier.of(request.config, self.vocab_size, self.noise_sources, self.ban)
        return EdgeContext(request.epoch, verifier, old.cache if old else self.make_cache(), self.clock())

    def _continue(self, context: EdgeContext | None, request: VerifyRequest) -> EdgeContext:
        if context is None or request.epoch > context.epoch:
            raise UnknownContext("this context does not exist: send the complete text")
        if (request.base or 0) > len(context.tokens) or digest(context.tokens[: request.base]) != request.digest:
            raise UnknownContext("the texts of edge and cloud differ: send the complete text")
        if request.config is not None and request.config != context.verifier.config:
            raise UserError("sampling_cfg is fixed when a context is opened: open another context to change it")
        return context

    def _check_length(self, count: int) -> None:
        if count > self.context:
            raise UserError(f"{count:,} tokens do not fit the model's {self.context:,}: shorten the text")

    def _evict(self, oldest: float = -math.inf) -> None:
        idle = [key for key in self._contexts if key not in self._in_use]
        for key in idle:
            if self.reserved_bytes <= self.budget_bytes:
                break
            self._contexts[key].cache.drop_recordings()
        for key in idle:
            excess = len(self) > self.max_contexts or self.reserved_bytes > self.budget_bytes
            if not excess and self._contexts[key].last_used >= oldest:
                return
            self._contexts.pop(key).cache.close()


def next_step(request: VerifyRequest, context: EdgeContext | None, retry_key: str) -> VerifyRequest | None:
    """Return the request with its number; None if it repeats the last request. Raises: UnknownContext, StaleRequest."""
    if context is None:
        return numbered(request, None)
    last = context.request
    if request.step is None and retry_key and retry_key in context.keys:
        if retry_key != context.keys[-1]:
            raise StaleRequest("a later step followed the one of this Idempotency-Key: send a new key for each step")
        if last is None or request != last.model_copy(update={"epoch": 0, "step": None, "base": None, "digest": ""}):
            raise UserError("this Idempotency-Key belongs to a different request: send a new key for each step")
        return None
    request = numbered(request, context)
    if request.epoch < context.epoch:
        raise StaleRequest(
            f"epoch {request.epoch} of this context has ended (current: {context.epoch}): open another context"
        )
    if request.epoch > context.epoch or last is None:
        return request
    if last == request:
        return None
    step, last_step = request.step or 0, last.step or 0
    needs_rows = context.response is not None and context.response.wanted
    if step < last_step or (step == last_step and not (needs_rows and request.rows)):
        raise StaleRequest(f"step {step} was superseded by step {last_step}: open another context")
    return request


def numbered(request: VerifyRequest, context: EdgeContext | None) -> VerifyRequest:
    """Return `request` as the next step of its context: without `round` it has the practice guide's fields.

    The first contains the text as `tokens` (section 5.1); then accepted and corrected tokens are appended, without
    bonus. Repetitions need an `Idempotency-Key`, since two steps may be equal.
    """
    if request.step is not None:
        return request
    if not request.draft_tokens:
        raise UserError("draft_tokens is empty: draft a token, or send round for steps without a draft")
    if request.tokens:
        epoch = 0 if context is None else context.epoch + 1
        return request.model_copy(update={"epoch": epoch, "step": 0, "base": 0})
    if context is None:
        raise UnknownContext("this context does not exist, or was evicted: send its complete text as tokens")
    last, text = context.request, context.tokens
    step = 0 if last is None or last.step is None else last.step + 1
    return request.model_copy(update={"epoch": context.epoch, "step": step, "base": len(text), "digest": digest(text)})
