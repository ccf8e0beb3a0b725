"""Passes of the native engine over random models: bits depend neither on other rows, nor on passes and threads; invalid
passes write nothing.
"""

import ctypes
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.native_fuzz import Cache, Chain, RandomModel, Rows, Shape, hostile_pass, random_shape, tree
from fakes.properties import holds_for
from hypothesis import strategies as st

from specdemo.models.engines.native import NativePass
from specdemo.models.untrusted import MAX_HEAD_DIM, MAX_HEADS, MAX_HEADS_WIDTH
from specdemo.native.build import required_library
from specdemo.native.interface import FORMATS, Result, StopFlag

pytestmark = pytest.mark.slow

PLAIN = Shape(heads=6, kv_heads=2, head_dim=64, rotated=64)
SHAPES = {  # of attention, with the number format of the cache
    "plain": (PLAIN, "F32"),
    "one head per key head": (Shape(heads=3, kv_heads=3, head_dim=32, rotated=32), "BF16"),
    "more query heads than a group": (Shape(heads=50, kv_heads=1, head_dim=4, rotated=4), "F16"),
    "odd heads": (Shape(heads=10, kv_heads=2, head_dim=19, rotated=6), "F32"),
    "heads of five vectors": (Shape(heads=4, kv_heads=2, head_dim=80, rotated=80), "BF16"),
    "window": (replace(PLAIN, window=70), "F16"),
    "window of a position": (replace(PLAIN, window=1), "F32"),
    "limited scores": (replace(PLAIN, attention_cap=2.0), "BF16"),
}
CACHES = ("F32", "BF16", "F16")
LENGTH = 212


def logits(rows: Rows) -> np.ndarray:
    assert rows.run() == Result.DONE, rows.fault()
    return rows.logits


def run(cache: Cache, ids: list[int], held: int, threads: int = 1) -> np.ndarray:
    return logits(Rows(cache, ids, held, threads=threads))


def model_of(shape: Shape, seed: int = 0) -> RandomModel:
    return RandomModel(required_library(), shape, seed)


def tokens(shape: Shape, count: int) -> list[int]:
    return np.random.default_rng(1).integers(shape.vocab, size=count).tolist()


PROPERTY = {"rng": st.randoms(use_true_random=False), "form": st.sampled_from([*FORMATS])}


@holds_for(40, **PROPERTY, length=st.integers(1, 18) | st.integers(60, 66), threads=st.integers(1, 4))
def test_rows_of_prompts_and_forests_have_the_bits_of_single_rows(
    rng: random.Random, form: str, length: int, threads: int
) -> None:
    """The single rows replace another text. Long prompts end at a block of 64 positions."""
    shape = replace(random_shape(rng, form), fused=0, positions=0, window=rng.choice((0, 1, 5, 50)))
    model = model_of(shape, rng.randrange(1 << 30))
    old, prompt = ([rng.randrange(shape.vocab) for _ in range(length)] for _ in range(2))
    cache, single = Cache(model, 96), Cache(model, 96)
    run(single, old, 0, threads=2)
    together = run(cache, prompt, 0, threads)
    alone = [run(single, [token], i)[0] for i, token in enumerate(prompt)]
    np.testing.assert_array_equal(together, alone)
    forest = tree(rng, cache, length)
    of_nodes, ids = logits(forest), forest.numbers["ids"]
    starts, extra = forest.numbers["starts"], forest.numbers["extra"]
    np.testing.assert_array_equal(of_nodes[0], run(single, ids[:1], length)[0])
    for row in range(1, len(ids)):
        path = [slot - length for slot in extra[starts[row] : starts[row + 1]]]
        for depth, node in enumerate(path):
            last = run(single, ids[node : node + 1], length + 1 + depth)[0]
        np.testing.assert_array_equal(of_nodes[row], last)


@holds_for(80, **PROPERTY)
def test_invalid_numbers_are_refused_before_anything_is_written(rng: random.Random, form: str) -> None:
    rows = hostile_pass(required_library(), rng, form)
    result = rows.run()
    assert (rows.fault() is None) == (result == Result.DONE)
    if result != Result.DONE:
        assert result == Result.INVALID
        assert np.isnan(rows.logits).all() and not rows.cache.kv.any()


@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_long_texts_have_the_same_bits_alone_and_in_groups(name: str) -> None:
    """Rows alone are divided into sections of positions with several threads.

    NaN in positions that are not yet written does not spread.
    """
    shape, form = SHAPES[name]
    model, ids = model_of(replace(shape, cache_form=form)), tokens(shape, LENGTH)
    single, divided, mixed = Cache(model, 224), Cache(model, 224), Cache(model, 224)
    mixed.kv.fill(np.nan if form == "F32" else 0x7FFF)
    expected = np.concatenate([run(single, ids[i : i + 1], i) for i in range(LENGTH)])
    assert np.isfinite(expected).all()
    assert np.array_equal(run(Cache(model, 224), ids, 0, threads=2), expected)
    assert np.array_equal(run(divided, ids[:190], 0), expected[:190])
    for i in range(190, LENGTH):
        assert np.array_equal(run(divided, ids[i : i + 1], i, threads=3), expected[i : i + 1])
    for start, end in ((0, 37), (37, 38), (38, 130), (130, 135), (135, LENGTH)):
        assert np.array_equal(run(mixed, ids[start:end], start, threads=2), expected[start:end])


@pytest.mark.parametrize("scale", [1e-7, 1.0, 3e4])
def test_keys_and_values_are_rounded_to_the_nearest_number(scale: float) -> None:
    """Numbers beyond the range of half precision become the largest."""
    exact, ids = {}, tokens(PLAIN, 40)
    for form in CACHES:
        model = model_of(replace(PLAIN, layers=1, cache_form=form))
        gains = (ctypes.c_float * PLAIN.width).from_address(model.layers[0].input_norm)
        gains[:] = [scale * gain for gain in gains]
        cache = Cache(model, 48)
        run(cache, ids, 0)
        exact[form] = cache.kv
    halves = np.clip(exact["F32"], -65504, 65504).astype(np.float16)
    assert np.array_equal(exact["F16"], halves.view(np.uint16))
    error = np.abs((exact["BF16"].astype(np.uint32) << 16).view(np.float32) - exact["F32"])
    assert (error <= np.abs(exact["F32"]) * 2.0**-8).all() and exact["F32"].any()


# --- named contradictions, large heads, Stop ---

SHAPE = Shape(positions=12, bias=True)
LIMIT = 32
CONTRADICTIONS: dict[str, tuple[Callable[[Rows], object], str]] = {  # the property above changes all numbers
    "more rotated values than the head has": (lambda rows: setattr(rows.model.struct, "rotated", 10), "rotated values"),
    "more heads than fit into 32 bits": (lambda rows: setattr(rows.model.struct, "heads", 2**31 - 2), "heads"),
    "token beyond the vocabulary": (lambda rows: rows.numbers["ids"].put(1, SHAPE.vocab), "vocabulary"),
    "position beyond those of the model": (lambda rows: rows.numbers["positions"].put(0, 12), "position"),
    "slot beyond the rows": (lambda rows: rows.numbers["extra"].put(0, 6), "sees"),
    "rows beyond the cache": (lambda rows: setattr(rows.text, "held", LIMIT - 2), "rows"),
    "more rows than the text": (lambda rows: setattr(rows.struct, "rows", 4), "rows"),
    "hidden state of no layer": (lambda rows: rows.taps.put(0, 3), "hidden"),
    "no cache": (lambda rows: setattr(rows.text, "cache", None), "buffers"),
    "huge cache": (lambda rows: setattr(rows.text, "capacity", 2**62), "cache"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_named(name: str) -> None:
    """Two rows after three positions, and a sibling of the second."""
    spoil, reason = CONTRADICTIONS[name]
    cache = Cache(model_of(SHAPE), LIMIT)
    rows = Rows(cache, [1, 2, 3], 3, [3, 4, 4], [4, 4, 4], [(), (4,), (5,)], taps=[0, 2])
    assert rows.run() == Result.DONE
    rows.logits.fill(np.nan), cache.kv.fill(0), rows.states.fill(0)
    spoil(rows)
    described: Any = SimpleNamespace(struct=rows.struct, _library=required_library())
    with pytest.raises(ValueError, match=f"^invalid pass: .*{reason}"):
        NativePass.check(described, rows.run())
    assert np.isnan(rows.logits).all() and not cache.kv.any() and not rows.states.any()


@pytest.mark.parametrize(("heads", "head_dim"), [(MAX_HEADS, 64), (64, MAX_HEAD_DIM)])
def test_large_heads_need_no_stack(heads: int, head_dim: int) -> None:
    """All query heads share a key head: their results take 1 MB, twice the stack of the thread."""
    assert heads * head_dim == MAX_HEADS_WIDTH
    shape = Shape(
        *(1, 1, heads, 1, head_dim), rotated=head_dim, layers=1, vocab=3, form="BF16", cache_form="BF16", tied=True
    )
    rows = Rows(Cache(model_of(shape), 16), [1, 2], 0)
    results: list[int] = []
    before = threading.stack_size(512 << 10)
    running = threading.Thread(target=lambda: results.append(rows.run()))
    running.start()
    threading.stack_size(before)
    running.join()
    assert results == [Result.DONE] and np.isfinite(rows.logits).all()


def test_a_pass_is_stopped_and_the_next_has_the_same_bits() -> None:
    """The flag is set as soon as the pass has written the keys of the first layer: it is the first of these keys."""
    cache = Cache(model_of(replace(SHAPE, layers=3, positions=0)), LIMIT)
    rows = Rows(cache, [*range(20)], 0, last=1)
    expected = logits(rows).copy()
    rows.logits.fill(np.nan), cache.kv.fill(0)
    rows.struct.stop = cache.kv.ctypes.data
    assert rows.run() == Result.STOPPED
    assert cache.kv[0].any() and not cache.kv[1:].any() and np.isnan(rows.logits).all()
    rows.struct.stop = None
    assert logits(rows).tobytes() == expected.tobytes()


def a_chain(length: int, visible: Any = ([1, 2],)) -> Chain:
    rows = Rows(Cache(model_of(replace(SHAPE, positions=0)), LIMIT), [1, 2], 0, [0, 1], *visible, last=1)
    return Chain(rows, length, SHAPE.vocab)


def test_a_chain_sees_all_positions_before_it_whatever_its_pass_lists() -> None:
    listed, other = a_chain(4), a_chain(4, ([1, 1], [(), (0,)]))
    assert listed.draft() == other.draft() == Result.DONE
    np.testing.assert_allclose(other.arrays["max_logits"], listed.arrays["max_logits"], rtol=1e-5)
    assert (other.arrays["tokens"] == listed.arrays["tokens"]).all()


def test_a_drafted_chain_is_stopped_before_its_first_token() -> None:
    chain, flag = a_chain(3), StopFlag()
    chain.first.struct.stop = flag.address
    flag.set()
    assert chain.draft() == Result.STOPPED and (chain.arrays["tokens"] == -1).all()
    chain.first.struct.stop = None
    assert chain.draft() == Result.DONE and (chain.arrays["tokens"] >= 0).all()
    chain.struct.vocab = SHAPE.vocab + 1
    assert chain.draft() == Result.INVALID
