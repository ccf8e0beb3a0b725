"""Every study starts, tables are replaced in documents, and figures of the load and GPU tests."""

import argparse
import json
import re
import runpy
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.traces import PREFILL, REJECTION, absorb, end, header

from benchmarks import edge_cloud, gpu_check, load, native_passes, page_cost, tables
from benchmarks.load import Answer, Text
from specdemo.models.batch_invariance import check_invariance
from specdemo.models.spec import QUANTIZATIONS
from specdemo.models.zoo import Pair
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MAIN = '__name__ == "__main__"'
FILES = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "training").rglob("*.py")]
SCRIPTS = sorted(path for path in FILES if MAIN in path.read_text("utf-8"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_help_is_printed(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0 and "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("module", [edge_cloud, native_passes, page_cost])
def test_a_module_has_a_command_per_study(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for study in module.STUDIES:
        with pytest.raises(SystemExit) as end:
            module.main([study, "--help"])
        assert end.value.code == 0 and "--write" in capsys.readouterr().out


def test_a_study_has_options_and_replaces_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    document = tmp_path / "docs" / "page.md"
    document.parent.mkdir()
    document.write_text("before\n<!-- begin: cost -->\nold\n<!-- end: cost -->\nafter\n")
    received: list[argparse.Namespace] = []

    def study(options: argparse.Namespace) -> None:
        received.append(options)
        tables.publish(options, "cost", {"way": "{way}", "x": "{x:.1f}"}, [{"way": "page", "x": 2.04}])

    described = tables.Study(study, {"rounds": [1, 2], "ratio": 0.5, "only": {"choices": ["a", "b"]}})
    main = tables.study_command("benchmarks/cost.py", "Cost.\n\nDetails.", {"cost": "docs/page.md"}, described)
    assert main([]) == 0 and "old" in document.read_text()
    assert main(["--write", "--rounds", "2", "3", "--only", "b"]) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- begin: cost -->\n") and text.endswith("\n<!-- end: cost -->\nafter\n")
    command = "python -m benchmarks.cost --rounds 2 3 --only b`"
    assert command in text and "| page | 2.0 |" in text and "old" not in text
    assert capsys.readouterr().out.count('{"cost": [{"way": "page", "x": 2.04}]}') == 2
    values = [(options.rounds, options.ratio, options.only) for options in received]
    assert values == [([1, 2], 0.5, None), ([2, 3], 0.5, "b")]
    with pytest.raises(SystemExit) as end:
        main(["--rounds", "2", "0"])
    assert end.value.code == 2 and "--rounds: must be at least 1, not 0" in capsys.readouterr().err
    for markers in ("", "<!-- begin: cost -->", 2 * "<!-- begin: cost --><!-- end: cost -->"):
        document.write_text(markers)
        assert main(["--write"]) == 2 and "<!-- begin: cost -->" in capsys.readouterr().err
        assert document.read_text() == markers


# --- load --------------------------------------------------------------------------------------------------------


def test_answers_contain_tokens_times_and_problems() -> None:
    run, failed = Run(), Run()
    frames = [run.frame(0)]
    absorb(run, SPEC, header(), PREFILL)
    frames.append(run.frame(0))
    absorb(run, SPEC, REJECTION, end())
    run.finish()
    frames.append(run.frame(2))
    tokens = [*PREFILL["tokens"], *REJECTION["tokens"]]
    assert load.visit(frames, count(0.0, 1.0)) == Answer(tokens, 1.0)
    assert load.visit([frames[0], frames[2]], count(0.0, 1.0)).problem == "lost"
    assert load.visit(frames[:-1], count(0.0, 1.0)).problem == "lost"
    failed.finish("out of memory")
    assert load.visit([failed.frame(0)], count(0.0, 1.0)) == Answer([], None, "failed")
    chunks = [f'data: {{"choices": [{{"token_ids": {ids}}}]}}' for ids in ([1], [2, 3])]
    lines = ['data: {"choices": []}', "", *chunks]
    assert load.streamed([*lines, "data: [DONE]"], count(1.0, 1.0)) == Answer([1, 2, 3], 1.0)
    assert load.streamed(["data: [DONE]"], count(1.0, 1.0)).problem == "failed"


def test_problems_and_different_texts_are_counted() -> None:
    answers = [Answer([1, 2], 1.0), Answer([1, 3], 3.0, gaps_s=(0.5,)), Answer([1], 2.0, "lost")]
    texts = [Text("edges", i % 2, answer, [1, 2], 2.0 * (i % 2 == 0)) for i, answer in enumerate(answers)]
    record = load.figures(texts, seconds=4.0)
    assert [record[name] for name in ("texts", "lost", "different", "failed", "switches")] == [3, 1, 1, 0, 1]
    assert (record["tokens_per_second"], record["fairness"], record["first_p95_s"]) == (1.0, 0.5, 3.0)


# --- GPU --------------------------------------------------------------------------------------------------------------


def test_the_chat_model_is_sent_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "chat.gguf"
    model.write_bytes(bytes(range(250)))
    monkeypatch.setitem(gpu_check.PAIRS, gpu_check.CHAT_PAIR, Pair("chat", str(model), None, 3))
    monkeypatch.setattr(gpu_check, "PART_BYTES", 100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sent = tmp_path / "sent"
    assert gpu_check.main(["--split", str(sent)]) == 0
    parts = sorted(sent.iterdir())
    assert [part.stat().st_size for part in parts] == [100, 100, 50]
    assert gpu_check.main(["--joined", str(sent)]) == 0
    assert Path(gpu_check.PAIRS[gpu_check.CHAT_PAIR].target).read_bytes() == model.read_bytes() != b""
    for damage in (lambda: parts[0].write_bytes(bytes(100)), parts[1].unlink):
        damage()
        assert gpu_check.main(["--joined", str(sent)]) == 2 and "--split" in capsys.readouterr().err


def test_figures_of_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_check, "SHAPES", dict.fromkeys(gpu_check.SHAPES, (64, 128, 1, 4, 4)))
    monkeypatch.setattr(gpu_check, "check_invariance", lambda model, seconds: check_invariance(model, 0.1))
    monkeypatch.setattr(gpu_check, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    figures = {record["figure"]: record for record in gpu_check.run_part("5.7b-bf16")}
    assert figures.keys() == {"kernels", *gpu_check.FORMATS}
    assert figures["v"]["v1"] == 1 and figures["AR"]["tokens_per_second"] > 0
    assert figures["imposed"]["same_text"] and 0.6 < figures["imposed"]["alpha"] < 1
    assert all(gpu_check.result(record) for record in figures.values())


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


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_labels_state_the_gain_of_the_table(form: str) -> None:
    document = (ROOT / "docs" / "models.md").read_text("utf-8")
    rows = re.findall(r"\| 5\.7b-(\w+) \| AR \| (\d+) tokens/s \|", document)
    speeds = {name: int(speed) for name, speed in rows}
    gain = f"{speeds[form] / speeds['bf16']:.2f} times"
    card = re.findall(r"benchmarks\.gpu_check.*?` \(([\w ]+),", document)
    assert f"{card[0]}: {gain} bf16's tokens/s" in QUANTIZATIONS[form].title and gain in document
