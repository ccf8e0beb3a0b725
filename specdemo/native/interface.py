"""Structures, number formats, constants and functions of the C library, read from `interface.h`."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

SOURCES = Path(__file__).parent
_HEADER = SOURCES / "interface.h"
_Structure = TypeVar("_Structure", bound=type[ctypes.Structure])
_Type: TypeAlias = type[Any]


def header_digest() -> int:
    """Return 60 bits of the digest of the header."""
    return int(hashlib.sha256(_HEADER.read_bytes()).hexdigest()[:15], 16)


DIGEST = header_digest()
_TEXT = re.sub(r"/\*.*?\*/|#[^\n]*", "", _HEADER.read_text("utf-8"), flags=re.DOTALL)
_FIELDS = {name: fields for fields, name in re.findall(r"typedef struct {(.*?)} (\w+);", _TEXT, re.DOTALL)}
_ENUMS = {name: re.findall(r"\w+", members) for name, members in re.findall(r"enum (\w+) {(.*?)};", _TEXT, re.DOTALL)}
_FUNCTIONS = re.findall(r"^(\w[\w *]*?)(\w+)\(([^)]*)\);", _TEXT, re.MULTILINE)
CONSTANTS = {member: number for members in _ENUMS.values() for number, member in enumerate(members)}


@dataclass(frozen=True)
class Format:
    """A number format: stored weights of `bits` bits, and `scales` numbers per `group` of inputs and output.

    `scales` is 0 (floats), 1 (scale) or 2 (scale and minimum); a `group` of 0 contains all inputs.
    """

    name: str
    number: int
    bits: int
    group: int
    scales: int
    scale_bits: int

    @property
    def is_coded(self) -> bool:
        """Return True for integers and codes, which are multiplied by quantised activations."""
        return self.scales > 0

    @property
    def has_codes(self) -> bool:
        """Return True if the weights are indices into a table of values."""
        return self.name == "CODE4"

    @property
    def has_bytes(self) -> bool:
        """Return True if the weights are bytes, stored for four inputs at a time."""
        return self.bits == 8

    def matrix_bytes(self, outputs: int, inputs: int, block: int) -> int:
        """Return the bytes of a matrix, without bias, in blocks of `block` outputs."""
        outputs += -outputs % block
        stored = inputs + -inputs % 4 if self.has_bytes else inputs
        groups = inputs // self.group if self.group else 1
        tables = 16 * 4 + 32 if self.has_codes else 0
        return outputs * (stored * self.bits + groups * self.scales * self.scale_bits) // 8 + tables


# Entries `X(name, bits, group, scales, form of the scales, ...)` of FORMAT_LIST
FORMATS = {
    name: Format(name, CONSTANTS[name], int(bits), int(group), int(scales), 16 if scale_form == "F16" else 32)
    for name, bits, group, scales, scale_form in re.findall(r"X\((\w+), (\d+), (\d+), (\d+), (\w+),", _TEXT)
}
QUANTISED_GGUF = tuple(name for name in FORMATS if name.startswith("Q"))  # types of tensors in GGUF files

_types: dict[str, Any] = {
    "void": None,
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


class StopFlag:
    """Flag that ends passes early; any thread and signal handlers may set it during a pass."""

    def __init__(self) -> None:
        self._value = ctypes.c_int32()
        self.address: int = ctypes.addressof(self._value)

    def set(self) -> None:
        """End the current pass and all later ones."""
        self._value.value = 1

    def __bool__(self) -> bool:
        return bool(self._value.value)


def declare(library: ctypes.CDLL) -> None:
    """Declare the types of all functions: strings are bytes, structures are passed by pointer, arrays by address."""
    for result, name, arguments in _FUNCTIONS:
        function = getattr(library, name)
        function.restype = ctypes.c_char_p if "*" in result else _types[result.strip()]
        function.argtypes = [] if arguments == "void" else [_argument_type(text) for text in arguments.split(",")]


def _argument_type(declared: str) -> _Type:
    kind = declared.strip().removeprefix("const ").split()[0]
    if "*" not in declared:
        return _types[kind]
    return ctypes.POINTER(_types[kind]) if kind in _FIELDS else ctypes.c_void_p


def check_model(library: ctypes.CDLL, model: ModelStruct) -> None:
    """Raise ValueError for sizes that contradict each other or are not supported."""
    if fault := library.check_model(ctypes.byref(model)):
        raise ValueError(fault.decode())
