"""List of the commands that write the tables of the documents."""

from __future__ import annotations

import pytest

from benchmarks import document_tables

pytestmark = pytest.mark.slow


def test_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert document_tables.main(["--list"]) == 0
    assert [run.command for run in document_tables.RUNS] == [
        line.partition("  #")[0] for line in capsys.readouterr().out.splitlines()
    ]


def test_an_unknown_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert document_tables.main(["--table", "speed"]) == 2
    assert "bench-classes" in capsys.readouterr().err
