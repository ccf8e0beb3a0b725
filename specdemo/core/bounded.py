"""Limits on validation errors of untrusted values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, FailFast

from specdemo.core.errors import UserError

MAX_KEYS = 256  # keys of an object

T = TypeVar("T")


class _FailFast(FailFast):
    def __hash__(self) -> int:  # required by unions
        return hash(self.fail_fast)


ListOf = Annotated[list[T], _FailFast()]  # ends at the first invalid item


def limited_object(pairs: Sequence[tuple[str, T]]) -> dict[str, T]:
    """Convert the pairs of a JSON object. Raises `UserError`."""
    if len(pairs) > MAX_KEYS:
        raise UserError(f"an object has {len(pairs):,} keys: at most {MAX_KEYS} are read")
    return dict(pairs)


def most_keys(limit: int) -> BeforeValidator:
    """Limit a dictionary, whose validation continues after errors."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"it has more than {limit:,} keys")
        return value

    return BeforeValidator(check)
