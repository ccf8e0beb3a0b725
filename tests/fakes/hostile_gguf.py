"""Damaged and malicious GGUF files."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fakes.gguf_models import save_gguf

U32, U64, I32, F32, TEXT, LIST = 4, 10, 5, 6, 8, 9
NAN = float("nan")


@dataclass(frozen=True)
class HostileFile:
    """`part`: text of the refusal by `load`."""

    write: Callable[[Path], object]
    part: str


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def raw(
    entries: Sequence[bytes] = (), tensors: Sequence[bytes] = (), version: int = 3, counts: Any = None, data: int = 4096
) -> Callable[[Path], object]:
    """File from encoded parts. `counts`: other numbers of tensors and entries; `data`: bytes at the end."""
    counts = counts or (len(tensors), len(entries))
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*entries, *tensors])
    return lambda path: path.write_bytes(header + bytes(data))


def bytes_of(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def edited(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Change the bytes of a valid file."""

    def write(path: Path) -> None:
        save_gguf(path)
        path.write_bytes(edit(path.read_bytes()))

    return write


def model(**options: Any) -> Callable[[Path], object]:
    return lambda path: save_gguf(path, **options)


def described(architecture: str = "llama", **values: Any) -> Callable[[Path], object]:
    """Valid file with other metadata; `__` is a dot, `None` deletes."""
    changes = {f"{{arch}}.{key.replace('__', '.')}": value for key, value in values.items()}
    return model(architecture=architecture, metadata=changes)


def tokens(**values: Any) -> Callable[[Path], object]:
    return model(metadata={f"tokenizer.ggml.{key}": value for key, value in values.items()})


def tensors(**values: Any) -> Callable[[Path], object]:
    return model(tensors={key.replace("__", "."): value for key, value in values.items()})


def sparse(write: Callable[[Path], object]) -> Callable[[Path], object]:
    """Extend a file to a terabyte of zeros."""

    def extended(path: Path) -> None:
        write(path)
        with path.open("r+b") as file:
            file.truncate(1 << 40)

    return extended


def with_end(end: Callable[[int], int]) -> Callable[[bytes], bytes]:
    return lambda content: content[: end(len(content))]


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


NORM, QUERY, EMBEDDING = "blk__0__attn_norm__weight", "blk__0__attn_q__weight", "token_embd__weight"
HUGE = 1 << 63
HEADERS = {
    "other magic": HostileFile(bytes_of(b"PK\3\4" + bytes(100)), "does not begin with GGUF"),
    "big-endian": HostileFile(bytes_of(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(99)), "big-endian"),
    "many tensors": HostileFile(raw(counts=(HUGE, 0)), "announces 9,223,372,036,854,775,808 tensors"),
    "sparse file": HostileFile(sparse(raw(counts=(1, 1), data=0)), "0 dimensions"),
    "many texts": HostileFile(
        sparse(raw([entry("a", LIST, struct.pack("<IQ", TEXT, 1_500_000))], data=0)), "general.architecture is missing"
    ),
    "endless text": HostileFile(raw([text("a") + struct.pack("<IQ", TEXT, HUGE)]), "a text has"),
    "deep lists": HostileFile(raw([entry("a", LIST, struct.pack("<IQ", LIST, 1) * 100_000)]), "a list contains lists"),
    "size 2^63": HostileFile(raw(tensors=[tensor("a", (HUGE, HUGE))]), "beyond the end"),
    "overflowing size": HostileFile(raw(tensors=[tensor("a", (1 << 32, 1 << 32, 2))]), "beyond the end"),
    "negative offset": HostileFile(raw(tensors=[tensor("a", (8,), offset=(1 << 64) - 32)]), "beyond the end"),
    "overlapping tensors": HostileFile(
        raw(tensors=[tensor("a", (64,)), tensor("b", (8,), offset=32)]), "b overlaps another tensor"
    ),
    "huge alignment": HostileFile(raw([entry("general.alignment", U32, b"\xff" * 4)]), "alignment is 4,?294"),
    "control characters": HostileFile(raw([entry("a\n\x1b[2J", U32, bytes(4))] * 2), "occurs twice"),
    "truncated weights": HostileFile(edited(with_end(lambda size: size - 5000)), "beyond the end"),
}
MODELS = {
    "absurd width": HostileFile(
        described(embedding_length=1 << 31), "has 2,147,483,648 values per row, not 1 to 65,536"
    ),
    "a billion layers": HostileFile(described(block_count=10**9), "has 1,000,000,000 layers, not 1 to 1,000"),
    "more layers": HostileFile(described(block_count=3), "missing: blk.2"),
    "odd head": HostileFile(
        described(attention__key_length=3, attention__value_length=3), "rotates 3 values of a head, not an even number"
    ),
    "other values": HostileFile(described(attention__value_length=32), "16 values in keys and 32 in values"),
    "unknown rotation": HostileFile(
        described(rope__scaling__type="yarn", rope__scaling__factor=4.0), "rotary embedding of kind 'yarn'"
    ),
    "factor -1": HostileFile(described(rope__scaling__type="linear", rope__scaling__factor=-1.0), "factor is -1"),
    "part of a model": HostileFile(model(metadata={"split.count": 3}), "is a part of a model: join"),
    "missing tensor": HostileFile(tensors(**{QUERY: None}), "missing: blk.0.attn_q.weight"),
    "other shape": HostileFile(tensors(**{QUERY: zeros(64, 32)}), "of other shapes: blk.0.attn_q.weight"),
    "vocabulary mismatch": HostileFile(
        tensors(**{EMBEDDING: zeros(400, 64)}), "its vocabulary has 300 tokens, and the model has 400"
    ),
}
WORDS = [f"w{i}" for i in range(300)]
TOKENIZERS = {
    "tokens as numbers": HostileFile(tokens(tokens=[1] * 300), "tokenizer.ggml.tokens is not a list of texts"),
    "repeated token": HostileFile(tokens(tokens=["a"] * 300), "a token occurs twice"),
    "few types": HostileFile(tokens(token_type=[1, 2]), "300 tokens and 2 values of tokenizer.ggml.token_type"),
    "merge of strangers": HostileFile(tokens(merges=["東 京"]), "the tokenizer of"),
    "endless pieces": HostileFile(
        tokens(model="llama", scores=[0.0] * 300, tokens=[w * 15_000 for w in WORDS]), "too long"
    ),
    "long piece": HostileFile(
        tokens(model="llama", scores=[0.0] * 300, tokens=[*WORDS[:-1], "a" * 60_000]), "too long"
    ),
    "end beyond the vocabulary": HostileFile(tokens(eos_token_id=10**6), "eos_token_id is 1,000,000, and it has 300"),
}
HOSTILE_FILES = HEADERS | MODELS | TOKENIZERS
