"""Remote target at the edge: connection, verification and streaming, with fallback verdicts.

Only new tokens are sent. A request without a response is repeated under its step number.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias, cast

from specdemo.core.decode import Verifier
from specdemo.core.errors import UserError
from specdemo.core.link_stats import LinkStats
from specdemo.core.rules import RULES
from specdemo.core.sampling import top_tokens, with_tokens
from specdemo.core.step import Draft, TopTokens, Verdict, common_prefix
from specdemo.core.verifier import position_tokens
from specdemo.remote.deadline import ConnectionLost, StepDeadline
from specdemo.remote.gates import EdgeVerifier, provisional_verdict, verdict_from_tokens
from specdemo.remote.link import (
    ContextGone,
    NoResponse,
    PromptReading,
    RequestSuperseded,
    ServiceBusy,
)
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
from specdemo.remote.replicas import Client, ReplicaSwitched
from specdemo.remote.session import ContextState, RemoteSession
from specdemo.worker import Stopped, device_released, interruptible, run_in_thread, wait_for

MAX_TIMEOUT_S = 8.0  # longest wait for a response to a request
CLOSE_S = 1.0
_READ_S = 0.01  # time per unread token
RowFormat = Literal["float32", "float16", "scalar"]
LateVerdict: TypeAlias = "tuple[Future[Verdict], int]"  # length of the text


@dataclass(frozen=True)
class Deadlines:
    """Time limits; unless `strict`, a token is committed provisionally after `deadline_s`."""

    deadline_s: float = 0.4
    lost_s: float = 30.0
    strict: bool = True

    def first_timeout(self, unread: int) -> float:
        return max(self.deadline_s, min(self.deadline_s + _READ_S * unread, MAX_TIMEOUT_S))


class _RequestTimes:
    """Durations of the requests of a step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requested = self._started = clock()
        self._failed: float | None = None  # time of the first failed request
        self._switched = False
        self.sent = 0
        self.cloud_s = self.rtt_s = self.gap_s = 0.0

    def start(self) -> None:
        self.sent += 1
        self._started = self._clock()

    def fail(self, switched: bool) -> None:
        self._failed = self._started if self._failed is None else self._failed
        self._switched |= switched

    def end(self, cloud_s: float) -> None:
        if self._failed is not None:
            self.gap_s += self._started - self._failed
            self._requested = self._started if self._switched else self._requested
            self._failed, self._switched = None, False
        now = self._clock()
        self.cloud_s += cloud_s
        self.rtt_s += now - self._requested - cloud_s
        self._requested = now

    @property
    def elapsed(self) -> float:
        return self._clock() - self._started

    @property
    def link(self) -> LinkStats:
        return LinkStats(cloud_s=self.cloud_s, rtt_s=self.rtt_s, sent=self.sent)


class _LastService:
    """Service that responded to the last step."""

    def __init__(self, http: Client) -> None:
        self._http, self._replica = http, ""
        self._url, self._numerics = http.url, http.identity.numerics

    def note(self, verdict: Verdict, gap_s: float, reread: int) -> Verdict:
        """Add a change of the service to the verdict."""
        url, identity = self._http.url, self._http.identity
        switched = url != self._url or (self._replica != "" and identity.replica != self._replica)
        measures = {"switched": 1, "gap_s": gap_s, "reread": reread} if switched else {}
        measures |= {"numerics": 1} if identity.numerics != self._numerics else {}
        replica = identity.replica if switched or identity.replica != self._replica else ""
        self._url, self._replica = url, identity.replica
        self._numerics = identity.numerics
        link = replace(verdict.link or LinkStats(), **cast("dict[str, Any]", measures))
        return replace(verdict, link=link, replica=replica)


@dataclass(eq=False)
class RemoteVerifier:
    """Verify drafts in the cloud (practice guide, sections 3 and 5).

    Point masses, and rules that sample from p, need no q. Otherwise the draft probabilities are sent, and rows on
    demand in the format `rows`; "scalar" sends none (lossy). `edge` continues after a lost connection.
    """

    http: Client
    config: VerifyConfig
    _: KW_ONLY
    rows: RowFormat = "float32"
    candidates: int = 1
    top: int = 0
    deadlines: Deadlines = Deadlines()
    edge: Verifier | None = None
    session: RemoteSession = field(default_factory=RemoteSession)
    context_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    alone: bool = False
    vocab_size: int = MAX_VOCAB
    has_entry: Callable[[int], bool] = lambda token: True
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._edge = None if self.edge is None else EdgeVerifier(self.edge)
        self._epoch, self._step = 0, -1
        self._cloud_tokens: list[int] = []
        if (earlier := self.session.take(self.config)) is not None:
            self.context_id, self._cloud_tokens = earlier.context_id, earlier.tokens
            self._epoch, self._step = earlier.epoch, earlier.step
        self._late: LateVerdict | None = None
        self._service = _LastService(self.http)
        self._announce_loss, self._closed = self.alone, False

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        if self.alone:
            link = LinkStats(lost=1 if self._announce_loss else None)
            self._announce_loss = False
            return self._verify_locally(tokens, draft, link)
        before = replace(self.http.network.counts)
        link, verdict = LinkStats(), None
        try:
            if self._late is not None:
                verdict, link = self._resolve_late(self._late, tokens, draft)
            verdict = verdict or self._verify_remotely(tokens, draft, hard_mask, link)
        except ConnectionLost:
            if self._edge is None:
                raise
            self.alone, self._late = True, None
            verdict = self._verify_locally(tokens, draft, replace(link, lost=1))
        counts = self.http.network.counts
        link = replace(
            verdict.link or LinkStats(),
            bytes_up=counts.up - before.up,
            bytes_down=counts.down - before.down,
            up_s=counts.up_s - before.up_s,
            down_s=counts.down_s - before.down_s,
        )
        return replace(verdict, link=link)

    def close(self) -> None:
        self._closed = True
        if self.alone or not self._cloud_tokens or self._late is not None:  # a request may be running
            pass
        elif self.session.lasts:
            state = ContextState(self.context_id, self._epoch, self._step, self._cloud_tokens, self._deletion)
            self.session.keep(self.config, state)
        else:
            deleted = run_in_thread(self._deletion)
            with device_released():
                wait({deleted}, CLOSE_S)
        self.http.close()

    @property
    def _deletion(self) -> Callable[[], None]:
        timeout = min(self.deadlines.deadline_s, MAX_TIMEOUT_S)
        return partial(_delete_context, self.http, self.context_id, timeout)

    def _verify_remotely(
        self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None, link: LinkStats
    ) -> Verdict:
        self._step += 1
        request = partial(self._exchange, list(tokens), draft, hard_mask)
        if self.deadlines.strict or not draft.tokens:
            try:
                verdict = interruptible(request)
            except Stopped:
                self.alone = True  # the request is still running
                raise
        else:
            future = run_in_thread(request)
            if not wait_for(future, self.deadlines.deadline_s):
                self._late = future, len(tokens)
                return provisional_verdict(draft, link, request_sent=True)
            verdict = future.result()
        measured = replace(verdict.link or LinkStats(), confirmed=link.confirmed, overruled=link.overruled)
        return replace(verdict, link=measured, draft_top=self._draft_top(draft, verdict))

    def _draft_top(self, draft: Draft, verdict: Verdict) -> tuple[TopTokens, ...]:
        q = draft.probs.dense() if self.top and draft.probs is not None else None
        if q is None or not draft.tokens:
            return ()
        tokens = position_tokens(draft, verdict.token, verdict.accepted)
        for row, top in zip(tokens, verdict.target_top, strict=False):
            row.update(token for token, _ in top.top if token < q.shape[-1])
        return with_tokens(top_tokens(q, self.top), q, [tokens[parent + 1] for parent in draft.parents])

    def _exchange(self, tokens: list[int], draft: Draft, hard_mask: Sequence[int] | None) -> Verdict:
        rows: list[DraftRow] = []
        unread = len(tokens) - common_prefix(self._cloud_tokens, tokens)
        deadline = StepDeadline(self.deadlines.lost_s, unread, self.clock)
        self.http.network.limit = deadline.remaining
        timeout, measured = self.deadlines.first_timeout(unread), _RequestTimes(self.clock)
        while True:
            request = self._request(tokens, draft, hard_mask, rows)
            measured.start()
            try:
                response = self.http.call("POST", "/v1/rounds", request, VerifyResponse, timeout)
                if (response.epoch, response.step) != (request.epoch, request.step):
                    raise NoResponse("the response belongs to another step")
            except (ContextGone, RequestSuperseded, NoResponse) as failure:
                if self._recover(failure, deadline, len(tokens)):
                    continue
                immediate = isinstance(failure, ServiceBusy) or measured.elapsed < timeout / 2
                if immediate and (measured.sent > 1 or isinstance(failure, NoResponse)):  # not at the first eviction
                    self.sleep(min(timeout / 4, 0.25))
                timeout = min(2 * timeout, MAX_TIMEOUT_S)
                switched = isinstance(failure, ReplicaSwitched)
                measured.fail(switched)
                if switched:
                    timeout = max(timeout, self.deadlines.first_timeout(len(tokens)))
                continue
            measured.end(response.metrics.cloud_s)
            if not response.wanted:
                break
            rows = self._rows(draft, response.wanted, rows)
        verdict = response.to(draft, self.vocab_size)
        committed = [*(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens]
        _check_entries(committed, self.has_entry, self.http.url)
        self._cloud_tokens = [*tokens, *committed]
        verdict = replace(verdict, link=replace(measured.link, rows=len(rows)))
        return self._service.note(verdict, measured.gap_s, len(tokens))

    def _recover(self, failure: Exception, deadline: StepDeadline, length: int) -> bool:
        """Prepare the next request; return True for progress. Raises `ConnectionLost`."""
        if isinstance(failure, ContextGone):
            self._epoch, self._cloud_tokens = self._epoch + 1, []
        elif isinstance(failure, RequestSuperseded):  # another edge or a late copy uses the context
            self.context_id = uuid.uuid4().hex
            self._epoch, self._cloud_tokens = 0, []
        if not isinstance(failure, NoResponse):
            deadline.reread(length)
        if self._closed:
            raise ConnectionLost(f"the connection to {self.http.url} was closed") from failure
        advice = "restart it, or continue without it (--on-loss edge)"
        progress = isinstance(failure, PromptReading) and deadline.report(failure.position, length)
        deadline.check(self.http.url, failure, advice)
        return progress

    def _request(
        self, tokens: list[int], draft: Draft, hard_mask: Sequence[int] | None, rows: list[DraftRow]
    ) -> VerifyRequest:
        if len(draft) > MAX_DRAFT:
            raise UserError(f"a service verifies {MAX_DRAFT} draft tokens, not {len(draft):,}: draft fewer")
        base = common_prefix(self._cloud_tokens, tokens)
        rule = RULES[self.config.rule]
        q = draft.token_probs if rule.needs_q else None
        sampled = q is not None and draft.probs is not None
        needs_rows = rule.needs_rows and (self.config.adjust or not rule.adjusts)
        return VerifyRequest(
            context_id=self.context_id,
            epoch=self._epoch,
            step=self._step,
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
        rows, known = [*sent], {row.node for row in sent}
        for node in wanted:
            if q is None or node >= len(draft) or node in known:
                kind = "the same row again" if node in known else "an unknown row"
                raise UserError(f"{self.http.url} requests {kind}: it is no specdemo service of this version")
            known.add(node)
            rows.append(DraftRow.of(node, q[node], "f2" if self.rows == "float16" else "f4"))
        return rows

    def _resolve_late(self, late: LateVerdict, tokens: Sequence[int], draft: Draft) -> tuple[Verdict | None, LinkStats]:
        future, length = late
        if not wait_for(future, self.deadlines.deadline_s if draft.tokens else None):
            return provisional_verdict(draft, LinkStats(), request_sent=False), LinkStats()
        measured = future.result().link or LinkStats()
        self._late = None
        verified, unverified = self._cloud_tokens[length:], list(tokens[length:])
        same = common_prefix(verified, unverified)
        link = replace(measured, confirmed=same, overruled=int(same < min(len(verified), len(unverified))))
        if same < len(unverified) or same == len(verified):
            return None, link
        return verdict_from_tokens(draft, verified[same:], link), link

    def _verify_locally(self, tokens: Sequence[int], draft: Draft, link: LinkStats) -> Verdict:
        assert self._edge is not None
        return self._edge.verify(tokens, draft, link)


def _delete_context(http: Client, context_id: str, timeout: float) -> None:
    http.network.limit = StepDeadline(CLOSE_S).remaining
    with suppress(NoResponse, ContextGone, UserError):  # the context expires
        http.call("DELETE", f"/v1/contexts/{context_id}", None, DeleteResponse, timeout)
    http.close()


@dataclass(eq=False)
class StreamingVerifier:
    """Stream autoregressive text from the cloud; interrupted streams are resumed."""

    http: Client
    config: VerifyConfig
    max_tokens: int  # length of the rest of the text
    deadlines: Deadlines = Deadlines()
    vocab_size: int = MAX_VOCAB
    has_entry: Callable[[int], bool] = lambda token: True
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    _stream: Generator[int | PrefillPosition | None, None, None] | None = None

    def __post_init__(self) -> None:
        self._service = _LastService(self.http)
        self._failed: float | None = None  # time of the first failed request

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        counts = self.http.network.counts
        up, down = counts.up, counts.down
        deadline = StepDeadline(self.deadlines.lost_s, len(tokens) if self._stream is None else 0, self.clock)
        self.http.network.limit = deadline.remaining
        while (token := self._next(tokens, deadline)) is None:
            pass
        self.max_tokens -= 1
        link = LinkStats(bytes_up=counts.up - up, bytes_down=counts.down - down)
        verdict = Verdict((), token, choices=((token,),), link=link)
        gap_s = 0.0 if self._failed is None else self.clock() - self._failed
        self._failed = None
        return self._service.note(verdict, gap_s, len(tokens))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self.http.close()

    def _next(self, tokens: Sequence[int], deadline: StepDeadline) -> int | None:
        timeout = self.deadlines.deadline_s
        if self._stream is None:
            request = StreamRequest(tokens=list(tokens), config=self.config, max_tokens=self.max_tokens)
            self._stream = self.http.tokens("/v1/texts?progress=1", request, max(timeout, MAX_TIMEOUT_S))
        attempt = self.clock()
        try:
            token: int | PrefillPosition | None = interruptible(partial(next, self._stream))
        except Stopped:
            self._stream = None  # another thread still reads it
            raise
        except (NoResponse, ReplicaSwitched) as failure:
            self._stream = None
            deadline.reread(len(tokens))
            deadline.check(self.http.url, failure, "restart it")
            is_first = self._failed is None
            if is_first:
                self._failed = attempt
            if not (is_first and isinstance(failure, ReplicaSwitched)):
                interruptible(partial(self.sleep, min(timeout / 4, 0.25)))
            return None
        if isinstance(token, PrefillPosition):
            deadline.report(token.count, len(tokens))
            return None
        if token is None:
            raise UserError(f"the cloud at {self.http.url} ended the text early: its stop tokens differ")
        if not 0 <= token < self.vocab_size:
            raise UserError(f"the cloud at {self.http.url} sent an unknown token id: use the same target at both ends")
        _check_entries([token], self.has_entry, self.http.url)
        return token


def _check_entries(tokens: Sequence[int], has_entry: Callable[[int], bool], url: str) -> None:
    for token in tokens:
        if not has_entry(token):
            raise UserError(
                f"the cloud at {url} committed token {token:,}, which the tokenizer lacks: use the same target "
                "at both ends"
            )
