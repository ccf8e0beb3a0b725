"""The cloud decoding by itself: its text comes down a token at a time, and no round trip is paid for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from specdemo.core.errors import UserError
from specdemo.core.step import Draft, Verdict
from specdemo.remote.client import LONGEST_WAIT, ConnectionLost, Deadlines
from specdemo.remote.protocol import StreamRequest, VerifyConfig
from specdemo.remote.transport import HttpClient, NoResponse
from specdemo.worker import Stopped, interruptible


class CloudText:
    """A judge for method `ar`: the cloud decodes by itself and sends its tokens as they come.

    A stream that is cut off is taken up again where it was; chance is keyed by place, so its text is the same.
    """

    def __init__(
        self,
        http: HttpClient,
        settings: VerifyConfig,
        max_tokens: int,
        patience: Deadlines = Deadlines(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http, self._settings, self._left, self._patience = http, settings, max_tokens, patience
        self._clock, self._pause = clock, pause
        self._tokens: Iterator[int | None] | None = None

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        """The next token of the cloud's text; `draft` is empty."""
        tally = self._http.wire.tally
        up, down, began = tally.up, tally.down, self._clock()
        wait = self._patience.deadline_s
        while True:
            if self._tokens is None:
                text = StreamRequest(tokens=list(tokens), sampling_cfg=self._settings, max_tokens=self._left)
                self._tokens = self._http.tokens("/v1/texts", text, max(wait, LONGEST_WAIT))
            try:
                token = interruptible(partial(next, self._tokens))
            except Stopped:
                self._tokens = None  # somebody is still reading it
                raise
            except NoResponse as silence:
                self._tokens = None
                spent = self._clock() - began
                if spent > self._patience.lost_s:
                    raise ConnectionLost(
                        f"the cloud at {self._http.url} has not answered for {spent:.0f} seconds ({silence}): "
                        "start it again"
                    ) from silence
                self._pause(min(wait / 4, 0.25))
                continue
            if token is None:
                raise UserError(f"the cloud at {self._http.url} ended the text early: its stop tokens are other ones")
            break
        self._left -= 1
        notes = {"escalated": 1.0, "bytes_up": float(tally.up - up), "bytes_down": float(tally.down - down)}
        return Verdict((), token, choices=((token,),), notes=notes)

    def close(self) -> None:
        """Hang up."""
        if self._tokens is not None:
            self._tokens.close()  # type: ignore[attr-defined]  # a generator
        self._http.close()
