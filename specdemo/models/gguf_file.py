"""Reader for the headers of untrusted GGUF files."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cache
from math import isfinite, prod
from pathlib import Path
from typing import Any, TypeVar

from specdemo.core.errors import UserError, plain_text
from specdemo.models.untrusted import MAX_TOKENIZER_BYTES

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_MAX_VALUES = 1_500_000
_MAX_DIMENSIONS = 4
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
_LENGTH = struct.Struct("<Q")

Value = TypeVar("Value")


@dataclass(frozen=True)
class GgufTensor:
    """Type, shape and location of a tensor in a file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensor descriptions of a file."""

    name: str
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def value(self, key: str, kind: type[Value], default: Value | None = None, layers: int | None = None) -> Value:
        """Return a metadata value. Raises `UserError` for other types and missing values.

        `layers`: allowed length of a list of equal values.
        """
        stored = self.metadata.get(key, default)
        if layers is not None and isinstance(stored, list):
            if len(stored) != layers or len({*stored}) != 1:
                shown = plain_text(repr(stored), 40)
                raise self.refusal(f"{key} is {shown}, not an equal value for each of {layers:,} layers")
            stored = stored[0]
        if kind is float and type(stored) is int:
            stored = float(stored)
        if type(stored) is not kind or (isinstance(stored, float) and not isfinite(stored)):
            shown = "missing" if stored is None else plain_text(repr(stored), 40)
            raise self.refusal(f"{key} is {shown}, not {_KINDS[kind]}")
        return stored

    def refusal(self, reason: str) -> UserError:
        return UserError(f"{self.name} is not a usable GGUF file ({reason}): choose another file")


def read_gguf_header(name: str, path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return GgufFile(name, path, *_Reader(data).read())
    except ValueError as error:
        reason = "a text is not UTF-8" if isinstance(error, UnicodeDecodeError) else plain_text(str(error), 150)
        raise UserError(f"{name} is not a usable GGUF file ({reason}): download it again, or choose another") from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0
        self._values = 0
        self._most = min(len(data), MAX_TOKENIZER_BYTES)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            big_endian = version and version & 0xFFFF == 0
            raise ValueError("it is big-endian" if big_endian else f"its version is {version:,}, not 2 or 3")
        tensors, entries = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            self._add(metadata, self._texts(1)[0], self._value(self._number("I")))
        described: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(tensors):
            name, dimensions = self._texts(1)[0], self._number("I")
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions:,} dimensions")
            sizes = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
            self._add(described, name, (self._number("I"), sizes[::-1], self._number("Q")))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its alignment is {plain_text(repr(alignment), 40)}")
        data_start = self._at + -self._at % alignment
        return metadata, {name: self._placed(name, data_start, *values) for name, values in described.items()}

    def _add(self, values: dict[str, Any], key: str, value: Any) -> None:
        if key in values:  # also ends the reading of zeros
            raise ValueError(f"{plain_text(key, 50)!r} occurs twice")
        values[key] = value

    def _take(self, count: int) -> bytes:
        start = self._at
        return self._data[start : self._reach(count)]

    def _reach(self, count: int) -> int:
        self._at += count
        if self._at > self._most:
            raise ValueError("it is truncated" if self._most == len(self._data) else "its header is too long")
        return self._at

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _texts(self, count: int) -> list[str]:
        data, texts = self._data, []
        for _ in range(count):
            start = self._reach(8)
            end = self._reach(*_LENGTH.unpack_from(data, start - 8))
            texts.append(data[start:end].decode())
        return texts

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._texts(1)[0]
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _LIST:
            raise ValueError(f"a value has the unknown type {kind:,}")
        kind, count = self._number("I"), self._number("Q")
        self._values += count
        if self._values > _MAX_VALUES:
            raise ValueError(f"its lists have {self._values:,} values")
        if kind == _TEXT:
            return self._texts(count)
        if kind not in _NUMBERS:
            raise ValueError("a list contains lists" if kind == _LIST else f"a list has the unknown type {kind:,}")
        code = f"<{count}{_NUMBERS[kind]}"
        return list(struct.unpack(code, self._take(struct.calcsize(code))))

    def _placed(self, name: str, data_start: int, kind: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
        shown, kinds = plain_text(name, 60), _tensor_kinds()
        if kind not in kinds:
            raise ValueError(f"{shown} has the unknown type {kind:,}")
        title, block, block_bytes = kinds[kind]
        if not all(shape) or shape[-1] % block:
            raise ValueError(f"{shown} has the shape {' × '.join(f'{n:,}' for n in shape)}")
        nbytes, start = prod(shape) // block * block_bytes, data_start + offset
        if start + nbytes > len(self._data):
            raise ValueError(f"{shown} is beyond the end")
        return GgufTensor(title, shape, start, nbytes)


@cache
def _tensor_kinds() -> dict[int, tuple[str, int, int]]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants  # the import takes 0.2 s

    readable = (kind for kind in GGMLQuantizationType if kind.name in ("F32", "F16") or hasattr(quants, kind.name))
    return {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in readable}
