"""Output of long measurements: Markdown tables, and progress on a terminal or in a file."""

from __future__ import annotations

import sys
import time

import pytest

from specdemo.bench.table import NON_TTY_INTERVAL_S, Progress, markdown_table


def progress_output(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_on_a_terminal_one_line_is_updated_and_erased(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = Progress()
    for text in ("1 of 2", "1 of 2", "2 of 2"):
        shown.show(text)
    shown.over()
    shown.over()
    lines = progress_output(capsys).split("\r\x1b[K")
    assert lines == ["", "1 of 2", "2 of 2", ""]


def test_in_a_file_few_lines_are_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(1000, 2000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    shown = Progress()
    for i in range(100):
        shown.show(f"{i} of 100")
    shown.over()
    lines = progress_output(capsys).splitlines()
    assert "\r" not in "".join(lines)
    assert lines[0] == "0 of 100"
    assert 100 / NON_TTY_INTERVAL_S < len(lines) < 2 + 100 / NON_TTY_INTERVAL_S


def test_tables_have_aligned_columns_and_three_dashes() -> None:
    assert markdown_table(("a", "tokens/s"), [("text", 1.5), (2, "x")]).splitlines() == [
        "| a    | tokens/s |",
        "| ---- | -------- |",
        "| text | 1.5      |",
        "| 2    | x        |",
    ]
    assert markdown_table(("a",), []).splitlines()[1] == "| --- |"
