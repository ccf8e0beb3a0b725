"""GGUF files are untrusted: values are read as written, and each file gives a model or a sentence, in bounded time
and memory.
"""

import math
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.gguf_models import described, quantize, save_gguf, tiny_for_gguf, vocabulary
from fakes.properties import holds_for
from fakes.refusals import refusal
from fakes.tiny_models import byte_level_tokenizer
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import strategies as st

from specdemo.models.gguf_file import read_gguf_header
from specdemo.models.gguf_settings import gguf_settings
from specdemo.models.load import load, read_tokenizer
from specdemo.models.memory import peak_process_bytes
from specdemo.models.memory_plan import plan_spec
from specdemo.models.spec import ModelSpec

pytestmark = pytest.mark.slow

SECONDS, GROWTH = 20, 300_000_000
TEXT, LIST = 8, 9  # numbers of types


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    entries: Sequence[bytes] = (), tensors: Sequence[bytes] = (), counts: Sequence[int] = (), version: int = 3
) -> bytes:
    """Encode a header. `counts`: other numbers of tensors and entries."""
    counts = counts or (len(tensors), len(entries))
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*entries, *tensors])


@contextmanager
def file_of(content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        yield path


def spec_of(path: Path) -> ModelSpec:
    return ModelSpec(str(path), "float32", device="cpu").resolved()


def test_headers_are_read_as_written_by_llama_cpp(tmp_path: Path) -> None:
    """Largest or smallest value of each type, and tensors in blocks."""
    writer, path = GGUFWriter(tmp_path / "model.gguf", "llama"), tmp_path / "model.gguf"
    expected: dict[str, Any] = {"general.architecture": "llama"}
    for bits in (8, 16, 32, 64):
        for kind, value in (("uint", (1 << bits) - 1), ("int", -1 << bits - 1)):
            getattr(writer, f"add_{kind}{bits}")(f"{kind}{bits}", value)
            expected[f"{kind}{bits}"] = value
    others = {"float32": 0.5, "float64": 0.1, "bool": True, "string": "naïve", "array": [1, -2]}
    for kind, value in others.items():
        getattr(writer, f"add_{kind}")(kind, value)
    tensors = {"a": ((2, 3), "F32"), "b": ((3, 64), "Q8_0"), "c": ((1, 256), "Q4_K"), "d": ((5,), "F16")}
    for name, (shape, kind) in tensors.items():
        data = np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)
        qtype = GGMLQuantizationType[kind]
        writer.add_tensor(name, quantize(data, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, written = read_gguf_header("model", path), {one.name: one for one in GGUFReader(path).tensors}
    assert file.metadata == expected | others
    for name, (shape, _) in tensors.items():
        found = file.tensors[name]
        assert (found.shape, found.start, found.nbytes) == (shape, written[name].data_offset, written[name].n_bytes)


TOKENIZER = byte_level_tokenizer()
KEYS = [*described(tiny_for_gguf("llama", TOKENIZER).config), *vocabulary(TOKENIZER, "gpt-2")]
KEYS += ["{arch}.rope.scaling.type", "{arch}.rope.scaling.factor", "{arch}.vocab_size", "tokenizer.ggml.added_tokens"]
metadata = (
    st.integers(0, (1 << 32) - 1) | st.integers(-9, 300) | st.floats(width=32) | st.booleans() | st.text(max_size=5)
)
metadata |= st.lists(st.integers(0, 300), min_size=1, max_size=4) | st.lists(
    st.text(max_size=3), min_size=1, max_size=4
)


@holds_for(12, changes=st.dictionaries(st.sampled_from(KEYS), st.none() | metadata, min_size=1, max_size=2))
def test_changed_metadata_give_a_model_or_a_sentence(changes: dict[str, Any]) -> None:
    with file_of(b"") as path:
        save_gguf(path, metadata=changes)
        refusal(lambda: read_tokenizer(spec_of(path)).encode("def f(x):"))
        refusal(load, spec_of(path))


@cache
def valid_content() -> bytes:
    with file_of(b"") as path:
        return save_gguf(path).read_bytes()


@holds_for(60, damage=st.dictionaries(st.integers(0, 12_000), st.sampled_from((0, 1, 255)) | st.integers(0, 255)))
def test_damaged_headers_give_a_tokenizer_or_a_sentence(damage: dict[int, int]) -> None:
    content = bytearray(valid_content())
    for position, value in damage.items():
        content[position] = value
    with file_of(bytes(content)) as path:
        refusal(read_tokenizer, spec_of(path))


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def model(**values: Any) -> Callable[[Path], object]:
    """Write a valid model with other metadata; `__` is a dot."""
    return lambda path: save_gguf(path, metadata={f"{{arch}}.{key.replace('__', '.')}": v for key, v in values.items()})


def tokens(**values: Any) -> Callable[[Path], object]:
    return lambda path: save_gguf(path, metadata={f"tokenizer.ggml.{key}": value for key, value in values.items()})


def sparse_texts(path: Path) -> None:
    """Announce texts in a terabyte of zeros."""
    path.write_bytes(header([entry("a", LIST, struct.pack("<IQ", TEXT, 400_000))]))
    os.truncate(path, 1 << 40)


HUGE = 1 << 63
WORDS = [f"w{i}" for i in range(300)]
HOSTILE = {  # files with a part of their refusals
    "another format": (content(b"PK\3\4" + bytes(100)), "does not begin with GGUF"),
    "big-endian": (content(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(99)), "big-endian"),
    "many tensors": (content(header(counts=(HUGE, 0)) + bytes(99)), "0 dimensions|occurs twice|truncated"),
    "many texts": (sparse_texts, "general.architecture is missing"),
    "deep lists": (content(header([entry("a", LIST, struct.pack("<IQ", LIST, 1) * 100_000)])), "contains lists"),
    "size 2^63": (content(header(tensors=[tensor("a", (HUGE, HUGE))]) + bytes(99)), "beyond the end"),
    "a billion layers": (model(block_count=10**9), "num_hidden_layers is 1000000000, not a number from 1 to"),
    "large heads": (
        model(attention__key_length=65_536, attention__value_length=65_536),
        "head_dim is 65536, not a number from 1 to",
    ),
    "repeated token": (tokens(tokens=["a"] * 300), "a token occurs twice"),
    "endless pieces": (tokens(model="llama", scores=[0.0] * 300, tokens=[word * 15_000 for word in WORDS]), "too long"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_sentence(name: str, tmp_path: Path) -> None:
    write, part = HOSTILE[name]
    write(tmp_path / "model.gguf")
    spec = spec_of(tmp_path / "model.gguf")
    start, memory = time.monotonic(), peak_process_bytes()
    refusals = [refusal(plan_spec, spec, 64), refusal(load, spec), refusal(read_tokenizer, spec)]
    assert re.search(part, refusals[1])
    assert time.monotonic() - start < SECONDS and peak_process_bytes() - memory < GROWTH


def test_special_files_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "is not a file" in refusal(load, ModelSpec(str(tmp_path / "pipe.gguf"), device="cpu"))
    assert "without config.json" in refusal(load, ModelSpec(str(tmp_path / "folder.gguf"), device="cpu"))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf")
    first = gguf_settings(str(path), path)
    assert gguf_settings(str(path), path) is first
    save_gguf(path, "qwen2", "F16")
    assert gguf_settings(str(path), path) is not first
