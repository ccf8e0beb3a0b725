"""Structures, constants and functions of the C library, read from `interface.h`."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

SOURCES = Path(__file__).parent
_HEADERS = ("interface.h", "formats.h")  # read by Python
_Structure = TypeVar("_Structure", bound=type[ctypes.Structure])
_Type: TypeAlias = type[Any]


def header_digest(folder: Path) -> int:
    """Return 60 bits of the digest of the headers in `folder`."""
    texts = [(folder / name).read_bytes() for name in _HEADERS]
    return int(hashlib.sha256(b"\0".join(texts)).hexdigest()[:15], 16)


DIGEST = header_digest(SOURCES)
_TEXT = re.sub(r"/\*.*?\*/|#[^\n]*", "", (SOURCES / "interface.h").read_text("utf-8"), flags=re.DOTALL)
_FIELDS = {name: fields for fields, name in re.findall(r"typedef struct {(.*?)} (\w+);", _TEXT, re.DOTALL)}
_ENUMS = {name: re.findall(r"\w+", members) for name, members in re.findall(r"enum (\w+) {(.*?)};", _TEXT, re.DOTALL)}
_FUNCTIONS = re.findall(r"^(\w[\w *]*?)(\w+)\(([^)]*)\);", _TEXT, re.MULTILINE)
CONSTANTS = {member: number for members in _ENUMS.values() for number, member in enumerate(members)}

_types: dict[str, _Type] = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def _described(name: str) -> Callable[[_Structure], _Structure]:
    """Set the fields of a class to those of the structure `name`; pointers are addresses."""

    def describe(structure: _Structure) -> _Structure:
        structure._fields_ = list(_fields(_FIELDS[name]))
        _types[name] = structure
        return structure

    return describe


def _fields(declarations: str) -> Iterator[tuple[str, _Type]]:
    for declaration in filter(None, map(str.strip, declarations.split(";"))):
        kind, declarators = declaration.removeprefix("const ").split(maxsplit=1)
        for declarator in declarators.split(","):
            (name,) = re.findall(r"\w+$", declarator)
            yield name, ctypes.c_void_p if "*" in declarator else _types[kind]


@_described("matrix")
class MatrixStruct(ctypes.Structure):
    """Weights of a linear layer; without weights: no layer."""


@_described("layer")
class LayerStruct(ctypes.Structure):
    """Matrices and norms of a decoder layer."""


@_described("model")
class ModelStruct(ctypes.Structure):
    """Layers, embeddings, head and sizes of a model."""


@_described("text")
class TextStruct(ctypes.Structure):
    """Cache of a text of a pass, and the number of its rows."""


@_described("pass")
class PassStruct(ctypes.Structure):
    """Rows of the texts of a forward pass, their visible cache positions, and the buffers for results."""


@_described("sampling")
class SamplingStruct(ctypes.Structure):
    """Parameters of the distribution of a token."""


@_described("chain")
class ChainStruct(ctypes.Structure):
    """Sampling parameters of a drafted chain, and the buffers for its tokens and distributions."""


def _result_codes() -> Any:
    return IntEnum("Result", _ENUMS["result"], start=0)


Result = _result_codes()  # DONE: the logits of a pass are complete


class PassStopped(Exception):
    """A pass ended early, because its stop flag was set."""


class ForeignLibrary(Exception):
    """A library was compiled from other headers."""


class StopFlag:
    """Flag that ends passes early; any thread and signal handlers may set it during a pass."""

    def __init__(self) -> None:
        self._value = ctypes.c_int32()
        self.address: int = ctypes.addressof(self._value)

    def set(self) -> None:
        """End the current pass and all later ones until `clear`."""
        self._value.value = 1

    def clear(self) -> None:
        self._value.value = 0

    def __bool__(self) -> bool:
        return bool(self._value.value)


def declare(library: ctypes.CDLL) -> None:
    """Declare the types of all functions. Raises `ForeignLibrary` for a library of other headers."""
    digest = getattr(library, "interface_digest", None)
    if digest:
        digest.restype = ctypes.c_int64
    if not digest or digest() != DIGEST:
        raise ForeignLibrary
    for result, name, arguments in _FUNCTIONS:
        function = getattr(library, name)
        function.restype = _result_type(result)
        function.argtypes = [] if arguments == "void" else [_argument_type(text) for text in arguments.split(",")]


def _result_type(declared: str) -> _Type | None:
    kind = declared.removeprefix("const ").split()
    if kind == ["char", "*"]:
        return ctypes.c_char_p
    return None if kind == ["void"] else _types[kind[0]]


def _argument_type(declared: str) -> _Type:
    """Structures are passed by pointer, arrays by address."""
    kind = declared.strip().removeprefix("const ").split()[0]
    if "*" not in declared:
        return _types[kind]
    return ctypes.POINTER(_types[kind]) if kind in _FIELDS else ctypes.c_void_p


def check_result(library: ctypes.CDLL, result: int, requested: PassStruct) -> None:
    """Raise MemoryError, PassStopped or ValueError unless the pass is done."""
    if result == Result.NO_MEMORY:
        raise MemoryError("the native engine has no memory for its buffers")
    if result == Result.STOPPED:
        raise PassStopped
    if result == Result.INVALID:
        fault = library.check_pass(ctypes.byref(requested))
        raise ValueError(f"invalid pass: {fault.decode() if fault else 'its chain has no buffers'}")


def check_model(library: ctypes.CDLL, model: ModelStruct) -> None:
    """Raise ValueError for sizes that contradict each other or are not supported."""
    if fault := library.check_model(ctypes.byref(model)):
        raise ValueError(fault.decode())
