"""Errors shown to users, and checks and limits of values that users or files provide."""

import errno
import tempfile
from collections.abc import Collection, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, FailFast

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(ValueError):
    """Invalid request; the message is a sentence with cause and remedy."""


class PromptTooLong(UserError):
    """A prompt that does not fit, in words that agents recognise."""

    def __init__(self, tokens: int, limit: int, name: str = "this model's maximum context length", least: str = ""):
        super().__init__(
            f"{name} is {limit:,} tokens and the prompt has {least}{tokens:,}: "
            f"shorten it by at least {tokens - limit + 1:,}"
        )


def plain_text(text: str, limit: int = 300) -> str:
    """Return external `text` as a printable line."""
    line = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return line if len(line) <= limit else f"{line[:limit]} …"


def write_error(target: str, error: OSError) -> UserError:
    remedy = "free some space" if error.errno in FULL_DISK else "choose a writable directory"
    return UserError(f"cannot write {target}: {error.strerror or type(error).__name__}: {remedy}")


def check_temporary_folder() -> None:
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise UserError("no temporary folder is writable: set TMPDIR to a writable directory") from None


def check_name(kind: str, name: str, names: Collection[str]) -> None:
    """Raise `UserError` if `name` is not in `names`."""
    if name not in names:
        raise UserError(f"unknown {kind} {name!r}: known are {', '.join(names)}")


def check_unicode(kind: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{kind} has an invalid character at position {error.start + 1}: remove it") from None


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
