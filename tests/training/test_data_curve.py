"""Acceptance over training data: the line through the runs, and its prediction."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from training.head import data_curve
from training.head.conversations import SETTINGS


def write_run(folder: Path, passes: float) -> Path:
    """Write two evaluations, of which the last counts."""
    folder.mkdir()
    lines = [{name: {"rates": [0.5], "tokens": {"5": value}} for name in SETTINGS} for value in (1.0, passes)]
    (folder / "config.json").write_text('{"training_tokens": 4000000}', "utf-8")
    (folder / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return folder


def test_a_line_over_the_logarithm_of_the_tokens_is_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = (300_000, 1_000_000, 3_000_000)
    runs = [f"{size}={write_run(tmp_path / str(size), 2 + 0.3 * math.log(size / 1e6))}" for size in sizes]
    assert data_curve.main(runs) == 0
    *measured, predicted = json.loads(capsys.readouterr().out.splitlines()[-1])["head-data"]
    assert [record["data"] for record in measured] == [0.3, 1.0, 3.0]
    assert [record["seen"] for record in measured] == ["4.0"] * 3
    for name in SETTINGS:
        assert predicted[f"passes_{name}"] == pytest.approx(2 + 0.3 * math.log(10))


@pytest.mark.parametrize("argument", ["x=.", "100=missing", "100"])
def test_an_argument_without_tokens_or_run_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert data_curve.main([argument, argument]) == 2
    assert "is not TOKENS=DIRECTORY" in capsys.readouterr().err


def test_one_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data_curve.main([f"100={write_run(tmp_path / 'run', 2.0)}"]) == 2
    assert "two runs" in capsys.readouterr().err
