"""Program that runs random and hostile passes through a library: `python -m fakes.native_fuzz LIBRARY SEED ROUNDS`.

It ends after `ROUNDS`, with `FUZZ_SECONDS` after that time.
Arrays have exactly the size that the C sources require, so that sanitizers report every access outside of them.
"""

import ctypes
import itertools
import os
import random
import sys
import time
from collections import Counter

import numpy as np

from fakes.native_structures import Cache, Chain, RandomModel, Rows, Shape, random_shape
from specdemo.native.interface import FORMATS, Result, SamplingStruct, declare

CAPACITY = 48
SECONDS = "FUZZ_SECONDS"  # environment variable
HOSTILE = (-(1 << 31), -1, 0, 1, 3, 15, 17, 1 << 15, 1 << 30, (1 << 31) - 1)
# Sizes that contradict others if they change; the sizes of arrays themselves are not in the structures.
MODEL_FIELDS = ("width", "inner", "heads", "kv_heads", "head_dim", "rotated", "activation", "gated", "cache_form")
FORMATS_BY_NUMBER = [*FORMATS]
TEXT_FIELDS = ("held", "last", "rows")
MATRIX_FIELDS = ("form", "outputs", "inputs", "byte_inputs", "weights", "scales", "codes")


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
