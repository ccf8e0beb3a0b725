"""Every study starts, and tables are replaced in documents."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chat_model, edge_cloud, native_passes, page_cost, pass_cost, tables
from specdemo.core.errors import UserError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODULES = (chat_model, edge_cloud, native_passes, page_cost, pass_cost)
MAIN = '__name__ == "__main__"'
FOLDERS = [ROOT / "benchmarks", ROOT / "training"]
SCRIPTS = [path for folder in FOLDERS for path in sorted(folder.glob("*.py")) if MAIN in path.read_text("utf-8")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_help_is_printed(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0 and "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "study"),
    [(module, study) for module in MODULES for study in module.STUDIES],
)
def test_a_module_has_a_command_per_study(module: Any, study: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        module.main([study, "--help"])
    assert end.value.code == 0 and "--write" in capsys.readouterr().out


def test_studies_of_a_module_share_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    received: list[argparse.Namespace] = []
    options = {"ratio": 0.5, "max_tokens": [1, 2], "only": {"choices": ["a", "b"]}}
    documents = {"cost": "docs/page.md"}
    main = tables.study_command(
        "benchmarks/cost.py", "Costs.", documents, {"page": tables.Study(received.append, options)}
    )
    assert (
        main(["page"]) == main(["page", "--ratio", "2", "--max-tokens", "4", "5", "6", "--only", "b", "--write"]) == 0
    )
    default, given = received
    assert (default.ratio, default.max_tokens, default.only, default.write) == (0.5, [1, 2], None, False)
    assert (given.ratio, given.max_tokens, given.only, given.write) == (2.0, [4, 5, 6], "b", True)
    assert default.tables == documents and given.command.endswith(
        "benchmarks.cost page --ratio 2 --max-tokens 4 5 6 --only b"
    )
    for arguments in ([], ["link"], ["page", "--only", "c"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    assert "invalid choice: 'link'" in capsys.readouterr().err


def test_a_table_is_printed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    document = tmp_path / "docs" / "page.md"
    document.parent.mkdir()
    document.write_text("before\n<!-- begin: cost -->\nold\n<!-- end: cost -->\nafter\n")
    parser = tables.study_parser("benchmarks/cost.py", "Cost.\n\nDetails.", {"cost": "docs/page.md"})
    parser.add_argument("--rounds", type=int)

    def study(options: argparse.Namespace) -> None:
        tables.publish(options, "cost", {"way": "{way}", "x": "{x:.1f}"}, [{"way": "page", "x": 2.04}])

    assert tables.run_study(study, parser, ["--rounds", "2"]) == 0
    assert "old" in document.read_text()
    assert tables.run_study(study, parser, ["--write", "--rounds", "2"]) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- begin: cost -->\n") and text.endswith("\n<!-- end: cost -->\nafter\n")
    assert "python -m benchmarks.cost --rounds 2`" in text and "| page | 2.0 |" in text and "old" not in text
    assert capsys.readouterr().out.count('{"cost": [{"way": "page", "x": 2.04}]}') == 2
    document.write_text("no markers")
    assert tables.run_study(study, parser, ["--write"]) == 2
    assert "<!-- begin: cost -->" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "<!-- begin: a -->", "<!-- end: a -->", 2 * "<!-- begin: a --><!-- end: a -->"])
def test_markers_must_occur_once(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(text)
    with pytest.raises(UserError, match="exactly once"):
        tables.replace_table(tmp_path / "a.md", "a", "new")
    assert (tmp_path / "a.md").read_text() == text
