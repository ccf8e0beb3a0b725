"""Remote target of a run: verification and streaming at the edge with fallback verdicts, description, connection.

Only new tokens are sent. A request without a response is repeated under its step number.
"""

from __future__ import annotations

import os
import secrets
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from specdemo.core.decode import Verifier
from specdemo.core.errors import UserError
from specdemo.core.rules import DEFAULT_RULE, RULES
from specdemo.core.sampling import Noise, fitted, top_tokens, with_tokens
from specdemo.core.step import Draft, Source, TopTokens, Verdict, common_prefix
from specdemo.core.verifier import ModelVerifier, Target, VerifierInputs, configured_rule, position_tokens
from specdemo.models.batch_invariance import COMPARED_ROWS
from specdemo.models.engines.llama_weights import with_dropout
from specdemo.models.hub import Hub
from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.tokenizer import has_entry
from specdemo.models.zoo import fingerprint
from specdemo.remote.access import SERVICES, TOKEN, token_for
from specdemo.remote.config import ENCODINGS, CloudConfig
from specdemo.remote.connection import MAX_TIMEOUT_S, Connection, ConnectionLost, Deadlines, Requests
from specdemo.remote.gates import (
    PASSES,
    EdgeVerifier,
    GatedVerifier,
    IsName,
    RecordingPolicy,
    mc_dropout,
    unverified_verdict,
    verdict_from_tokens,
    word_rules,
)
from specdemo.remote.link import Cause, HttpClient, MeteredNetwork, NewContext, ResendText, Retry
from specdemo.remote.protocol import (
    MAX_DRAFT,
    MAX_TEXT,
    MAX_VOCAB,
    DeleteResponse,
    DraftRow,
    PrefillPosition,
    ServiceInfo,
    StreamRequest,
    VerifyConfig,
    VerifyRequest,
    VerifyResponse,
    digest,
)
from specdemo.worker import device_released, interruptible, wait_for

CLOSE_S = 1.0


@dataclass
class ContextState:
    """Context of a service as the edge assumes it."""

    context_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    epoch: int = 0
    step: int = -1
    tokens: list[int] = field(default_factory=list)


@dataclass
class RemoteSession:
    """Secret owner of contexts. `lasts`: it keeps them for the next turn of a conversation; they expire."""

    lasts: bool = False
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    contexts: dict[str, ContextState] = field(default_factory=dict, repr=False)  # by `VerifyConfig` in JSON


@dataclass(eq=False)
class RemoteVerifier:
    """Verify drafts in the cloud (practice guide, sections 3 and 5).

    Point masses, and rules that sample from p, need no q. Otherwise the draft probabilities are sent, and rows on
    demand in the format `rows`; "scalar" sends none (lossy). `edge` continues after a lost connection.
    """

    connection: Connection
    config: VerifyConfig
    _: KW_ONLY
    rows: str = "float32"  # a key of `Q_ROWS`
    candidates: int = 1
    top: int = 0
    deadlines: Deadlines = Deadlines()
    edge: EdgeVerifier | None = None
    session: RemoteSession = field(default_factory=RemoteSession)
    is_lost: bool = False
    vocab_size: int = MAX_VOCAB
    has_entry: Callable[[int], bool] = lambda token: True

    def __post_init__(self) -> None:
        self._context = self.session.contexts.pop(self.config.model_dump_json(), ContextState())
        self._pending: Future[Verdict] | None = None
        self._pending_length = 0  # tokens of the text that the pending verdict continues
        self._counts = {"lost": 1} if self.is_lost else {}  # measures of the next verdict, besides those of the network
        self.connection.start_run()

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        if not self.is_lost:
            try:
                verdict = self._resolve_pending(tokens, draft) or self._verify_remotely(tokens, draft, hard_mask)
                return self._measured(verdict)
            except ConnectionLost:
                if self.edge is None:
                    raise
                self.is_lost = True
                self._counts["lost"] = 1
        assert self.edge is not None
        verdict = self.edge.verify(tokens, draft)
        return self._measured(verdict) if self._counts else verdict

    def close(self) -> None:
        if self._context.tokens and not self.is_lost and self._pending is None:  # otherwise a request may be running
            if self.session.lasts:
                self.session.contexts[self.config.model_dump_json()] = self._context
            else:
                deleted = self.connection.submit(self._delete_context)
                with device_released():
                    wait({deleted}, CLOSE_S)
        self.connection.close()

    def _delete_context(self) -> None:
        path = f"/v1/contexts/{self._context.context_id}"
        requests = Requests(self.connection, Deadlines(lost_s=CLOSE_S))
        with suppress(Retry, ResendText, UserError):  # the context expires
            self.connection.client.call("DELETE", path, None, DeleteResponse, requests.remaining())

    def _measured(self, verdict: Verdict) -> Verdict:
        """Add the measurements of the link since the last step."""
        link, replica = self.connection.network.take(**self._counts)
        self._counts = {}
        return replace(verdict, link=link, replica=replica)

    def _resolve_pending(self, tokens: Sequence[int], draft: Draft) -> Verdict | None:
        """Return a provisional verdict, or that of a late response; None if a request is required."""
        if self._pending is None:
            return None
        if not wait_for(self._pending, self.deadlines.deadline_s if draft.tokens else None):
            return unverified_verdict(draft, (0,), Source.PROVISIONAL)
        self._received()
        verified = self._context.tokens[self._pending_length :]
        unverified = list(tokens[self._pending_length :])
        same = common_prefix(verified, unverified)
        self._counts = {"confirmed": same, "overruled": int(same < min(len(verified), len(unverified)))}
        if same < len(unverified) or same == len(verified):
            return None
        return verdict_from_tokens(draft, verified[same:])

    def _verify_remotely(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None) -> Verdict:
        self._context.step += 1
        self._pending = self.connection.submit(partial(self._exchange, list(tokens), draft, hard_mask))
        self._pending_length = len(tokens)
        may_wait = self.deadlines.strict or not draft.tokens
        if not wait_for(self._pending, None if may_wait else self.deadlines.deadline_s):
            return unverified_verdict(draft, (0,), Source.PROVISIONAL, request_sent=True)
        verdict = self._received()
        return replace(verdict, draft_top=self._draft_top(draft, verdict))

    def _received(self) -> Verdict:
        assert self._pending is not None
        received = self._pending
        self._pending = None
        return received.result()

    def _draft_top(self, draft: Draft, verdict: Verdict) -> tuple[TopTokens, ...]:
        q = draft.probs.dense() if self.top and draft.probs is not None else None
        if q is None or not draft.tokens:
            return ()
        tokens = position_tokens(draft, verdict.token, verdict.accepted)
        for row, top in zip(tokens, verdict.target_top, strict=False):
            row.update(token for token, _ in top.top if token < q.shape[-1])
        return with_tokens(top_tokens(q, self.top), q, [tokens[parent + 1] for parent in draft.parents])

    def _exchange(self, tokens: list[int], draft: Draft, hard_mask: Sequence[int] | None) -> Verdict:
        """Request the verdict, in the thread of the connection."""
        context = self._context
        unread = len(tokens) - common_prefix(context.tokens, tokens)
        advice = "restart it, or continue without it (--on-loss edge)"
        requests = Requests(self.connection, self.deadlines, len(tokens), unread, advice)
        rows: list[DraftRow] = []
        while True:
            request = self._request(tokens, draft, hard_mask, rows)
            try:
                response = requests.send(partial(_post, request))
            except ResendText:
                context.tokens = []
                context.epoch += 1
                continue
            except NewContext:
                context = self._context = ContextState(step=context.step)
                continue
            requests.add_response(response.metrics.cloud_s)
            if not response.wanted:
                break
            rows = self._rows(draft, response.wanted, rows)
        self.connection.network.measures["rows"] = len(rows)
        verdict = response.to(draft, self.vocab_size)
        committed = [*(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens]
        _check_entries(committed, self.has_entry, self.connection.url)
        context.tokens = [*tokens, *committed]
        return verdict

    def _request(
        self, tokens: list[int], draft: Draft, hard_mask: Sequence[int] | None, rows: list[DraftRow]
    ) -> VerifyRequest:
        if len(draft) > MAX_DRAFT:
            raise UserError(f"a service verifies {MAX_DRAFT} draft tokens, not {len(draft):,}: draft fewer")
        context = self._context
        base = common_prefix(context.tokens, tokens)
        rule = RULES[self.config.rule]
        q = draft.token_probs if rule.needs_q else None
        sampled = q is not None and draft.probs is not None
        needs_rows = rule.needs_rows and (self.config.adjust or not rule.adjusts)
        return VerifyRequest(
            context_id=context.context_id,
            epoch=context.epoch,
            step=context.step,
            base=base,
            digest=digest(tokens[:base]),
            tokens=tokens[base:],
            draft_tokens=list(draft.tokens),
            k=len(draft),
            parents=None if draft.is_chain else list(draft.parents),
            token_probs=None if q is None else list(q),
            rows=rows if sampled and needs_rows and self.rows != "scalar" else None,
            hard_mask=None if hard_mask is None else cast(list[Literal[0, 1]], list(hard_mask)),
            config=None if base else self.config,
            candidates=self.candidates,
            top=self.top,
        )

    def _rows(self, draft: Draft, wanted: Sequence[int], sent: list[DraftRow]) -> list[DraftRow]:
        q = None if draft.probs is None else draft.probs.dense()
        rows = [*sent]
        known = {row.node for row in sent}
        for node in wanted:
            if q is None or node >= len(draft) or node in known:
                kind = "the same row again" if node in known else "an unknown row"
                raise UserError(f"{self.connection.url} requests {kind}: it is no specdemo service of this version")
            known.add(node)
            rows.append(DraftRow.of(node, q[node], "f2" if self.rows == "float16" else "f4"))
        return rows


def _post(request: VerifyRequest, client: HttpClient, timeout: float) -> VerifyResponse:
    response = client.call("POST", "/v1/rounds", request, VerifyResponse, timeout)
    if (response.epoch, response.step) != (request.epoch, request.step):
        raise Retry("the response belongs to another step", Cause.BUSY)
    return response


@dataclass(eq=False)
class StreamingVerifier:
    """Stream autoregressive text from the cloud; interrupted streams are resumed."""

    connection: Connection
    config: VerifyConfig
    max_tokens: int  # length of the rest of the text
    deadlines: Deadlines = Deadlines()
    vocab_size: int = MAX_VOCAB
    has_entry: Callable[[int], bool] = lambda token: True

    def __post_init__(self) -> None:
        self._stream: Generator[int | PrefillPosition | None, None, None] | None = None
        self.connection.start_run()

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        token = self.connection.run(partial(self._token, list(tokens)))
        self.max_tokens -= 1
        link, replica = self.connection.network.take()
        return Verdict((), token, choices=((token,),), link=link, replica=replica)

    def close(self) -> None:
        self.connection.close()

    def _token(self, tokens: list[int]) -> int:
        """Read the next token, in the thread of the connection."""
        requests = Requests(self.connection, self.deadlines, len(tokens), 0, "restart it")
        while True:
            try:
                token = requests.send(partial(self._read, tokens, requests))
                break
            except (ResendText, NewContext):
                continue
        url = self.connection.url
        if token is None:
            raise UserError(f"the cloud at {url} ended the text early: its stop tokens differ")
        if not 0 <= token < self.vocab_size:
            raise UserError(f"the cloud at {url} sent an unknown token id: use the same target at both ends")
        _check_entries([token], self.has_entry, url)
        return token

    def _read(self, tokens: list[int], requests: Requests, client: HttpClient, timeout: float) -> int | None:
        if self._stream is None:
            requests.reread()
            request = StreamRequest(tokens=tokens, config=self.config, max_tokens=self.max_tokens)
            self._stream = client.tokens("/v1/texts?progress=1", request, max(timeout, MAX_TIMEOUT_S))
        try:
            while isinstance(item := next(self._stream), PrefillPosition):
                requests.report(item.count)
            return item
        except Exception:
            self._stream = None
            raise


def _check_entries(tokens: Sequence[int], has_entry: Callable[[int], bool], url: str) -> None:
    for token in tokens:
        if not has_entry(token):
            raise UserError(
                f"the cloud at {url} committed token {token:,}, which the tokenizer lacks: use the same target "
                "at both ends"
            )


_WITHHELD = f" ({TOKEN} is sent only to this machine and to https addresses in {SERVICES}: add the address there)"
MAX_PADDING = 2  # vocabulary of a model per token of its tokenizer; padding is below 2%


@dataclass(eq=False)
class RemoteModel:
    """`Target` behind a service: tokenizer, description and connection. Its verifiers run at the edge."""

    connection: Connection
    info: ServiceInfo
    tokenizer: Any
    cloud: CloudConfig
    session: RemoteSession
    lost: bool = False
    is_name: IsName | None = None  # see gate `names`

    encoder = False  # unsupported by the service
    opening = ()
    device = None
    pass_costs = None

    def __post_init__(self) -> None:
        self.name = self.info.name
        self.vocab_size = self.info.vocab_size
        self.stop = frozenset(self.info.stop)
        self.context = self.info.context
        self.chains_only = self.info.chains_only
        self.weight_bytes = self.info.weight_bytes

    @property
    def environment(self) -> dict[str, Any]:
        info = self.info
        return {
            "device": f"{info.device} at {self.cloud.remote}",
            "dtype": info.dtype,
            "threads": info.threads,
            "engine": info.engine,
            "target_bytes": info.weight_bytes,
        }

    def bit_equal(self, longest_draft: int | None, length: int) -> bool:
        """See `Target.bit_equal`. The description of a service has no compared length of the text."""
        return self.info.bit_equal and longest_draft is not None and longest_draft < COMPARED_ROWS

    def open_cache(self, open: Callable[..., Any], taps: tuple[int, ...]) -> None:
        """Return None: the cache is in the service."""

    def verifier(self, inputs: VerifierInputs) -> Verifier:
        """Return a verifier at the edge, gated if the options have gates."""
        if inputs.logprobs is not None:
            raise UserError("log-probabilities need a local target: omit logprobs, or choose mode off")
        verifier = self._client(inputs)
        inputs.on_close(verifier.close)
        if not self.cloud.gates:
            return verifier
        recorder, variance = inputs.policy, None
        assert isinstance(recorder, RecordingPolicy)
        if "variance" in self.cloud.gates:
            model = inputs.draft_caches[0].model
            variance = mc_dropout([inputs.open(with_dropout(model, seed)).score for seed in range(PASSES)])
        always = word_rules(self.tokenizer, self.cloud, self.is_name) if self.cloud.always else None
        thresholds, max_hard = self.cloud.thresholds, self.cloud.gate_ratio
        return GatedVerifier(verifier, recorder, thresholds, max_hard, always=always, variance=variance)

    def close(self) -> None:
        self.connection.close()

    def _client(self, inputs: VerifierInputs) -> RemoteVerifier | StreamingVerifier:
        cloud, options = self.cloud, inputs.options
        config = VerifyConfig(
            **inputs.sampling.numbers,
            bad_texts=list(options.bad_words),
            seed=options.seed,
            rule=options.rule,
            threshold=RULES[options.rule].threshold if options.threshold is None else options.threshold,
            adjust=not options.skip_sample_adjustment,
        )
        known = partial(has_entry, self.tokenizer)
        deadlines = Deadlines(cloud.deadline_ms / 1000, cloud.lost_after_s, not cloud.provisional)
        if cloud.mode == "cloud_only":
            return StreamingVerifier(self.connection, config, options.max_tokens, deadlines, self.vocab_size, known)
        return RemoteVerifier(
            self.connection,
            config,
            rows=cloud.q_rows,
            candidates=inputs.candidates,
            top=options.top,
            deadlines=deadlines,
            edge=self._edge_verifier(inputs) if cloud.on_loss == "edge" else None,
            session=self.session,
            is_lost=self.lost,
            vocab_size=self.vocab_size,
            has_entry=known,
        )

    def _edge_verifier(self, inputs: VerifierInputs) -> EdgeVerifier | None:
        if not inputs.draft_caches:
            return None
        cache, options = inputs.draft_caches[0], inputs.options

        def score(tokens: Sequence[int], draft: Draft) -> Tensor:
            return fitted(cache.score(tokens, draft), self.vocab_size)

        accept, correct = Noise(options.seed, "edge accept"), Noise(options.seed, "edge")
        rule = configured_rule(DEFAULT_RULE)
        inner = ModelVerifier(score, inputs.sampling, rule, accept, correct, inputs.candidates, options.top)
        return EdgeVerifier(inner)


def connect(
    cloud: CloudConfig,
    target: ModelSpec,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
    *,
    edge: Target | None = None,
    hub: Hub | None = None,
    session: RemoteSession | None = None,
) -> RemoteModel:
    """Connect to the services; raise `UserError` if none responds or one has another tokenizer or model."""
    if not cloud.remote:
        raise UserError("the service address is missing: set it to http://host:port")
    tokenizer = interruptible(partial(read_tokenizer, target, hub))
    session = session or RemoteSession()
    connection = _connection(cloud, seed, clock, session.id)
    try:
        info = _service_info(connection, cloud, edge is not None)
        is_lost = info is None
        if info is None:
            assert edge is not None
            info = _info_without_service(target, tokenizer, edge)
        elif info.tokenizer != fingerprint(tokenizer) or info.vocab_size > MAX_PADDING * len(tokenizer):
            raise UserError(
                f"the service's target {info.name} ({info.vocab_size:,} token ids) and {target.title} have different "
                "tokenizers: use the same target at both ends"
            )
        return RemoteModel(connection, info, tokenizer, cloud, session, is_lost)
    except BaseException:
        connection.close()
        raise


def _connection(cloud: CloudConfig, seed: int, clock: Callable[[], float], session: str) -> Connection:
    """Return the connection to all addresses; each gets the token by its own rule."""
    network = MeteredNetwork(cloud.rtt_ms / 1000, cloud.loss, seed)
    make = partial(HttpClient, content_type=ENCODINGS[cloud.encoding], session=session, network=network)
    clients: list[HttpClient] = []
    for address in cloud.addresses:
        token = token_for(address, os.environ)
        is_withheld = token is None and bool(os.environ.get(TOKEN))
        clients.append(make(address, token=token, refusal=_WITHHELD if is_withheld else ""))
    return Connection(clients, session, clock)


def _service_info(connection: Connection, cloud: CloudConfig, has_edge: bool) -> ServiceInfo | None:
    """Return the description, or None if the edge decodes alone."""
    timeout = max(1.0, cloud.deadline_ms / 1000)
    try:
        return connection.run(partial(connection.describe, timeout, cloud.lost_after_s))
    except Retry as failure:
        if has_edge and cloud.on_loss == "edge":
            return None
        raise ConnectionLost(f"there is no service at {cloud.remote} ({failure}): start one with serve") from failure


def _info_without_service(target: ModelSpec, tokenizer: Any, edge: Target) -> ServiceInfo:
    return ServiceInfo(
        name=Path(target.name).name,
        vocab_size=max(edge.vocab_size, len(tokenizer)),
        context=MAX_TEXT,
        stop=sorted(edge.stop),
        tokenizer=fingerprint(tokenizer),
        engine="none",
        dtype=target.dtype,
        device="no device",
        threads=0,
        weight_bytes=0,
        bit_equal=False,
    )
