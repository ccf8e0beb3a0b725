"""Remote target at the edge: verification and streaming, with fallback verdicts.

Only new tokens are sent. A request without a response is repeated under its step number.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Literal, cast

from specdemo.core.errors import UserError
from specdemo.core.rules import RULES
from specdemo.core.sampling import top_tokens, with_tokens
from specdemo.core.step import Draft, Source, TopTokens, Verdict, common_prefix
from specdemo.core.verifier import position_tokens
from specdemo.remote.connection import (
    MAX_TIMEOUT_S,
    Connection,
    ConnectionLost,
    Deadlines,
    Requests,
)
from specdemo.remote.gates import EdgeVerifier, unverified_verdict, verdict_from_tokens
from specdemo.remote.link import Cause, HttpClient, NewContext, ResendText, Retry
from specdemo.remote.protocol import (
    MAX_DRAFT,
    MAX_VOCAB,
    DeleteResponse,
    DraftRow,
    PrefillPosition,
    StreamRequest,
    VerifyConfig,
    VerifyRequest,
    VerifyResponse,
    digest,
)
from specdemo.worker import device_released, wait_for

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
