"""Tables of bench and prove: written by the study, with figures of known records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fakes.bench_records import run

from benchmarks import document_tables, tables
from specdemo.bench.baselines import BASELINES
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose documents contain only empty tables."""
    for document in set(document_tables.TABLES.values()):
        names = [name for name, place in document_tables.TABLES.items() if place == document]
        (tmp_path / document).parent.mkdir(exist_ok=True)
        (tmp_path / document).write_text("\n".join(f"<!-- begin: {name} -->\n<!-- end: {name} -->" for name in names))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    return tmp_path


def written(documents: Path, name: str) -> list[str]:
    """Return the lines of a table, without heading."""
    text = (documents / document_tables.TABLES[name]).read_text()
    body = text.partition(f"<!-- begin: {name} -->\n")[2].partition(f"<!-- end: {name} -->")[0]
    return body.splitlines()


def test_a_selected_group_writes_all_of_its_tables(documents: Path) -> None:
    """The figures of the README are those of the table by class; the other tables are unchanged."""
    assert document_tables.main(["--table", "bench", "--prompts", "1", "--max-tokens", "3", "--write"]) == 0
    group = next(group for group in document_tables.GROUPS if "bench" in group.tables)
    for name in group.tables:
        command, _, head, _, *rows = written(documents, name)
        assert command.startswith("`") and "benchmarks.document_tables --table bench" in command
        assert rows and all(row.count("|") == head.count("|") for row in rows)
    lanes = 2 * (1 + len(document_tables.METHODS))
    assert len(written(documents, "bench")) == 4 + lanes and len(written(documents, "bench-costs")) == 4 + lanes - 2
    readme = [re.split(r" *\| *", row)[3] for row in written(documents, "bench-readme")[4:]]
    assert len(readme) == len(document_tables.README_ROWS) and all(
        speedup in "\n".join(written(documents, "bench-classes")) for speedup in readme
    )
    assert all(not written(documents, name) for name in set(document_tables.TABLES) - set(group.tables))


def test_equal_texts_are_counted(documents: Path) -> None:
    assert document_tables.main(["--table", "prove", "--prompts", "1", "--max-tokens", "4", "--write"]) == 0
    rows = written(documents, "prove")[4:]
    assert len(rows) == 12 and sum("float32" in row for row in rows) == 8 and all(" of 1 |" in row for row in rows)


def test_lanes_are_compared_with_the_fastest_peer_of_their_family() -> None:
    """A draft takes 1 s and AR 2 s; of the assisted peers the second is faster than the first."""
    peers = [name for name, peer in BASELINES.items() if peer.family in ("generate", "assisted")][:3]
    recipes = [Recipe(method="ar", temperature=0.0), Recipe(gamma=3, temperature=0.0)]
    times = {"generate": 8.0, peers[1]: 16.0, peers[2]: 4.0}
    baselines = [{**run(times[name]), "tokens_per_second": 10 / times[name]} for name in peers]
    records = [
        {"kind": "code", "name": f"code {i}", "runs": [run(2.0), run(1.0, drafted=30), *baselines]} for i in range(5)
    ]
    rows = list(document_tables.compared_with_peers(recipes, records, peers))
    assert [row["to_peer"] for row in rows] == ["4.00 [4.00, 4.00]", "8.00 [8.00, 8.00]", "-", "-"]
    assert [row["ratio"] for row in rows[:2]] == ["-", "4.00 [4.00, 4.00]"]


def test_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert document_tables.main(["--list"]) == 0
    assert [run.command for run in document_tables.RUNS] == [
        line.partition("  #")[0] for line in capsys.readouterr().out.splitlines()
    ]


def test_an_unknown_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert document_tables.main(["--table", "speed"]) == 2
    assert "bench-classes" in capsys.readouterr().err
