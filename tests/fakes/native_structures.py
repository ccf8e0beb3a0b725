"""Random models and passes of the native engine, built from numpy arrays without torch."""

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdemo.native.interface import (
    FORMATS,
    QUANTISED_GGUF,
    ChainStruct,
    Format,
    LayerStruct,
    MatrixStruct,
    ModelStruct,
    PassStruct,
    SamplingStruct,
    TextStruct,
)

COPIED = ("width", "inner", "heads", "kv_heads", "head_dim", "rotated", "activation", "gated", "centred", "parallel")
COPIED += ("norm_before_residual", "attention_cap", "logit_cap")  # fields of a model with the value of its shape


@dataclass(frozen=True)
class Shape:
    """Sizes and options of a decoder; `form` and `value_form`: number formats of its matrices.

    `fused`: hidden states of the target that a row of a drafting head receives, or 0.
    """

    width: int = 32
    inner: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    rotated: int = 8
    layers: int = 2
    vocab: int = 67
    positions: int = 0
    form: str = "F32"
    value_form: str = ""
    narrow: bool = False
    activation: int = 0
    window: int = 0
    gated: bool = True
    centred: bool = False
    parallel: bool = False
    tied: bool = False
    bias: bool = False
    head_norms: bool = False
    after_norms: bool = False
    cache_form: str = "F32"
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    fused: int = 0
    norm_before_residual: bool = False


class RandomModel:
    """Structures of a model with random weights; `arrays` are allocated in exactly the required size."""

    def __init__(self, library: ctypes.CDLL, shape: Shape, seed: int = 0) -> None:
        self.library, self.shape = library, shape
        self._rng = np.random.default_rng(seed)
        self._block = library.block_outputs()
        self.arrays: list[Any] = []
        self.layers = (LayerStruct * shape.layers)(*map(self._layer, range(shape.layers)))
        size = ctypes.sizeof(LayerStruct)
        self._pointers = (ctypes.c_void_p * shape.layers)(
            *(ctypes.addressof(self.layers) + size * i for i in range(shape.layers))
        )
        self.embedding = None if shape.tied else self._matrix("F32", shape.vocab, shape.width)
        self.positions = self._matrix("F32", shape.positions, shape.width) if shape.positions else None
        self.fuse = self._matrix(shape.form, shape.width, shape.fused * shape.width) if shape.fused else None
        self.struct = ModelStruct(
            layers=ctypes.addressof(self._pointers),
            embedding=self.embedding and ctypes.addressof(self.embedding),
            positions=self.positions and ctypes.addressof(self.positions),
            fuse=self.fuse and ctypes.addressof(self.fuse),
            stream_norm=self._norm(shape.width, shape.centred),
            final_norm=self._norm(shape.width, shape.centred),
            head=self._matrix(shape.form, shape.vocab, shape.width, shape.bias),
            layer_count=shape.layers,
            cache_form=FORMATS[shape.cache_form].number,
            epsilon=1e-5,
            embedding_scale=1.5,
            **{name: getattr(shape, name) for name in COPIED},
        )

    def _array(self, values: np.ndarray) -> int:
        values = np.ascontiguousarray(values)
        self.arrays.append(values)
        return values.ctypes.data

    def _norm(self, width: int, centred: bool) -> int:
        return self._array(self._rng.normal(1, 0.2, 2 * width if centred else width).astype(np.float32))

    def _matrix(self, form: str, outputs: int, inputs: int, bias: bool = False) -> MatrixStruct:
        kind, block = FORMATS[form], self._block
        padded = outputs + -outputs % block
        matrix = MatrixStruct(
            form=kind.number, outputs=outputs, inputs=inputs, weights=self._array(self._weights(kind, padded, inputs))
        )
        matrix.byte_inputs = self.shape.narrow and kind.is_coded
        if kind.scales:
            count = padded * kind.scales * (inputs // kind.group if kind.group else 1)
            dtype = np.float16 if kind.scale_bits == 16 else np.float32
            matrix.scales = self._array(self._rng.uniform(0.001, 0.01, count).astype(dtype))
        if form == "CODE4":
            codes, code_bytes = np.linspace(-1, 1, 16, dtype=np.float32), np.zeros(32, np.uint8)
            matrix.codes, matrix.code_bytes = self._array(codes), self._array(code_bytes)
            self.library.set_code_bytes(matrix.codes, matrix.code_bytes)
        if bias:
            matrix.bias = self._array(self._rng.normal(0, 0.1, padded).astype(np.float32))
        return matrix

    def _weights(self, kind: Format, outputs: int, inputs: int) -> np.ndarray:
        if kind.name in ("INT8", "Q8_0", "Q6_K"):
            return self._rng.integers(1, 256, outputs * -(-inputs // 4) * 4, np.uint8)
        if kind.bits == 4:
            return self._rng.integers(0, 256, outputs * inputs // 2, np.uint8)
        values = self._rng.normal(0, inputs**-0.5, outputs * inputs).astype(np.float32)
        if kind.name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(np.float16) if kind.name == "F16" else values

    def _layer(self, index: int) -> LayerStruct:
        shape = self.shape
        entering = shape.width * (2 if shape.fused and not index else 1)
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        joined = queries + keys * (1 if shape.value_form else 2)
        inner = 2 * (shape.inner + -shape.inner % self._block) if shape.gated else shape.inner
        layer = LayerStruct(
            qkv=self._matrix(shape.form, joined, entering, shape.bias),
            out=self._matrix(shape.form, shape.width, queries, shape.bias),
            gate_up=self._matrix(shape.form, inner, shape.width, shape.bias),
            down=self._matrix(shape.form, shape.width, shape.inner, shape.bias),
            input_norm=self._norm(shape.width, shape.centred),
            mlp_norm=self._norm(shape.width, shape.centred),
            attention_scale=shape.head_dim**-0.5,
            window=shape.window,
        )
        if shape.value_form:
            layer.value = self._matrix(shape.value_form, keys, entering)
        if shape.head_norms:
            layer.query_norm, layer.key_norm = (self._norm(shape.head_dim, False) for _ in range(2))
        if shape.after_norms:
            layer.post_attention_norm, layer.post_mlp_norm = (self._norm(shape.width, shape.centred) for _ in range(2))
        return layer


@dataclass
class Cache:
    """Keys and values of `capacity` positions, and the rotations of these positions."""

    model: RandomModel
    capacity: int
    kv: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        shape = self.model.shape
        padded = shape.head_dim + -shape.head_dim % 16
        dtype = np.float32 if shape.cache_form == "F32" else np.uint16
        self.kv = np.zeros((shape.layers, 2 * shape.kv_heads, self.capacity, padded), dtype)
        angles = np.arange(self.capacity)[:, None] * 10000.0 ** -np.linspace(0, 1, shape.head_dim // 2)
        self.cosines, self.sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class Rows:
    """A pass over `ids` after `held` positions; row r sees `prefix[r]` positions and those listed in `extra[r]`."""

    def __init__(
        self,
        cache: Cache,
        ids: Sequence[int],
        held: int,
        positions: Sequence[int] | None = None,
        prefix: Sequence[int] | None = None,
        extra: Sequence[Sequence[int]] | None = None,
        last: int | None = None,
        threads: int = 2,
        taps: Sequence[int] = (),
    ) -> None:
        model, count = cache.model, len(ids)
        extra = extra or [()] * count
        starts = np.cumsum([0, *map(len, extra)])
        last = count if last is None else last
        lists = {
            "ids": ids,
            "positions": positions or range(held, held + count),
            "prefix": prefix or range(held + 1, held + count + 1),
            "extra": [slot for slots in extra for slot in slots],
            "starts": starts,
        }
        self.numbers = {name: np.array(values, np.int32) for name, values in lists.items()}
        self.taps = np.array(taps, np.int32)
        self.states = np.zeros((cache.capacity, len(taps), model.shape.width), np.float32)
        self.own_state = np.zeros(model.shape.width, np.float32)
        self.target_states = np.random.default_rng(held).normal(0, 1, (count, model.shape.fused * model.shape.width))
        self.target_states = self.target_states.astype(np.float32)
        self.logits = np.full((last, model.shape.vocab), np.nan, np.float32)
        self._scratch = np.zeros(model.library.scratch_floats(ctypes.byref(model.struct), count), np.float32)
        self.model, self.cache = model, cache
        self.text = TextStruct(
            cache=cache.kv.ctypes.data,
            states=self.states.ctypes.data if len(taps) else None,
            target_states=self.target_states.ctypes.data if model.shape.fused else None,
            own_state=self.own_state.ctypes.data,
            capacity=cache.capacity,
            rows=count,
            held=held,
            last=last,
        )
        self.struct = PassStruct(
            ctypes.addressof(model.struct),
            ctypes.addressof(self.text),
            cache.cosines.ctypes.data,
            cache.sines.ctypes.data,
            *(numbers.ctypes.data for numbers in self.numbers.values()),
            self.taps.ctypes.data,
            self.logits.ctypes.data,
            self._scratch.ctypes.data,
            None,
            None,
            1,
            count,
            cache.capacity,
            len(taps),
            threads,
        )

    def run(self) -> int:
        """Return the result code."""
        return self.model.library.run_pass(ctypes.byref(self.struct))

    def fault(self) -> str | None:
        """Return the reason why the pass is invalid."""
        fault = self.model.library.check_pass(ctypes.byref(self.struct))
        return fault and fault.decode()


class Chain:
    """A chain of `count` tokens of the first `vocab` ids, drafted after `first`, a pass with a single result."""

    def __init__(self, first: Rows, count: int, vocab: int, **sampling: float) -> None:
        self.first = first
        self.arrays = {
            "uniforms": np.full(count, 0.5),
            "tokens": np.full(count, -1, np.int32),
            **{name: np.zeros(count, np.float32) for name in ("max_logits", "token_probs", "min_path_prob")},
            "probs": np.zeros((count, vocab), np.float32),
            "scratch": np.zeros(vocab, np.float32),
        }
        addresses = {name: values.ctypes.data for name, values in self.arrays.items()}
        self.struct = ChainStruct(SamplingStruct(**sampling), vocab=vocab, count=count, **addresses)

    def draft(self) -> int:
        """Return the result code."""
        return self.first.model.library.draft_chain(ctypes.byref(self.first.struct), ctypes.byref(self.struct))


def random_shape(rng: random.Random, form: str) -> Shape:
    """Return a small valid shape, with sizes that are not multiples of blocks."""
    group = FORMATS[form].group or 1
    kv_heads = rng.randrange(1, 4)
    heads = kv_heads * rng.choice((1, 2, 3, 7))
    head_dim = rng.randrange(1, 40)
    if group > 1:
        head_dim = group // rng.choice((1, 2, 4))
        heads *= group // head_dim
    gated = rng.random() < 0.7
    fused = rng.choice((0, 0, 1, 3))
    return Shape(
        width=group * rng.randrange(1, 3) if group > 1 else rng.randrange(1, 150),
        inner=group * rng.randrange(1, 4) if group > 1 else rng.randrange(1, 200),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotated=rng.randrange(0, head_dim + 1) // 2 * 2,
        layers=rng.randrange(1, 3),
        vocab=rng.randrange(1, 300),
        positions=0 if fused else rng.choice((0, 64)),
        form=form,
        value_form="Q6_K" if form == "Q4_K" and rng.random() < 0.5 else "",
        narrow=form in QUANTISED_GGUF and rng.random() < 0.5,
        activation=rng.randrange(3),
        window=rng.choice((0, 0, 1, 5)),
        gated=gated,
        centred=rng.random() < 0.3,
        parallel=rng.random() < 0.2,
        tied=not fused and rng.random() < 0.5,
        bias=rng.random() < 0.4,
        head_norms=rng.random() < 0.3,
        after_norms=rng.random() < 0.3,
        cache_form=rng.choice(("F32", "BF16", "F16")),
        attention_cap=rng.choice((0.0, 5.0)),
        logit_cap=rng.choice((0.0, 8.0)),
        fused=fused,
        norm_before_residual=rng.random() < 0.3,
    )
