"""Requests with the fields of the practice guide, section 5.1: without `round`, each is the next step of its context.

The first contains the text as `tokens`; the service appends accepted and corrected tokens, without bonus. Retries need
an `Idempotency-Key`, since two steps may be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.core.errors import UserError
from specdemo.remote.protocol import VerifyRequest, digest


class UnknownContext(UserError):
    """Context missing or different from the edge's text."""


class StaleRequest(UserError):
    """Request of an earlier epoch or step."""


def check_repeat(request: VerifyRequest, last: VerifyRequest | None, is_last_key: bool) -> None:
    """Raise `UserError` unless `request`, whose key was used before, repeats the `last` numbered one."""
    if not is_last_key:
        raise StaleRequest("a later step followed the one of this Idempotency-Key: send a new key for each step")
    if last is None or request != last.model_copy(update={"epoch": 0, "step": None, "base": None, "digest": ""}):
        raise UserError("this Idempotency-Key belongs to a different request: send a new key for each step")


def numbered(
    request: VerifyRequest, epoch: int | None, last: VerifyRequest | None, text: Sequence[int]
) -> VerifyRequest:
    """Return `request` as the next step of a context with `text`; unknown contexts have no `epoch`."""
    if request.step is not None:
        return request
    if not request.draft_tokens:
        raise UserError("draft_tokens is empty: draft a token, or send round for steps without a draft")
    if request.tokens:
        return request.model_copy(update={"epoch": 0 if epoch is None else epoch + 1, "step": 0, "base": 0})
    if epoch is None:
        raise UnknownContext("this context does not exist, or was evicted: send its complete text as tokens")
    step = 0 if last is None or last.step is None else last.step + 1
    return request.model_copy(update={"epoch": epoch, "step": step, "base": len(text), "digest": digest(text)})
