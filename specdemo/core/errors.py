"""Errors shown to users, and checks of values that users enter."""

import errno
import tempfile
from collections.abc import Collection

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
