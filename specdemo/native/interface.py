"""Declarations of the structures and functions of the C library, see `interface.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from enum import IntEnum

_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double
_INT, _INT32 = ctypes.c_int, ctypes.c_int32
_INT64 = ctypes.c_int64
_ADDRESS = ctypes.c_void_p


class MatrixStruct(ctypes.Structure):
    """Weights of a linear layer; without weights: no layer."""

    _fields_ = [
        *((name, _ADDRESS) for name in ("weights", "scales", "codes", "code_bytes", "bias")),
        *((name, _INT32) for name in ("form", "outputs", "inputs", "narrow")),
    ]


class LayerStruct(ctypes.Structure):
    """Matrices and norms of a decoder layer."""

    _fields_ = [
        *((name, MatrixStruct) for name in ("qkv", "value", "out", "gate_up", "down")),
        *((name, _ADDRESS) for name in ("enter", "between", "query_norm", "key_norm", "after_out", "after_down")),
        ("attention_scale", _FLOAT),
        ("window", _INT32),
    ]


class ModelStruct(ctypes.Structure):
    """Layers, embeddings, head and sizes of a model."""

    _fields_ = [
        *((name, _ADDRESS) for name in ("layers", "embedding", "positions", "channel_scale")),
        *((name, _ADDRESS) for name in ("fuse", "stream_norm", "leave")),
        ("head", MatrixStruct),
        *((name, _INT32) for name in ("layer_count", "width", "inner", "heads", "kv_heads", "head_dim", "cache_form")),
        *((name, _INT32) for name in ("rotated", "activation", "gated", "centred", "parallel", "replaced")),
        *((name, _FLOAT) for name in ("epsilon", "embedding_scale", "attention_cap", "logit_cap")),
    ]


class TextStruct(ctypes.Structure):
    """Cache of a text of a pass, and the number of its rows."""

    _fields_ = [
        *((name, _ADDRESS) for name in ("cache", "states", "target_states", "own_state")),
        ("capacity", _INT64),
        *((name, _INT32) for name in ("rows", "held", "last")),
    ]


class PassStruct(ctypes.Structure):
    """Rows of the texts of a forward pass, their visible cache positions, and the buffers for results."""

    _fields_ = [
        *((name, _ADDRESS) for name in ("model", "texts", "cosines", "sines", "ids", "positions", "prefix")),
        *((name, _ADDRESS) for name in ("extra", "extra_start", "taps", "logits", "scratch", "stop", "times")),
        *((name, _INT32) for name in ("text_count", "rows", "rotations", "tap_count", "threads")),
    ]


class ChainStruct(ctypes.Structure):
    """Sampling parameters of a drafted chain, and the buffers for its tokens and distributions."""

    _fields_ = [
        ("top_p", _DOUBLE),
        *((name, _ADDRESS) for name in ("uniforms", "probs", "scratch", "peaks", "chosen", "tokens", "ids")),
        *((name, _INT64) for name in ("top_k", "vocab")),
        *((name, _FLOAT) for name in ("temperature", "least_reach")),
        *((name, _INT32) for name in ("count", "drawn", "passes")),
    ]


class Result(IntEnum):
    """Result codes of a pass; only `DONE` means that its logits are complete."""

    DONE = 0
    NO_MEMORY = 1
    STOPPED = 2
    INVALID = 3


class PassStopped(Exception):
    """A pass ended early, because its stop flag was set."""


class StopFlag:
    """Flag that ends passes early; any thread and signal handlers may set it during a pass."""

    def __init__(self) -> None:
        self._value = _INT32()
        self.address: int = ctypes.addressof(self._value)

    def set(self) -> None:
        """End the current pass and all later ones until `clear`."""
        self._value.value = 1

    def clear(self) -> None:
        self._value.value = 0

    def __bool__(self) -> bool:
        return bool(self._value.value)


class _Member(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("offset", _INT64), ("size", _INT64)]


class _Format(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        *((name, _INT32) for name in ("bits", "group", "scales", "scale_form", "activation_peak", "step", "offset")),
    ]


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "matrix": MatrixStruct,
    "layer": LayerStruct,
    "model": ModelStruct,
    "text": TextStruct,
    "pass": PassStruct,
    "chain": ChainStruct,
    "format": _Format,
}
# The type of the result and the types of the arguments, by function name.
FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "interface_members": (ctypes.POINTER(_Member), ()),
    "format_table": (ctypes.POINTER(_Format), ()),
    "block_outputs": (_INT, ()),
    "vector_outputs": (_INT, ()),
    "vector_extensions": (ctypes.c_char_p, ()),
    "set_code_bytes": (None, (_ADDRESS, _ADDRESS)),
    "matrix_rows": (None, (ctypes.POINTER(MatrixStruct), _ADDRESS, _INT64, _ADDRESS)),
    "check_model": (ctypes.c_char_p, (ctypes.POINTER(ModelStruct),)),
    "check_pass": (ctypes.c_char_p, (ctypes.POINTER(PassStruct),)),
    "scratch_floats": (_INT64, (ctypes.POINTER(ModelStruct), _INT32)),
    "run_pass": (_INT, (ctypes.POINTER(PassStruct),)),
    "draft_chain": (_INT, (ctypes.POINTER(PassStruct), ctypes.POINTER(ChainStruct))),
    "write_rows": (_INT, (ctypes.POINTER(MatrixStruct), _INT64, _INT64, _ADDRESS)),
    "self_check": (_INT, ()),
    "largest_logits": (None, (_ADDRESS, _INT64, _INT64, _INT64, _ADDRESS, _ADDRESS)),
    "distributions": (
        None,
        (_ADDRESS, _INT64, _INT64, _INT64, _FLOAT, _INT64, _DOUBLE, _ADDRESS, _ADDRESS),
    ),
    "invert": (_INT64, (_ADDRESS, _INT64, _DOUBLE)),
    "compare_drafts": (_INT, (_ADDRESS, _ADDRESS, _INT64, _INT64, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS)),
    "compare_sparse_drafts": (
        _INT,
        (_ADDRESS, _ADDRESS, _INT64, _ADDRESS, _INT64, _INT64, _INT64, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
    ),
    "token_ranks": (_INT, (_ADDRESS, _INT64, _INT64, _ADDRESS, _ADDRESS, _ADDRESS)),
    "summarize": (None, (_ADDRESS, _INT64, _INT64, _INT64, _INT64, _ADDRESS, _ADDRESS, _ADDRESS)),
    "excess": (_DOUBLE, (_ADDRESS, _ADDRESS, _FLOAT, _INT64)),
    "residual": (_DOUBLE, (_ADDRESS, _ADDRESS, _FLOAT, _INT64, _ADDRESS)),
    "sparse_residual": (_DOUBLE, (_ADDRESS, _ADDRESS, _ADDRESS, _INT64, _FLOAT, _INT64, _ADDRESS)),
}


def declare(library: ctypes.CDLL) -> None:
    """Declare the types of all functions. Raise AttributeError if one is missing."""
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


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


def layout_differences(library: ctypes.CDLL) -> list[str]:
    """Return the members of the structures whose offset or size differs from those in C."""
    expected = dict(_members())
    compiled: dict[str, tuple[int, int]] = {}
    for member in library.interface_members():
        if member.name is None:
            break
        compiled[member.name.decode()] = member.offset, member.size
    return sorted(name for name in expected | compiled if expected.get(name) != compiled.get(name))


def _members() -> Iterator[tuple[str, tuple[int, int]]]:
    for name, structure in STRUCTURES.items():
        yield name, (0, ctypes.sizeof(structure))
        for field in structure._fields_:
            place = getattr(structure, field[0])
            yield f"{name}.{field[0]}", (place.offset, place.size)
