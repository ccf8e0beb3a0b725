"""Random and hostile passes of the native engine, built from numpy arrays without torch.

`python -m fakes.native_fuzz LIBRARY SEED ROUNDS` runs them through a library. It ends after `ROUNDS`, with
`FUZZ_SECONDS` after that time. Arrays have exactly the size that the C sources require, so that sanitizers report every
access outside of them.
"""

import ctypes
import itertools
import os
import random
import sys
import time
from collections import Counter
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
    Result,
    SamplingStruct,
    TextStruct,
    declare,
)

CAPACITY = 48
SECONDS = "FUZZ_SECONDS"  # environment variable
HOSTILE = (-(1 << 31), -1, 0, 1, 3, 15, 17, 1 << 15, 1 << 30, (1 << 31) - 1)
# Sizes that contradict others if they change; the sizes of arrays themselves are not in the structures.
MODEL_FIELDS = ("width", "inner", "heads", "kv_heads", "head_dim", "rotated", "activation", "gated", "cache_form")
FORMATS_BY_NUMBER = [*FORMATS]
TEXT_FIELDS = ("held", "last", "rows")
MATRIX_FIELDS = ("form", "outputs", "inputs", "byte_inputs", "weights", "scales", "codes")
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
        return self.model.library.run_pass(ctypes.byref(self.struct))

    def fault(self) -> str | None:
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


def tree(rng: random.Random, cache: Cache, held: int) -> Rows:
    """Return a pass of a random forest after `held` positions."""
    count = rng.randrange(1, 14)
    parents = [rng.randrange(-1, i) for i in range(count)]
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    ids = [rng.randrange(cache.model.shape.vocab) for _ in range(count + 1)]
    extra = [(), *([held + 1 + node for node in path] for path in paths)]
    depths = [held, *(held + len(path) for path in paths)]
    return Rows(cache, ids, held, depths, [held + 1] * (count + 1), extra, threads=rng.randrange(1, 4))


def run_valid(library: ctypes.CDLL, shape: Shape, seed: int) -> None:
    """Run a prompt, a forest and a sampled chain; store rows of floats."""
    rng = random.Random(seed)
    cache = Cache(RandomModel(library, shape, seed), CAPACITY)
    count = rng.randrange(1, 18)
    ids = [rng.randrange(shape.vocab) for _ in range(count)]
    taps = [0, shape.layers]
    for rows in (Rows(cache, ids, 0, last=rng.randrange(count + 1), taps=taps), tree(rng, cache, count)):
        assert rows.run() == Result.DONE, rows.fault()
        assert not np.isnan(rows.logits).any(), shape
    vocab = rng.randrange(1, shape.vocab + 1)
    listed = np.array(rng.sample(range(shape.vocab), vocab), np.int32) if rng.random() < 0.5 else None
    length, reach = rng.randrange(1, 5), rng.choice((0.0, 0.1))
    chain = Chain(
        Rows(cache, ids[:2], count, last=1),
        length,
        vocab,
        temperature=rng.choice((0.0, 0.7)),
        top_p=rng.choice((0.5, 1.0)),
        min_p=rng.choice((0.0, 0.1)),
        top_k=rng.choice((0, 1, 5)),
    )
    chain.arrays["uniforms"][:] = [rng.random() for _ in range(length)]
    chain.arrays["min_path_prob"][:] = reach
    chain.struct.ids = None if listed is None else listed.ctypes.data
    library.expect_pass(ctypes.byref(cache.model.struct))
    assert chain.draft() == Result.DONE
    drafted = chain.struct.drafted
    assert drafted == length or reach
    assert drafted <= chain.struct.passes <= drafted + 1
    tokens = chain.arrays["tokens"][:drafted]
    assert (tokens >= 0).all() and (tokens < (vocab if listed is None else shape.vocab)).all()
    store_rows(library, rng, cache.model)


def store_rows(library: ctypes.CDLL, rng: random.Random, model: RandomModel) -> None:
    """Overwrite rows of a matrix with floats, some of them infinite or undefined."""
    matrix = rng.choice(model.layers).qkv
    first = rng.randrange(matrix.outputs)
    rows = np.random.default_rng(first).normal(0, 1, (matrix.outputs - first, matrix.inputs)).astype(np.float32)
    rows.flat[rng.randrange(rows.size)] = rng.choice((np.nan, np.inf, -np.inf, 3e38, 1e-40))
    stored = library.write_rows(ctypes.byref(matrix), first, len(rows), rows.ctypes.data)
    assert (stored == Result.DONE) == (FORMATS_BY_NUMBER[matrix.form] in ("F32", "INT8", "Q8_0", "Q4_0"))
    for begin, count in ((first, len(rows) + 1), (-1, 1), (0, -1), (1 << 62, 1 << 62)):
        assert library.write_rows(ctypes.byref(matrix), begin, count, rows.ctypes.data) == Result.INVALID


def hostile_pass(library: ctypes.CDLL, rng: random.Random, form: str) -> Rows:
    """Return a pass that is valid except for one random number."""
    cache = Cache(RandomModel(library, random_shape(rng, form), 1), CAPACITY)
    rows, model, value = tree(rng, cache, rng.randrange(20)), cache.model, rng.choice(HOSTILE)
    kind = rng.randrange(6)
    if kind == 0:
        setattr(model.struct, rng.choice(MODEL_FIELDS), value)
        if model.struct.cache_form in (0, 1, 2):  # valid, but of another array
            model.struct.cache_form = FORMATS[model.shape.cache_form].number
    elif kind == 1:
        setattr(rows.text, rng.choice(TEXT_FIELDS), value)
    elif kind == 2:
        layer = rng.choice(model.layers)
        field = rng.choice(MATRIX_FIELDS)
        matrix = getattr(layer, rng.choice(("qkv", "value", "out", "gate_up", "down")))
        pointer = field in MATRIX_FIELDS[4:]
        if not (field == "form" and 0 <= value < len(FORMATS)):  # valid, but of other arrays
            setattr(matrix, field, None if pointer else value)
    elif kind == 3:
        rng.choice(model.layers).window = value
    elif kind == 4 and model.fuse:
        name = rng.choice(("fuse", "stream_norm", "embedding", "own_state", "target_states"))
        setattr(rows.text if hasattr(rows.text, name) else model.struct, name, None)
    else:
        numbers = rows.numbers[rng.choice(("ids", "positions", "prefix", "extra", "starts"))]
        if len(numbers) and not (numbers is rows.numbers["starts"] and value > 0):
            numbers[rng.randrange(len(numbers))] = value
    return rows


def sample(library: ctypes.CDLL, rng: random.Random) -> None:
    """Sample from logits with infinite and undefined values, and compare hostile drafts."""
    count, nodes = rng.randrange(1, 80), rng.randrange(1, 5)
    logits = np.random.default_rng(rng.randrange(1 << 30)).normal(0, 4, (nodes + 1, count)).astype(np.float32)
    for _ in range(rng.randrange(4)):
        logits[rng.randrange(nodes + 1), rng.randrange(count)] = rng.choice((np.nan, np.inf, -np.inf, 3e38, -3e38))
    probs, scratch = np.zeros_like(logits), np.zeros(count, np.float32)
    sampling = SamplingStruct(
        temperature=rng.choice((1e-3, 0.7, 5.0)),
        top_k=rng.choice((0, 1, 5, 1 << 40)),
        top_p=rng.choice((0.0, 0.3, 1.0)),
        min_p=rng.choice((0.0, 0.3, 1.0)),
    )
    tokens, values = np.zeros(nodes + 1, np.int32), np.zeros(nodes + 1, np.float32)
    library.largest_logits(logits.ctypes.data, nodes + 1, count, count, tokens.ctypes.data, values.ctypes.data)
    library.distributions(
        *(logits.ctypes.data, nodes + 1, count, count, sampling), probs.ctypes.data, scratch.ctypes.data
    )
    assert 0 <= library.invert(probs.ctypes.data, count, rng.random()) < count
    drafted, parents = (np.array([rng.choice((*HOSTILE, 0, 0)) for _ in range(nodes)], np.int32) for _ in range(2))
    o = np.zeros((2, nodes), np.float32)
    library.compare_drafts(
        *(probs.ctypes.data, probs.ctypes.data, count, nodes, parents.ctypes.data, drafted.ctypes.data),
        *(o[0].ctypes.data, o[1].ctypes.data),
    )
    weight = rng.choice((0.0, 0.3, 1.0))
    library.excess(probs.ctypes.data, probs[1].ctypes.data, weight, count)
    library.residual(probs.ctypes.data, probs[1].ctypes.data, weight, count, scratch.ctypes.data)


def main(path: str, seed: int, rounds: int) -> None:
    library = ctypes.CDLL(path)
    declare(library)
    assert library.self_check() == 0
    rng = random.Random(seed)
    results: Counter[str] = Counter()
    end = time.monotonic() + float(os.environ.get(SECONDS, "inf"))
    for turn in itertools.count() if SECONDS in os.environ else range(rounds):
        for form in FORMATS:
            run_valid(library, random_shape(rng, form), seed + turn)
            for _ in range(4):
                rows = hostile_pass(library, rng, form)
                result = Result(rows.run())
                results[result.name] += 1
                assert (rows.fault() is not None) == (result == Result.INVALID)
        for _ in range(20):
            sample(library, rng)
        if time.monotonic() >= end:
            break
    assert not results.keys() - {"DONE", "INVALID"} and results["INVALID"] > results["DONE"], results
    print(dict(results))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
