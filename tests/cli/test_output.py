"""Output files: complete or absent, ends of interrupted runs, and a sentence for each failure of writing."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fakes.forked_process import ForkedProcess, terminal, terminal_with_full_disk
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.cli import main
from specdemo.cli import run as run_module
from specdemo.cli.output import OutputFile
from specdemo.core.errors import UserError, check_temporary_folder
from specdemo.core.events import StepEvent

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROMPT = "def add(a, b):\n"
FULL = Path("/dev/full")

needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


@pytest.fixture(scope="module")
def ar(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer())
    return ["--target", str(folder), "--method", "ar", "--device", "cpu", "--max-tokens", "20"]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_failed_run_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("earlier")
    with pytest.raises(KeyError), closing(OutputFile(path, "the trace")):
        raise KeyError("before the first line")
    assert path.read_text() == "earlier" and os.listdir(tmp_path) == ["trace.jsonl"]
    with closing(OutputFile(path, "the trace")) as file:
        file.write("later")
        assert path.read_text() == "earlier"
    assert path.read_text() == "later" and os.listdir(tmp_path) == ["trace.jsonl"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with closing(OutputFile(tmp_path / "link", "the trace")) as file:
        file.write("text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize(
    ("failure", "code", "end"), [(KeyboardInterrupt, 130, "cancelled"), (ZeroDivisionError, None, "error")]
)
def test_an_interrupted_run_is_marked_in_its_trace(
    failure: type[BaseException],
    code: int | None,
    end: str,
    ar: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, real = tmp_path / "trace.jsonl", run_module.generate

    def failing(*given: object) -> Iterator[object]:
        for event in real(*given):
            yield event
            if isinstance(event, StepEvent) and event.step.i == 2:
                raise failure("broken")

    monkeypatch.setattr(run_module, "generate", failing)
    command = ["run", PROMPT, *ar, "--trace", str(path)]
    if code is None:
        with pytest.raises(failure):
            main(command)
    else:
        assert main(command) == code
    header, *steps, last = lines(path)
    assert "specdemo" in header and len(steps) == 3 and last["metrics"]["steps"] == 3
    assert (last["end"], last["error"]) == (end, "interrupted" if code else "broken")


def test_a_disk_that_becomes_full_ends_the_run_with_a_sentence(ar: list[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    process = ForkedProcess(terminal_with_full_disk, 4096, "run", PROMPT, *ar, "--trace", str(path))
    _, errors = process.communicate()
    assert process.wait() == 2
    sentence = f"specdemo: cannot write the trace to {path}: File too large: free some space"
    assert errors.splitlines()[-1] == sentence and "Traceback" not in errors
    assert os.listdir(tmp_path) == []


@needs_full_device
def test_a_full_disk_for_traces_and_output(ar: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", PROMPT, *ar, "--trace", str(FULL)]) == 2 and FULL.is_char_device()
    assert capsys.readouterr().err.splitlines()[-1].endswith("No space left on device: free some space")
    process = ForkedProcess(terminal, "run", PROMPT, *ar, "--json", output=FULL)
    _, errors = process.communicate()
    assert process.wait() == 2
    sentence = "specdemo: cannot write the output: No space left on device: free some space"
    assert errors.splitlines()[-1] == sentence and "Traceback" not in errors


def test_a_directory_without_write_access(ar: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """/proc is read-only for root, too; a bench is refused before it measures."""
    bench = ["bench", *ar[:2], "--method", "nasd", "--device", "cpu", "--output"]
    for command in (["run", PROMPT, *ar, "--trace"], bench):
        assert main([*command, "/proc/specdemo.out"]) == 2
        shown = capsys.readouterr()
        assert not shown.out and "cannot write the " in (last := shown.err.splitlines()[-1])
        assert last.endswith(": choose a writable directory")


@needs_full_device
def test_direct_writes_report_their_failure() -> None:
    with pytest.raises(UserError, match="free some space"), closing(OutputFile(FULL, "the trace")) as file:
        file.write("x" * 100_000)


def test_characters_that_the_terminal_cannot_encode_are_escaped(ar: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, shown in (("latin-1", "\\u732b é"), ("ascii", "\\u732b \\xe9"), ("utf-8", "猫 é")):
        output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["run", "# 猫 é", *ar]) == 0
        output.flush()
        assert shown in output.buffer.getvalue().decode(encoding)


def test_a_missing_temporary_folder_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError("No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", missing)
    with pytest.raises(UserError, match="set TMPDIR to a writable directory"):
        check_temporary_folder()
