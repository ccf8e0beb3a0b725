"""Attention of the native engine: bits of rows alone and in groups, forms of the cache, invisible positions."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from fakes.native_structures import Cache, RandomModel, Rows, Shape

from specdemo.native.build import required_library
from specdemo.native.interface import Result

PLAIN = Shape(heads=6, kv_heads=2, head_dim=64, rotated=64)
SHAPES = {
    "plain": PLAIN,
    "one head per key head": Shape(heads=3, kv_heads=3, head_dim=32, rotated=32),
    "more query heads than a group": Shape(heads=50, kv_heads=1, head_dim=4, rotated=4),
    "odd heads": Shape(heads=10, kv_heads=2, head_dim=19, rotated=6),
    "heads of five vectors": Shape(heads=4, kv_heads=2, head_dim=80, rotated=80),
    "window": replace(PLAIN, window=70),
    "window of a position": replace(PLAIN, window=1),
    "limited scores": replace(PLAIN, attention_cap=2.0),
}
FORMS = ("F32", "BF16", "F16")
LENGTH = 212


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return required_library()


def run(cache: Cache, ids: list[int], held: int, threads: int = 1) -> np.ndarray:
    rows = Rows(cache, ids, held, threads=threads)
    assert rows.run() == Result.DONE, rows.fault()
    return rows.logits


def tokens(shape: Shape, count: int) -> list[int]:
    return np.random.default_rng(1).integers(shape.vocab, size=count).tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SHAPES)
def test_rows_have_the_same_bits_alone_and_in_groups(name: str, form: str, library: ctypes.CDLL) -> None:
    """Rows alone are divided into sections of positions with several threads."""
    shape = replace(SHAPES[name], cache_form=form)
    model, ids = RandomModel(library, shape), tokens(shape, LENGTH)
    single, divided, mixed = Cache(model, 224), Cache(model, 224), Cache(model, 224)
    expected = np.concatenate([run(single, ids[i : i + 1], i) for i in range(LENGTH)])
    assert np.array_equal(run(Cache(model, 224), ids, 0, threads=2), expected)
    assert np.array_equal(run(divided, ids[:190], 0), expected[:190])
    for i in range(190, LENGTH):
        assert np.array_equal(run(divided, ids[i : i + 1], i, threads=3), expected[i : i + 1])
    for start, end in ((0, 37), (37, 38), (38, 130), (130, 135), (135, LENGTH)):
        assert np.array_equal(run(mixed, ids[start:end], start, threads=2), expected[start:end])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", [60, 64, 120])
def test_branches_have_the_bits_of_chains(text: int, form: str, library: ctypes.CDLL) -> None:
    """The visible positions of a branch are not adjacent, and cross a block of positions."""
    shape = replace(PLAIN, cache_form=form, window=100)
    model, ids = RandomModel(library, shape), tokens(shape, text + 20)
    cache = Cache(model, 160)
    run(cache, ids[:text], 0)
    branches = (tuple(range(0, 20, 2)), tuple(range(1, 20, 2)))  # two chains whose nodes alternate
    extra = [[text + node for node in branches[i % 2] if node <= i] for i in range(20)]
    depths = [text + len(slots) - 1 for slots in extra]
    rows = Rows(cache, ids[text:], text, depths, [text] * 20, extra)
    assert rows.run() == Result.DONE, rows.fault()
    for branch in branches:
        alone = Cache(model, 160)
        run(alone, ids[:text], 0)
        for depth, node in enumerate(branch):
            assert np.array_equal(run(alone, [ids[text + node]], text + depth)[0], rows.logits[node])


@pytest.mark.parametrize("form", FORMS)
def test_invisible_positions_are_not_used(form: str, library: ctypes.CDLL) -> None:
    """NaN in positions that are not yet written does not spread."""
    shape = replace(PLAIN, cache_form=form)
    model, ids = RandomModel(library, shape), tokens(shape, 100)
    clean, spoiled = Cache(model, 128), Cache(model, 128)
    spoiled.kv.fill(np.nan if form == "F32" else 0x7FFF)
    for start, end in ((0, 30), (30, 31), (31, 75), (75, 100)):
        expected = run(clean, ids[start:end], start, threads=2)
        assert np.array_equal(run(spoiled, ids[start:end], start, threads=2), expected) and np.isfinite(expected).all()


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 1.0, 3e4])
def test_keys_and_values_are_rounded_to_the_nearest_number(scale: float, library: ctypes.CDLL) -> None:
    """Numbers beyond the range of half precision become the largest."""
    exact, ids = {}, tokens(PLAIN, 40)
    for form in FORMS:
        model = RandomModel(library, replace(PLAIN, layers=1, cache_form=form))
        gains = (ctypes.c_float * PLAIN.width).from_address(model.layers[0].enter)
        gains[:] = [scale * gain for gain in gains]
        cache = Cache(model, 48)
        run(cache, ids, 0)
        exact[form] = cache.kv
    halves = np.clip(exact["F32"], -65504, 65504).astype(np.float16)
    assert np.array_equal(exact["F16"], halves.view(np.uint16))
    error = np.abs((exact["BF16"].astype(np.uint32) << 16).view(np.float32) - exact["F32"])
    assert (error <= np.abs(exact["F32"]) * 2.0**-8).all() and exact["F32"].any()


def test_half_precision_is_closer_to_floats_than_bfloat16(library: ctypes.CDLL) -> None:
    ids = tokens(PLAIN, 100)
    logits = {form: run(Cache(RandomModel(library, replace(PLAIN, cache_form=form)), 112), ids, 0) for form in FORMS}
    error = {form: np.abs(logits[form] - logits["F32"]).mean() for form in FORMS}
    assert 0 < error["F16"] < error["BF16"] / 4
