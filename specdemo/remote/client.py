"""The target at the other end of a wire: a judge for the one loop that asks a cloud.

What the cloud holds is followed by content, as a cache is: only what it lacks is sent, and a cloud that has forgotten
everything is told everything again. A round that goes unanswered is sent again under its number, so nothing is ever
judged twice. Knows messages and drafts; knows no models and no text.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from specdemo.core.decode import Verifier
from specdemo.core.errors import UserError
from specdemo.core.rules import RULES
from specdemo.core.sampling import top_tokens
from specdemo.core.step import Draft, Verdict, common_prefix
from specdemo.remote.cloud_verifier import refuse_nonsense, verdict_of
from specdemo.remote.fallback import first_path, later_verified, provisional, unverified
from specdemo.remote.protocol import DeleteResponse, DraftRow, VerifyConfig, VerifyRequest, VerifyResponse, digest
from specdemo.remote.transport import ContextGone, HttpClient, NoResponse, RequestSuperseded, ServiceBusy
from specdemo.worker import Stopped, interruptible

LONGEST_WAIT = 8.0  # seconds before a round is sent again, at most
RowFormat = Literal["float32", "float16", "scalar"]


class ConnectionLost(UserError):
    """The cloud has not answered for as long as was agreed."""


@dataclass(frozen=True)
class Deadlines:
    """How long is waited for what. `strict`: for the answer, whatever it takes; else a round ends at its deadline."""

    deadline_s: float = 0.4  # of a round, the practice guide's
    lost_s: float = 30.0  # without any answer
    strict: bool = True


@dataclass(frozen=True)
class LateResponse:
    """A round whose answer had not come by its deadline; what was committed since is provisional."""

    answer: Future[tuple[VerifyResponse, dict[str, float]]]
    draft: Draft
    at: int  # tokens before the round


class RemoteVerifier:
    """A judge: drafts go up, verdicts come down (practice guide, sections 3 and 5).

    Which q goes along is the rule's and the draft's affair: none for point masses and for rules that draw from p; else
    the scalars, and of the laws the row that a correction needs, if it is asked for (`rows`; "scalar" never sends one:
    lossy for sampled drafts). Where the cloud is lost, `edge` goes on alone, or `Lost` is raised.
    """

    def __init__(
        self,
        http: HttpClient,
        settings: VerifyConfig,
        *,
        rows: RowFormat = "float32",
        candidates: int = 1,
        top: int = 0,
        patience: Deadlines = Deadlines(),  # noqa: B008 - frozen
        edge: Verifier | None = None,
        ctx_id: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http, self._settings, self._rows = http, settings, rows
        self._candidates, self._top, self._patience, self._edge = candidates, top, patience, edge
        self._clock, self._pause = clock, pause
        self._ctx_id, self._epoch, self._round = ctx_id or uuid.uuid4().hex, 0, -1
        self._theirs: list[int] = []  # what the cloud holds, as far as is known
        self._late: LateResponse | None = None
        self._alone = self._closed = False
        self._sender = ThreadPoolExecutor(1, "cloud")  # a round may outlive its deadline

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        """The cloud's verdict; one token of the draft, provisionally, where it is late and not waited for."""
        if self._alone:
            return self._on_the_edge(tokens, draft, {})
        before = replace(self._http.wire.tally)
        notes: dict[str, float] = {"escalated": 1.0}
        try:
            verdict = self._settled(tokens, draft, notes) if self._late else None
            verdict = verdict or self._asked(tokens, draft, hard_mask, notes)
        except ConnectionLost:
            if self._edge is None:
                raise
            self._alone, self._late = True, None
            notes["lost"] = 1.0
            verdict = self._on_the_edge(tokens, draft, notes)
        tally = self._http.wire.tally
        counted = {"bytes_up": float(tally.up - before.up), "bytes_down": float(tally.down - before.down)}
        took = {"up_s": tally.up_s - before.up_s, "down_s": tally.down_s - before.down_s}
        return replace(verdict, notes={**verdict.notes, **counted, **took})

    def close(self) -> None:
        """Forget the context at the cloud, if it can be told, and hang up."""
        self._closed = True
        self._sender.shutdown(wait=False, cancel_futures=True)
        if not self._alone and self._theirs and self._late is None:
            try:
                path = f"/v1/contexts/{self._ctx_id}"
                self._http.call("DELETE", path, None, DeleteResponse, self._patience.deadline_s)
            except (NoResponse, UserError):
                pass  # it expires by itself
        self._http.close()

    # --- rounds ---------------------------------------------------------------------------------------------------

    def _asked(
        self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None, notes: dict[str, float]
    ) -> Verdict:
        """The verdict of a round of its own."""
        self._round += 1
        job = partial(self._exchange, list(tokens), draft, hard_mask)
        if self._patience.strict or not draft.tokens:
            try:
                answer, found = interruptible(job)
            except Stopped:
                self._alone = True  # a round is still under way: hanging up is all that is left to do
                raise
        else:
            future = self._sender.submit(job)
            try:
                answer, found = future.result(self._patience.deadline_s)
            except NotYet:
                self._late = LateResponse(future, draft, len(tokens))
                return provisional(draft, notes)
        probs = draft.probs if self._top and isinstance(draft.probs, Tensor) else None
        drafted = () if probs is None else top_tokens(probs, self._top)
        return replace(verdict_of(answer, draft, drafted), notes={**notes, **found})

    def _exchange(
        self, tokens: list[int], draft: Draft, hard_mask: Sequence[int] | None
    ) -> tuple[VerifyResponse, dict[str, float]]:
        """Ask until there is an answer, and take over what the cloud then holds. `Lost` where there never is one."""
        began, wait, sent, rows = self._clock(), self._patience.deadline_s, 0, []
        cloud_s = rtt_s = 0.0
        while True:
            round = self._message(tokens, draft, hard_mask, rows)
            sent += 1
            asked = self._clock()
            try:
                answer = self._http.call("POST", "/v1/rounds", round, VerifyResponse, wait)
                if (answer.epoch, answer.round) != (round.epoch, round.round):
                    raise NoResponse("the answer is another round's")
            except ContextGone:
                self._epoch, self._theirs = self._epoch + 1, []
            except RequestSuperseded:  # by another edge, or by a copy of this one: the text is this one's all the same
                self._ctx_id, self._epoch, self._theirs = uuid.uuid4().hex, 0, []
            except NoResponse as silence:
                spent = self._clock() - began
                if spent > self._patience.lost_s or self._closed:
                    raise ConnectionLost(
                        f"the cloud at {self._http.url} has not answered for {spent:.0f} seconds ({silence}): "
                        "start it again, or go on without it (--on-loss edge)"
                    ) from silence
                if (
                    isinstance(silence, ServiceBusy) or self._clock() - asked < wait / 2
                ):  # refused at once: do not hammer
                    self._pause(min(wait / 4, 0.25))
                wait = min(2 * wait, LONGEST_WAIT)
            else:
                cloud_s += answer.metrics.cloud_s
                rtt_s += self._clock() - asked - answer.metrics.cloud_s
                if answer.wants is None:
                    break
                rows.append(self._row(draft, answer.wants))
        refuse_nonsense(answer, draft)
        own = answer.bonus if answer.correction is None else answer.correction
        nodes = range(answer.accepted_len) if answer.accepted is None else answer.accepted
        self._theirs = [*tokens, *(draft.tokens[node] for node in nodes), *([] if own is None else [own])]
        return answer, {"cloud_s": cloud_s, "rtt_s": rtt_s, "sent": float(sent), "rows": float(len(rows))}

    def _message(
        self, tokens: list[int], draft: Draft, hard_mask: Sequence[int] | None, rows: list[DraftRow]
    ) -> VerifyRequest:
        base = common_prefix(self._theirs, tokens)
        rule = RULES[self._settings.rule]
        q = draft.token_probs if rule.needs_q else None
        sampled = q is not None and draft.probs is not None
        return VerifyRequest(
            ctx_id=self._ctx_id,
            epoch=self._epoch,
            round=self._round,
            base=base,
            digest=digest(tokens[:base]),
            tokens=tokens[base:],
            draft_tokens=list(draft.tokens),
            k=len(draft),
            parents=None if draft.is_chain else list(draft.parents),
            q_token_probs=None if q is None else list(q),
            rows=rows if sampled and rule.adjusts and self._settings.adjust and self._rows != "scalar" else None,
            hard_mask=None if hard_mask is None else list(hard_mask),
            sampling_cfg=None if base else self._settings,
            candidates=self._candidates,
            top=self._top,
        )

    def _row(self, draft: Draft, node: int) -> DraftRow:
        if draft.probs is None or node >= len(draft):
            raise UserError(f"{self._http.url} asks for a law that there is not: it is no specdemo service")
        return DraftRow.of(node, draft.probs[node], "f2" if self._rows == "float16" else "f4")

    # --- late answers, and none -----------------------------------------------------------------------------------

    def _settled(self, tokens: Sequence[int], draft: Draft, notes: dict[str, float]) -> Verdict | None:
        """Bring both ends to one text again once a late answer is there; what it says of this draft, if anything."""
        late = self._late
        assert late is not None
        if draft.tokens:
            try:
                answer, found = late.answer.result(self._patience.deadline_s)
            except NotYet:
                return provisional(draft, notes)
        else:
            answer, found = interruptible(late.answer.result)
        self._late = None
        notes.update(found)
        said = self._theirs[late.at :]
        taken = list(tokens[late.at :])  # without having been judged
        same = common_prefix(said, taken)
        notes["confirmed"] = float(same)
        notes["overruled"] = float(len(taken) - same if same < min(len(said), len(taken)) else 0)
        if same < len(taken) or same == len(said):
            return None
        return later_verified(draft, said[same:], notes)

    def _on_the_edge(self, tokens: Sequence[int], draft: Draft, notes: Mapping[str, float]) -> Verdict:
        """The text of the drafter itself: not the target's."""
        assert self._edge is not None
        notes = {**notes, "escalated": 0.0, "edge": 1.0}
        if draft.tokens:
            return unverified(draft, first_path(draft), notes)
        return replace(self._edge.verify(tokens, draft), notes=notes)
