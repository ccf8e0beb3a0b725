"""GGUF files are untrusted: each ends in one sentence, in bounded time and memory."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from fakes.gguf_models import save_gguf
from fakes.hostile_gguf import HOSTILE_FILES

from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.models.hub import Hub
from specdemo.models.load import load, read_tokenizer
from specdemo.models.memory import peak_process_bytes
from specdemo.models.memory_plan import plan_spec
from specdemo.models.spec import ModelSpec

pytestmark = pytest.mark.slow

SECONDS, GROWTH = 20, 300_000_000


def sentence(function: object, *arguments: object) -> str:
    """Return the refusal, or an empty text if the model works."""
    try:
        function(*arguments)
    except UserError as error:
        text = str(error)
        assert text.isprintable() and len(text) < 450 and ": " in text
        return text
    return ""


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_hostile_files_end_in_one_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    HOSTILE_FILES[name].write(path)
    spec = ModelSpec(str(path), "float32", device="cpu").resolved()
    start, memory = time.monotonic(), peak_process_bytes()
    refusals = [sentence(plan_spec, spec, 64), sentence(load, spec), sentence(read_tokenizer, spec)]
    assert re.search(HOSTILE_FILES[name].part, refusals[1])
    assert time.monotonic() - start < SECONDS and peak_process_bytes() - memory < GROWTH


@pytest.mark.parametrize("name", ["other magic", "size 2^63", "a billion layers", "repeated token"])
def test_terminal_exits_with_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    HOSTILE_FILES[name].write(path)
    assert main(["run", "def", "--target", str(path), "--method", "ar", "--device", "cpu"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("specdemo: ") and "Traceback" not in "".join(errors)


def test_special_files_are_not_opened(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "is not a file" in sentence(load, ModelSpec(str(tmp_path / "pipe.gguf"), device="cpu"))
    assert "without config.json" in sentence(load, ModelSpec(str(tmp_path / "folder.gguf"), device="cpu"))


def test_damaged_bytes_of_the_header_end_in_one_sentence_or_load(tmp_path: Path) -> None:
    """Random bytes of a valid header are changed; weights and texts may load with other values."""
    path, source = tmp_path / "model.gguf", random.Random(0)
    content = save_gguf(path).read_bytes()
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(source.randrange(1, 4)):
            damaged[source.randrange(12_000)] = source.choice((0, 1, 255, source.randrange(256)))
        path.write_bytes(damaged)
        sentence(read_tokenizer, ModelSpec(str(path), device="cpu"))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path, hub = save_gguf(tmp_path / "model.gguf"), Hub()
    first = hub.settings(str(path))
    assert hub.settings(str(path)) == first
    save_gguf(path, "qwen2", "F16")
    assert hub.settings(str(path)) != first
