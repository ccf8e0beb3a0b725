"""Remote target at the edge: connection, verification and streaming, with fallback verdicts.

Only new tokens are sent. A request without a response is repeated under its step number.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias, cast

from specdemo.core.decode import Verifier
from specdemo.core.errors import UserError
from specdemo.core.link_stats import LinkStats
from specdemo.core.rules import RULES
from specdemo.core.sampling import top_tokens
from specdemo.core.step import Draft, TopTokens, Verdict, common_prefix
from specdemo.core.verifier import position_tokens
from specdemo.remote.gates import EdgeVerifier, provisional_verdict, verdict_from_tokens
from specdemo.remote.link import (
    ContextGone,
    HttpClient,
    NoResponse,
    RequestSuperseded,
    ServiceBusy,
)
from specdemo.remote.protocol import (
    MAX_VOCAB,
    DeleteResponse,
    DraftRow,
    StreamRequest,
    VerifyConfig,
    VerifyRequest,
    VerifyResponse,
    digest,
)
from specdemo.worker import Stopped, device_released, interruptible, run_in_thread, wait_for

MAX_TIMEOUT_S = 8.0  # of an attempt
CLOSE_S = 1.0
RowFormat = Literal["float32", "float16", "scalar"]
LateVerdict: TypeAlias = "tuple[Future[Verdict], int]"  # length of the text


class ConnectionLost(UserError):
    """No response for `Deadlines.lost_s` seconds."""


@dataclass(frozen=True)
class Deadlines:
    """Time limits; unless `strict`, a token is committed provisionally after `deadline_s`."""

    deadline_s: float = 0.4
    lost_s: float = 30.0
    strict: bool = True


class RemoteVerifier:
    """Verify drafts in the cloud (practice guide, sections 3 and 5).

    Point masses, and rules that sample from p, need no q. Otherwise the draft probabilities are sent, and rows on
    demand in the format `rows`; "scalar" sends none (lossy). `edge` continues after a lost connection.
    """

    def __init__(
        self,
        http: HttpClient,
        config: VerifyConfig,
        *,
        rows: RowFormat = "float32",
        candidates: int = 1,
        top: int = 0,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        edge: Verifier | None = None,
        context_id: str | None = None,
        alone: bool = False,
        vocab_size: int = MAX_VOCAB,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http, self._config, self._rows, self._vocab_size = http, config, rows, vocab_size
        self._candidates, self._top, self._deadlines = candidates, top, deadlines
        self._edge = None if edge is None else EdgeVerifier(edge)
        self._clock, self._sleep = clock, sleep
        self._context_id, self._epoch, self._step = context_id or uuid.uuid4().hex, 0, -1
        self._cloud_tokens: list[int] = []
        self._late: LateVerdict | None = None
        self._alone, self._announce_loss = alone, alone
        self._closed = False
        self._sender = ThreadPoolExecutor(1, "cloud")  # requests may outlive deadlines

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        if self._alone:
            link = LinkStats(lost=1 if self._announce_loss else None)
            self._announce_loss = False
            return self._verify_locally(tokens, draft, link)
        before, link, verdict = replace(self._http.network.counts), LinkStats(), None
        try:
            if self._late is not None:
                verdict, link = self._resolve_late(self._late, tokens, draft)
            verdict = verdict or self._verify_remotely(tokens, draft, hard_mask, link)
        except ConnectionLost:
            if self._edge is None:
                raise
            self._alone, self._late = True, None
            verdict = self._verify_locally(tokens, draft, replace(link, lost=1))
        counts = self._http.network.counts
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
        self._sender.shutdown(wait=False, cancel_futures=True)
        if not self._alone and self._cloud_tokens and self._late is None:
            deleted = run_in_thread(self._delete_context)
            with device_released():
                wait({deleted}, CLOSE_S)
        self._http.close()

    def _delete_context(self) -> None:
        with suppress(NoResponse, UserError):  # the context expires
            path, timeout = f"/v1/contexts/{self._context_id}", min(self._deadlines.deadline_s, MAX_TIMEOUT_S)
            self._http.call("DELETE", path, None, DeleteResponse, timeout)

    # --- requests -------------------------------------------------------------------------------------------------

    def _verify_remotely(
        self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None, link: LinkStats
    ) -> Verdict:
        self._step += 1
        request = partial(self._exchange, list(tokens), draft, hard_mask)
        if self._deadlines.strict or not draft.tokens:
            try:
                verdict = interruptible(request)
            except Stopped:
                self._alone = True  # the request is still running
                raise
        else:
            future = self._sender.submit(request)
            if not wait_for(future, self._deadlines.deadline_s):
                self._late = future, len(tokens)
                return provisional_verdict(draft, link, request_sent=True)
            verdict = future.result()
        measured = replace(verdict.link or LinkStats(), confirmed=link.confirmed, overruled=link.overruled)
        return replace(verdict, link=measured, draft_top=self._draft_top(draft, verdict))

    def _draft_top(self, draft: Draft, verdict: Verdict) -> tuple[TopTokens, ...]:
        q = draft.probs.dense() if self._top and draft.probs is not None else None
        if q is None or not draft.tokens:
            return ()
        tokens = position_tokens(draft, verdict.token, verdict.accepted)
        for row, top in zip(tokens, verdict.target_top, strict=False):
            row.update(token for token, _ in top.top if token < q.shape[-1])
        return top_tokens(q, self._top, [tokens[parent + 1] for parent in draft.parents])

    def _exchange(self, tokens: list[int], draft: Draft, hard_mask: Sequence[int] | None) -> Verdict:
        """Repeat the request until a response arrives."""
        rows: list[DraftRow] = []
        start, timeout, sent = self._clock(), self._deadlines.deadline_s, 0
        cloud_s, rtt_s, asked = 0.0, 0.0, start
        while True:
            request = self._request(tokens, draft, hard_mask, rows)
            sent += 1
            attempt = self._clock()
            try:
                response = self._http.call("POST", "/v1/rounds", request, VerifyResponse, timeout)
                if (response.epoch, response.step) != (request.epoch, request.step):
                    raise NoResponse("the response belongs to another step")
            except ContextGone:
                self._epoch, self._cloud_tokens = self._epoch + 1, []
            except RequestSuperseded:  # by another edge or a late copy
                self._context_id, self._epoch, self._cloud_tokens = uuid.uuid4().hex, 0, []
            except NoResponse as failure:
                if self._closed:
                    raise ConnectionLost(f"the connection to {self._http.url} was closed") from failure
                advice = "restart it, or continue without it (--on-loss edge)"
                _raise_if_lost(failure, self._http.url, self._clock() - start, self._deadlines, advice)
                if isinstance(failure, ServiceBusy) or self._clock() - attempt < timeout / 2:  # failed immediately
                    self._sleep(min(timeout / 4, 0.25))
                timeout = min(2 * timeout, MAX_TIMEOUT_S)
            else:
                cloud_s += response.metrics.cloud_s
                rtt_s += self._clock() - asked - response.metrics.cloud_s
                if response.wanted_row is None:
                    break
                rows.append(self._row(draft, response.wanted_row))
                asked = self._clock()
        verdict = response.to(draft, self._vocab_size)
        self._cloud_tokens = [*tokens, *(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens]
        return replace(verdict, link=LinkStats(cloud_s=cloud_s, rtt_s=rtt_s, sent=sent, rows=len(rows)))

    def _request(
        self, tokens: list[int], draft: Draft, hard_mask: Sequence[int] | None, rows: list[DraftRow]
    ) -> VerifyRequest:
        base = common_prefix(self._cloud_tokens, tokens)
        rule = RULES[self._config.rule]
        q = draft.token_probs if rule.needs_q else None
        sampled = q is not None and draft.probs is not None
        return VerifyRequest(
            context_id=self._context_id,
            epoch=self._epoch,
            step=self._step,
            base=base,
            digest=digest(tokens[:base]),
            tokens=tokens[base:],
            draft_tokens=list(draft.tokens),
            k=len(draft),
            parents=None if draft.is_chain else list(draft.parents),
            token_probs=None if q is None else list(q),
            rows=rows if sampled and rule.adjusts and self._config.adjust and self._rows != "scalar" else None,
            hard_mask=None if hard_mask is None else cast(list[Literal[0, 1]], list(hard_mask)),
            config=None if base else self._config,
            candidates=self._candidates,
            top=self._top,
        )

    def _row(self, draft: Draft, node: int) -> DraftRow:
        q = None if draft.probs is None else draft.probs.dense()
        if q is None or node >= len(draft):
            raise UserError(f"{self._http.url} requests an unknown row: it is no specdemo service of this version")
        return DraftRow.of(node, q[node], "f2" if self._rows == "float16" else "f4")

    # --- late and lost responses ----------------------------------------------------------------------------------

    def _resolve_late(self, late: LateVerdict, tokens: Sequence[int], draft: Draft) -> tuple[Verdict | None, LinkStats]:
        """Compare a late response with the provisional tokens and apply it to `draft`."""
        future, length = late
        if not wait_for(future, self._deadlines.deadline_s if draft.tokens else None):
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


class StreamingVerifier:
    """Stream autoregressive text from the cloud; interrupted streams are resumed."""

    def __init__(
        self,
        http: HttpClient,
        config: VerifyConfig,
        max_tokens: int,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        vocab_size: int = MAX_VOCAB,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http, self._config, self._left, self._deadlines = http, config, max_tokens, deadlines
        self._vocab_size = vocab_size
        self._clock, self._sleep = clock, sleep
        self._stream: Iterator[int | None] | None = None

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        counts = self._http.network.counts
        up, down, start = counts.up, counts.down, self._clock()
        while (token := self._next(tokens, start)) is None:
            pass
        self._left -= 1
        link = LinkStats(bytes_up=counts.up - up, bytes_down=counts.down - down)
        return Verdict((), token, choices=((token,),), link=link)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()  # type: ignore[attr-defined]  # a generator
        self._http.close()

    def _next(self, tokens: Sequence[int], start: float) -> int | None:
        """Receive a token; return None to retry."""
        timeout = self._deadlines.deadline_s
        if self._stream is None:
            request = StreamRequest(tokens=list(tokens), config=self._config, max_tokens=self._left)
            self._stream = self._http.tokens("/v1/texts", request, max(timeout, MAX_TIMEOUT_S))
        try:
            token: int | None = interruptible(partial(next, self._stream))
        except Stopped:
            self._stream = None  # in use by another thread
            raise
        except NoResponse as failure:
            self._stream = None
            _raise_if_lost(failure, self._http.url, self._clock() - start, self._deadlines, "restart it")
            interruptible(partial(self._sleep, min(timeout / 4, 0.25)))
            return None
        if token is None:
            raise UserError(f"the cloud at {self._http.url} ended the text early: its stop tokens differ")
        if not 0 <= token < self._vocab_size:
            raise UserError(f"the cloud at {self._http.url} sent an unknown token id: use the same target at both ends")
        return token


def _raise_if_lost(failure: NoResponse, url: str, elapsed: float, deadlines: Deadlines, advice: str) -> None:
    if elapsed > deadlines.lost_s:
        raise ConnectionLost(
            f"the cloud at {url} has not responded for {elapsed:.0f} seconds ({failure}): {advice}"
        ) from failure
