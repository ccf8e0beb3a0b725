"""The GPU check on a machine without a GPU: message, figures on a CPU, table and failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check

pytestmark = pytest.mark.slow


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    assert gpu_check.main() == 0
    assert capsys.readouterr().out == "No GPU is present: nothing was measured.\n"


def test_figures_of_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_check, "SHAPES", dict.fromkeys(gpu_check.SHAPES, (256, 512, 1, 4, 4)))
    monkeypatch.setattr(gpu_check, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(gpu_check, "kernel_seconds", lambda model, rows: (0.0, ""))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    figures = {record["figure"]: record for record in gpu_check.run_part("5.7b-bf16")}
    assert figures.keys() == {"kernels", *gpu_check.FORMATS}
    assert figures["v"]["v1"] == 1 and figures["AR"]["tokens_per_second"] > 0
    assert figures["imposed"]["same_text"] and 0.6 < figures["imposed"]["alpha"] < 1
    assert all(gpu_check.result(record) for record in figures.values())


def test_generated_codes_have_the_layout_of_their_form() -> None:
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    int8, nf4 = (gpu_check.quantised(weight, form).tensors for form in ("int8", "nf4"))
    assert int8["weight"].shape == (256, 128) and int(int8["weight"].abs().max()) == 127
    assert nf4["weight"].shape == (256, 64) and nf4["weight"].unique().numel() > 200


def test_a_failure_is_a_record_after_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield {"figure": "AR", "tokens_per_second": 1.0}
        raise ValueError("broken\nsecond line")

    monkeypatch.setitem(gpu_check.PARTS, "5.7b-nf4", failing)
    *_, figure, failure = gpu_check.run_part("5.7b-nf4")
    assert figure["figure"] == "AR" and failure["error"] == "ValueError: broken"
    assert gpu_check.result(failure) == "ValueError: broken"


def test_the_table_of_stored_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"part": "5.7b-nf4", "figure": "AR", "tokens_per_second": 12.3}]
    stored = {"command": "the command", "conditions": "a GPU", "records": records}
    (tmp_path / "gpu.json").write_text(json.dumps(stored))
    document = tmp_path / "docs" / "models.md"
    document.parent.mkdir()
    document.write_text("<!-- begin: gpu_check -->\n<!-- end: gpu_check -->\n")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["gpu_check", "--read", str(tmp_path / "gpu.json"), "--write"])
    assert gpu_check.main() == 0
    text = document.read_text()
    assert "`the command` (a GPU):" in text and "| 5.7b-nf4 | AR | 12 tokens/s |" in text
