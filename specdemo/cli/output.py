"""Output of commands: files, whose errors become `UserError`, and progress."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from specdemo.core.errors import UserError, write_error

PROGRESS_S = 30.0  # seconds between lines of progress in files and pipes
_MOST_READ = 20_000_000  # characters of a file


def read_limited(path: Path, content: str, remedy: str) -> str:
    """Return the text of a file of `content`. Raises `UserError`, with the remedy for large files."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST_READ + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a file of {content}") from error
    if len(text) > _MOST_READ:
        raise UserError(f"{path} has more than {_MOST_READ:,} characters: {remedy}")
    return text


class OutputFile:
    """Temporary file that replaces `path` at the end, unless that is a device or pipe. A killed process leaves it."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._target = path.resolve(), f"{kind} to {path}"
        self._is_device = path.exists() and not path.is_file()
        self._part = self._path.with_name(f"{path.name}.{os.getpid()}.part")
        self._complete = False
        self._file: TextIO = self._checked(
            lambda: open(self._path if self._is_device else self._part, "w", buffering=1, encoding="utf-8")
        )

    def write(self, text: str) -> None:
        self._complete = False
        self._checked(lambda: self._file.write(text))
        self._complete = True

    def close(self) -> None:
        try:
            self._checked(self._file.close)
            if self._complete and not self._is_device:
                self._checked(lambda: os.replace(self._part, self._path))
        finally:
            if not self._is_device:
                with suppress(OSError):
                    self._part.unlink(missing_ok=True)

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except OSError as error:
            raise write_error(self._target, error) from error


class StatusLine:
    """Progress on standard error: a line overwritten on a terminal, otherwise lines at an interval, if given."""

    def __init__(self, interval_s: float | None = None) -> None:
        self._interval_s = interval_s
        self._shown = ""
        self._due = 0.0

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            shown = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be overwritten
            if shown != self._shown:
                print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)
            self._shown = shown
        elif self._interval_s is not None and time.monotonic() >= self._due:
            print(text, file=sys.stderr, flush=True)
            self._due = time.monotonic() + self._interval_s

    def warn(self, text: str) -> None:
        """Show a text that remains."""
        self.clear()
        print(text, file=sys.stderr)

    def clear(self) -> None:
        if self._shown:
            self.show("")
