"""Properties of GGUF headers: values are read as written; changed metadata give a model or a sentence."""

from __future__ import annotations

import math
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes.gguf_models import described, save_gguf, tiny_for_gguf, vocabulary
from fakes.hostile_gguf import F32, LIST, TEXT, entry, raw, tensor, text
from fakes.properties import holds_for
from fakes.tiny_models import byte_level_tokenizer
from hypothesis import strategies as st

from specdemo.core.errors import UserError
from specdemo.models.gguf_file import read_gguf_header
from specdemo.models.load import load, read_tokenizer
from specdemo.models.spec import ModelSpec

pytestmark = pytest.mark.slow

WHOLE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}  # number of a type: its code
PER_BLOCK = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144)}  # type of tensors: values, bytes


@st.composite
def values(draw: st.DrawFn, within_list: bool = False) -> tuple[int, bytes, Any]:
    """Return the type, the encoding and the value of an entry."""
    kind = draw(st.sampled_from([*WHOLE, F32, 7, 12, TEXT, *([] if within_list else [LIST] * 3)]))
    if kind == LIST:
        inner = draw(st.lists(values(True), max_size=3))
        inner = [item for item in inner if item[0] == inner[0][0]]
        number = inner[0][0] if inner else TEXT
        encoded = struct.pack("<IQ", number, len(inner)) + b"".join(data for _, data, _ in inner)
        return LIST, encoded, [value for *_, value in inner]
    if kind == TEXT:
        value = draw(st.text(max_size=6))
        return TEXT, text(value), value
    if kind in WHOLE:
        code = WHOLE[kind]
        bits = 8 * struct.calcsize(code)
        least = -(1 << bits - 1) if code.islower() else 0
        value = draw(st.integers(least, least + (1 << bits) - 1))
    elif kind == 7:
        code, value = "?", draw(st.booleans())
    else:
        code = "f" if kind == F32 else "d"
        value = draw(st.floats(width=32 if kind == F32 else 64, allow_nan=False))
    return kind, struct.pack(f"<{code}", value), value


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[str, int, tuple[int, ...], int]]:
    """Return names, types, shapes and offsets of tensors that do not overlap."""
    result, offset = [], 0
    for name in draw(st.lists(st.text(min_size=1, max_size=4), unique=True, max_size=4)):
        kind = draw(st.sampled_from([*PER_BLOCK]))
        block, nbytes = PER_BLOCK[kind]
        shape = (*draw(st.lists(st.integers(1, 3), max_size=3)), block * draw(st.integers(1, 3)))
        result.append((name, kind, shape, offset))
        size = math.prod(shape) // block * nbytes
        offset += size + -size % 32
    return result


@holds_for(40, entries=st.dictionaries(st.text(max_size=6), values(), max_size=5), listed=tensors())
def test_headers_are_read_as_written(entries: dict[str, Any], listed: list[Any]) -> None:
    entries.pop("general.alignment", None)
    encoded = [entry(key, kind, data) for key, (kind, data, _) in entries.items()]
    described = [tensor(name, shape[::-1], kind, offset) for name, kind, shape, offset in listed]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        raw(encoded, described, data=100_000)(path)
        file = read_gguf_header("model", path)
    assert file.metadata == {key: value for key, (*_, value) in entries.items()}
    start = 24 + sum(map(len, [*encoded, *described]))
    start += -start % 32
    for name, kind, shape, offset in listed:
        found, (block, nbytes) = file.tensors[name], PER_BLOCK[kind]
        assert (found.shape, found.start, found.nbytes) == (shape, start + offset, math.prod(shape) // block * nbytes)


@holds_for(
    60,
    content=st.binary(max_size=200) | st.lists(st.sampled_from(range(6)), max_size=60).map(bytes),
    version=st.sampled_from((2, 3)),
    counts=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_arbitrary_headers_give_a_file_or_a_sentence(content: bytes, version: int, counts: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(UserError):
        path = Path(folder) / "model.gguf"
        raw([content], version=version, counts=counts)(path)
        read_gguf_header("model", path)


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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        save_gguf(path, metadata=changes)
        spec = ModelSpec(str(path), "float32", device="cpu").resolved()
        for use in (lambda: read_tokenizer(spec).encode("def f(x):"), lambda: load(spec)):
            try:
                use()
            except UserError as error:
                assert str(error).isprintable() and ": " in str(error)
