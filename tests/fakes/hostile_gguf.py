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
    "empty": HostileFile(bytes_of(b""), "empty file"),
    "other magic": HostileFile(bytes_of(b"PK\3\4" + bytes(100)), "does not begin with GGUF"),
    "safetensors": HostileFile(bytes_of(struct.pack("<Q", 8) + b'{"a":{} }' * 9), "does not begin with GGUF"),
    "magic alone": HostileFile(bytes_of(b"GGUF"), "truncated"),
    "version 1": HostileFile(raw(version=1), "version is 1, not 2 or 3"),
    "version of the future": HostileFile(raw(version=4000), "version is 4,000"),
    "big-endian": HostileFile(bytes_of(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(99)), "big-endian"),
    "many tensors": HostileFile(raw(counts=(HUGE, 0)), "announces 9,223,372,036,854,775,808 tensors"),
    "many entries": HostileFile(raw(counts=(0, HUGE)), "announces 9,223,372,036,854,775,808 entries"),
    "entries beyond the end": HostileFile(raw(counts=(0, 10_000), data=100), "announces 10,000 entries"),
    "sparse file": HostileFile(sparse(raw(counts=(1, 1), data=0)), "0 dimensions"),
    "many texts": HostileFile(
        sparse(raw([entry("a", LIST, struct.pack("<IQ", TEXT, 1_500_000))], data=0)), "general.architecture is missing"
    ),
    "long text": HostileFile(sparse(raw([text("a") + struct.pack("<IQ", TEXT, 63_000_000)], data=0)), "is missing"),
    "longer text": HostileFile(sparse(raw([text("a") + struct.pack("<IQ", TEXT, 64_000_000)], data=0)), "too long"),
    "long key": HostileFile(raw([text(b"k" * 2000)]), "a text has 2,000 bytes"),
    "endless key": HostileFile(raw([struct.pack("<Q", HUGE)]), "a text has"),
    "endless text": HostileFile(raw([text("a") + struct.pack("<IQ", TEXT, HUGE)]), "a text has"),
    "text beyond the end": HostileFile(raw([text("a") + struct.pack("<IQ", TEXT, 9999)]), "truncated"),
    "invalid UTF-8": HostileFile(raw([entry(b"\xff\xfe", U32, bytes(4))]), "not UTF-8"),
    "invalid value": HostileFile(raw([entry("a", TEXT, text(b"\xc3("))]), "not UTF-8"),
    "unknown value type": HostileFile(raw([entry("a", 77, bytes(8))]), "unknown type 77"),
    "endless list": HostileFile(raw([entry("a", LIST, struct.pack("<IQ", U32, HUGE))]), "lists have"),
    "list beyond the end": HostileFile(raw([entry("a", LIST, struct.pack("<IQ", F32, 1_499_999))]), "truncated"),
    "list of lists": HostileFile(raw([entry("a", LIST, struct.pack("<IQ", LIST, 1))]), "a list contains lists"),
    "deep lists": HostileFile(raw([entry("a", LIST, struct.pack("<IQ", LIST, 1) * 100_000)]), "a list contains lists"),
    "list of an unknown type": HostileFile(raw([entry("a", LIST, struct.pack("<IQ", 99, 1))]), "unknown type 99"),
    "texts beyond the end": HostileFile(raw([entry("a", LIST, struct.pack("<IQ", TEXT, 1_499_999))], data=99), "trunc"),
    "repeated key": HostileFile(raw([entry("a", U32, bytes(4))] * 2), "'a' occurs twice"),
    "repeated tensor": HostileFile(raw(tensors=[tensor("a", (8,))] * 2), "'a' occurs twice"),
    "no dimensions": HostileFile(raw(tensors=[tensor("a", ())]), "0 dimensions"),
    "many dimensions": HostileFile(raw(tensors=[tensor("a", (1,) * 5)]), "5 dimensions"),
    "size 0": HostileFile(raw(tensors=[tensor("a", (0, 8))]), "the shape 8 × 0"),
    "size 2^63": HostileFile(raw(tensors=[tensor("a", (HUGE, HUGE))]), "beyond the end"),
    "overflowing size": HostileFile(raw(tensors=[tensor("a", (1 << 32, 1 << 32, 2))]), "beyond the end"),
    "partial block": HostileFile(raw(tensors=[tensor("a", (33, 2), kind=8)]), "the shape 2 × 33"),
    "unknown tensor type": HostileFile(raw(tensors=[tensor("a", (32,), kind=999)]), "unknown type 999"),
    "whole numbers": HostileFile(raw(tensors=[tensor("a", (32,), kind=26)]), "unknown type 26"),
    "offset beyond the end": HostileFile(raw(tensors=[tensor("a", (8,), offset=1 << 40)]), "beyond the end"),
    "negative offset": HostileFile(raw(tensors=[tensor("a", (8,), offset=(1 << 64) - 32)]), "beyond the end"),
    "unaligned offset": HostileFile(raw(tensors=[tensor("a", (8,), offset=4)]), "unaligned"),
    "overlapping tensors": HostileFile(
        raw(tensors=[tensor("a", (64,)), tensor("b", (8,), offset=32)]), "b overlaps another tensor"
    ),
    "alignment 0": HostileFile(raw([entry("general.alignment", U32, bytes(4))]), "alignment is 0"),
    "alignment as text": HostileFile(raw([entry("general.alignment", TEXT, text("x"))]), "alignment is 'x'"),
    "huge alignment": HostileFile(raw([entry("general.alignment", U32, b"\xff" * 4)]), "alignment is 4,?294"),
    "control characters": HostileFile(raw([entry("a\n\x1b[2J", U32, bytes(4))] * 2), "occurs twice"),
    "truncated header": HostileFile(edited(with_end(lambda size: 3000)), "truncated"),
    "truncated weights": HostileFile(edited(with_end(lambda size: size - 5000)), "beyond the end"),
}
MODELS = {
    "no metadata": HostileFile(raw(), "general.architecture is missing"),
    "architecture as number": HostileFile(
        raw([entry("general.architecture", U32, bytes(4))]), "general.architecture is 0, not a text"
    ),
    "other architecture": HostileFile(
        raw([entry("general.architecture", TEXT, text("mamba"))]), "the architecture 'mamba', and GGUF files of llama"
    ),
    "no width": HostileFile(described(embedding_length=None), "llama.embedding_length is missing, not a whole number"),
    "width as text": HostileFile(described(embedding_length="64"), "embedding_length is '64'"),
    "width as float": HostileFile(described(embedding_length=64.5), "embedding_length is 64.5"),
    "width as list": HostileFile(described(embedding_length=[64, 64]), r"embedding_length is \[64, 64\]"),
    "width as boolean": HostileFile(described(embedding_length=True), "embedding_length is True"),
    "other width": HostileFile(described(embedding_length=128), "of other shapes"),
    "absurd width": HostileFile(
        described(embedding_length=1 << 31), "has 2,147,483,648 values per row, not 1 to 65,536"
    ),
    "a billion layers": HostileFile(described(block_count=10**9), "has 1,000,000,000 layers, not 1 to 1,000"),
    "more layers": HostileFile(described(block_count=3), "missing: blk.2"),
    "fewer layers": HostileFile(described(block_count=1), "unexpected: blk.1"),
    "no layers": HostileFile(described(block_count=0), "has 0 layers"),
    "no heads": HostileFile(described(attention__head_count=0), "has 0 heads"),
    "heads by layer": HostileFile(described(attention__head_count_kv=[2, 1]), "head_count_kv is .*equal value"),
    "indivisible heads": HostileFile(described(attention__head_count=5), "5 heads|other shapes"),
    "indivisible groups": HostileFile(described(attention__head_count_kv=3), "3 keys and values"),
    "odd head": HostileFile(
        described(attention__key_length=3, attention__value_length=3), "rotates 3 values of a head, not an even number"
    ),
    "other values": HostileFile(described(attention__value_length=32), "16 values in keys and 32 in values"),
    "partial rotation": HostileFile(described(rope__dimension_count=8), "rotates 8 of the 16 values of a head"),
    "NaN": HostileFile(described(attention__layer_norm_rms_epsilon=NAN), "layer_norm_rms_epsilon is nan, not a number"),
    "epsilon 0": HostileFile(described(attention__layer_norm_rms_epsilon=0.0), "rms_norm_eps is 0"),
    "negative base": HostileFile(described(rope__freq_base=-1.0), "rope_theta is -1"),
    "unknown rotation": HostileFile(
        described(rope__scaling__type="yarn", rope__scaling__factor=4.0), "rotary embedding of kind 'yarn'"
    ),
    "factor -1": HostileFile(described(rope__scaling__type="linear", rope__scaling__factor=-1.0), "factor is -1"),
    "experts": HostileFile(described(expert_count=8), r"sets expert_count \(8\), which is not supported"),
    "window": HostileFile(described(attention__sliding_window=8), "sets attention.sliding_window"),
    "part of a model": HostileFile(model(metadata={"split.count": 3}), "is a part of a model: join"),
    "missing tensor": HostileFile(tensors(**{QUERY: None}), "missing: blk.0.attn_q.weight"),
    "missing embedding": HostileFile(tensors(**{EMBEDDING: None}), "the tensor token_embd.weight is missing"),
    "missing norm": HostileFile(tensors(**{NORM: None}), "missing: blk.0.attn_norm.weight"),
    "other shape": HostileFile(tensors(**{QUERY: zeros(64, 32)}), "of other shapes: blk.0.attn_q.weight"),
    "matrix as norm": HostileFile(tensors(**{NORM: zeros(1, 64)}), "of other shapes: blk.0.attn_norm.weight"),
    "unexpected tensor": HostileFile(tensors(blk__0__extra__weight=zeros(8)), "unexpected: blk.0.extra.weight"),
    "other factors": HostileFile(tensors(rope_freqs__weight=zeros(3)), "of other shapes: rope_freqs.weight"),
    "vocabulary mismatch": HostileFile(
        tensors(**{EMBEDDING: zeros(400, 64)}), "its vocabulary has 300 tokens, and the model has 400"
    ),
}
WORDS = [f"w{i}" for i in range(300)]
TOKENIZERS = {
    "no tokens": HostileFile(tokens(tokens=None), "tokenizer.ggml.tokens is missing"),
    "tokens as numbers": HostileFile(tokens(tokens=[1] * 300), "tokenizer.ggml.tokens is not a list of texts"),
    "tokens as text": HostileFile(tokens(tokens="abc"), "tokenizer.ggml.tokens is 'abc'"),
    "repeated token": HostileFile(tokens(tokens=["a"] * 300), "a token occurs twice"),
    "few types": HostileFile(tokens(token_type=[1, 2]), "300 tokens and 2 values of tokenizer.ggml.token_type"),
    "unknown tokenizer": HostileFile(tokens(model="telepathy"), "its tokenizer 'telepathy' is unknown"),
    "tokenizer as number": HostileFile(tokens(model=7), "tokenizer.ggml.model is 7"),
    "unknown words": HostileFile(tokens(pre="telepathy"), "splits texts by the unknown rule 'telepathy'"),
    "no merges": HostileFile(tokens(merges=None), "tokenizer.ggml.merges is missing"),
    "merge of one": HostileFile(tokens(merges=["ab"]), "the invalid merge 'ab'"),
    "merge of strangers": HostileFile(tokens(merges=["東 京"]), "the tokenizer of"),
    "no scores": HostileFile(tokens(model="llama"), "300 tokens have no scores"),
    "few scores": HostileFile(tokens(model="llama", scores=[1.0]), "300 tokens and 1 values of tokenizer.ggml.scores"),
    "scores as texts": HostileFile(tokens(model="llama", scores=["a"] * 300), "invalid scores"),
    "endless pieces": HostileFile(
        tokens(model="llama", scores=[0.0] * 300, tokens=[w * 15_000 for w in WORDS]), "too long"
    ),
    "long piece": HostileFile(
        tokens(model="llama", scores=[0.0] * 300, tokens=[*WORDS[:-1], "a" * 60_000]), "too long"
    ),
    "end beyond the vocabulary": HostileFile(tokens(eos_token_id=10**6), "eos_token_id is 1,000,000, and it has 300"),
    "end as text": HostileFile(tokens(eos_token_id="</s>"), "eos_token_id is '</s>'"),
    "template as number": HostileFile(model(metadata={"tokenizer.chat_template": 7}), "chat_template is 7"),
}
HOSTILE_FILES = HEADERS | MODELS | TOKENIZERS
