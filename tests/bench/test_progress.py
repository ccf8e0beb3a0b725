"""How far something long is: one line that changes for somebody who watches, few lines for a file."""

from __future__ import annotations

import sys

import pytest

from specdemo.bench import progress
from specdemo.bench.progress import EVERY_S, Progress


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_on_a_terminal_one_line_changes_and_is_wiped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = Progress()
    for text in ("1 of 2", "1 of 2", "2 of 2"):
        shown.show(text)
    shown.over()
    shown.over()
    lines = said(capsys).split("\r\x1b[K")
    assert lines == ["", "1 of 2", "2 of 2", ""]


def test_in_a_file_whole_lines_come_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(1000, 2000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    shown = Progress()
    for i in range(100):
        shown.show(f"{i} of 100")
    shown.over()
    lines = said(capsys).splitlines()
    assert "\r" not in "".join(lines)
    assert lines[0] == "0 of 100"
    assert 100 / EVERY_S < len(lines) < 2 + 100 / EVERY_S
