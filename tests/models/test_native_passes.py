"""Passes of the native engine over random models: bits depend neither on other rows, nor on passes and threads; invalid
passes write nothing.
"""

import ctypes
import random
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fakes.native_fuzz import CAPACITY, tree
from fakes.native_structures import Cache, RandomModel, Rows, Shape, random_shape
from fakes.properties import holds_for
from hypothesis import strategies as st

from specdemo.models.model_sizes import MAX_HEAD_DIM, MAX_HEADS, MAX_HEADS_WIDTH
from specdemo.native.build import required_library
from specdemo.native.formats import FORMATS
from specdemo.native.interface import ChainStruct, PassStopped, Result, StopFlag, check_result

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


@holds_for(40, rng=st.randoms(use_true_random=False), form=st.sampled_from([*FORMATS]), threads=st.integers(1, 4))
def test_rows_of_prompts_and_forests_have_the_bits_of_single_rows(rng: random.Random, form: str, threads: int) -> None:
    shape = replace(random_shape(rng, form), fused=0)
    model = model_of(shape, rng.randrange(1 << 30))
    count = rng.randrange(1, 18)
    prompt = [rng.randrange(shape.vocab) for _ in range(count)]
    cache, single = Cache(model, CAPACITY), Cache(model, CAPACITY)
    together = run(cache, prompt, 0, threads)
    alone = [run(single, [token], i)[0] for i, token in enumerate(prompt)]
    np.testing.assert_array_equal(together, alone)
    forest = tree(rng, cache, count)
    of_nodes, ids = logits(forest), forest.numbers["ids"]
    starts, extra = forest.numbers["starts"], forest.numbers["extra"]
    np.testing.assert_array_equal(of_nodes[0], run(single, ids[:1], count)[0])
    for row in range(1, len(ids)):
        path = [slot - count for slot in extra[starts[row] : starts[row + 1]]]
        for depth, node in enumerate(path):
            last = run(single, ids[node : node + 1], count + 1 + depth)[0]
        np.testing.assert_array_equal(of_nodes[row], last)


@holds_for(40, rng=st.randoms(use_true_random=False), form=st.sampled_from([*FORMATS]), kept=st.integers(1, 8))
def test_a_text_that_replaces_another_has_the_bits_of_a_new_text(rng: random.Random, form: str, kept: int) -> None:
    shape = replace(random_shape(rng, form), fused=0)
    model = model_of(shape, rng.randrange(1 << 30))
    old, new = ([rng.randrange(shape.vocab) for _ in range(8)] for _ in range(2))
    used, fresh = Cache(model, CAPACITY), Cache(model, CAPACITY)
    run(used, old, 0, threads=2)
    again = run(used, new, kept, threads=2)
    run(fresh, old[:kept], 0, threads=2)
    np.testing.assert_array_equal(again, run(fresh, new, kept, threads=2))


SIZES = ("width", "inner", "heads", "kv_heads", "head_dim", "rotated", "activation", "cache_form")
OUT_OF_RANGE = st.sampled_from((-(1 << 31), 1 << 30, (1 << 31) - 1))


@holds_for(80, rng=st.randoms(use_true_random=False), form=st.sampled_from([*FORMATS]), value=OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused_before_anything_is_written(rng: random.Random, form: str, value: int) -> None:
    model = model_of(replace(random_shape(rng, form), fused=0))
    rows, layer = tree(rng, Cache(model, CAPACITY), 3), rng.choice(model.layers)
    matrix = getattr(layer, rng.choice(("qkv", "out", "gate_up", "down")))
    fields = [
        *((model.struct, name) for name in SIZES),
        *((rows.text, name) for name in ("held", "last", "rows")),
        *((matrix, name) for name in ("form", "outputs", "inputs")),
    ]
    if rng.random() < 0.3:
        numbers = rows.numbers[rng.choice(("ids", "positions", "prefix"))]
        numbers[rng.randrange(len(numbers))] = value
    else:
        setattr(*rng.choice(fields), value)
    assert rows.run() == Result.INVALID and rows.fault()
    assert np.isnan(rows.logits).all() and not rows.cache.kv.any()


@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_long_texts_have_the_same_bits_alone_and_in_groups(name: str) -> None:
    """Rows alone are divided into sections of positions with several threads."""
    shape, form = SHAPES[name]
    model, ids = model_of(replace(shape, cache_form=form)), tokens(shape, LENGTH)
    single, divided, mixed = Cache(model, 224), Cache(model, 224), Cache(model, 224)
    expected = np.concatenate([run(single, ids[i : i + 1], i) for i in range(LENGTH)])
    assert np.array_equal(run(Cache(model, 224), ids, 0, threads=2), expected)
    assert np.array_equal(run(divided, ids[:190], 0), expected[:190])
    for i in range(190, LENGTH):
        assert np.array_equal(run(divided, ids[i : i + 1], i, threads=3), expected[i : i + 1])
    for start, end in ((0, 37), (37, 38), (38, 130), (130, 135), (135, LENGTH)):
        assert np.array_equal(run(mixed, ids[start:end], start, threads=2), expected[start:end])


@pytest.mark.parametrize(("text", "form"), [(60, "F32"), (64, "BF16"), (120, "F16")])
def test_branches_have_the_bits_of_chains(text: int, form: str) -> None:
    """The visible positions of a branch are not adjacent, and cross a block of positions."""
    shape = replace(PLAIN, cache_form=form, window=100)
    model, ids = model_of(shape), tokens(shape, text + 20)
    cache = Cache(model, 160)
    run(cache, ids[:text], 0)
    branches = (tuple(range(0, 20, 2)), tuple(range(1, 20, 2)))  # two chains whose nodes alternate
    extra = [[text + node for node in branches[i % 2] if node <= i] for i in range(20)]
    depths = [text + len(slots) - 1 for slots in extra]
    rows = logits(Rows(cache, ids[text:], text, depths, [text] * 20, extra))
    for branch in branches:
        alone = Cache(model, 160)
        run(alone, ids[:text], 0)
        for depth, node in enumerate(branch):
            assert np.array_equal(run(alone, [ids[text + node]], text + depth)[0], rows[node])


@pytest.mark.parametrize("form", CACHES)
def test_invisible_positions_are_not_used(form: str) -> None:
    """NaN in positions that are not yet written does not spread."""
    model, ids = model_of(replace(PLAIN, cache_form=form)), tokens(PLAIN, 100)
    clean, spoiled = Cache(model, 128), Cache(model, 128)
    spoiled.kv.fill(np.nan if form == "F32" else 0x7FFF)
    for start, end in ((0, 30), (30, 31), (31, 75), (75, 100)):
        expected = run(clean, ids[start:end], start, threads=2)
        assert np.array_equal(run(spoiled, ids[start:end], start, threads=2), expected) and np.isfinite(expected).all()


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


def a_pass() -> Rows:
    """Return a valid pass: two rows after three positions, and a sibling of the second."""
    cache = Cache(model_of(SHAPE), LIMIT)
    return Rows(cache, [1, 2, 3], 3, [3, 4, 4], [4, 4, 4], [(), (4,), (5,)], taps=[0, 2])


def of_model(field: str, value: int) -> Callable[[Rows], None]:
    return lambda rows: setattr(rows.model.struct, field, value)


def number(name: str, index: int, value: int) -> Callable[[Rows], None]:
    return lambda rows: rows.numbers[name].__setitem__(index, value)


def of_text(name: str, value: int | None) -> Callable[[Rows], None]:
    return lambda rows: setattr(rows.text, name, value)


HOSTILE = {  # the property above changes all numbers
    "more rotated values than the head has": (of_model("rotated", 10), "rotated values"),
    "more heads than fit into 32 bits": (of_model("heads", 2**31 - 2), "heads"),
    "token beyond the vocabulary": (number("ids", 1, SHAPE.vocab), "vocabulary"),
    "position beyond those of the model": (number("positions", 0, SHAPE.positions), "position"),
    "slot beyond the rows": (number("extra", 0, 6), "sees"),
    "rows beyond the cache": (of_text("held", LIMIT - 2), "rows"),
    "more rows than the text": (lambda rows: setattr(rows.struct, "rows", 4), "rows"),
    "hidden state of no layer": (lambda rows: rows.taps.__setitem__(0, 3), "hidden"),
    "no cache": (of_text("cache", None), "buffers"),
    "huge cache": (of_text("capacity", 2**62), "cache"),
}


@pytest.mark.parametrize(("spoil", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_contradictions_are_named(spoil: Callable[[Rows], None], reason: str) -> None:
    rows = a_pass()
    assert rows.run() == Result.DONE
    rows.logits.fill(np.nan), rows.cache.kv.fill(0), rows.states.fill(0)
    spoil(rows)
    result = rows.run()
    assert result == Result.INVALID
    with pytest.raises(ValueError, match=f"^invalid pass: .*{reason}"):
        check_result(required_library(), result, rows.struct)
    assert np.isnan(rows.logits).all() and not rows.cache.kv.any() and not rows.states.any()


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
    """The flag is set as soon as the pass has written the keys of the first layer."""
    shape = replace(SHAPE, width=256, inner=512, heads=4, kv_heads=4, head_dim=64, layers=24, positions=0, form="BF16")
    cache, flag = Cache(model_of(shape), 512), StopFlag()
    rows = Rows(cache, [i % SHAPE.vocab for i in range(512)], 0, last=1, threads=2)
    rows.struct.stop = flag.address
    assert rows.run() == Result.DONE
    expected = rows.logits.copy()
    rows.logits.fill(np.nan), cache.kv.fill(0)
    results: list[int] = []
    running = threading.Thread(target=lambda: results.append(rows.run()))
    running.start()
    while not cache.kv[0, 0, 0].any():
        pass
    flag.set()
    running.join()
    assert results == [Result.STOPPED] and not cache.kv[-1].any()  # the last layer was not reached
    with pytest.raises(PassStopped):
        check_result(required_library(), results[0], rows.struct)
    assert rows.run() == Result.STOPPED
    flag.clear()
    assert rows.run() == Result.DONE and rows.logits.tobytes() == expected.tobytes()


def test_a_chain_sees_all_positions_before_it_whatever_its_pass_lists() -> None:
    peaks, chosen, tokens = np.zeros((2, 4), np.float32), np.zeros(4, np.float32), np.zeros((2, 4), np.int32)
    limits = np.zeros(4, np.float32)
    for i, seen in enumerate(([[1, 2]], [[1, 1], [(), (0,)]])):
        cache = Cache(model_of(replace(SHAPE, positions=0)), LIMIT)
        rows = Rows(cache, [1, 2], 0, [0, 1], *seen, last=1)
        pointers = {"peaks": peaks[i].ctypes.data, "chosen": chosen.ctypes.data, "tokens": tokens[i].ctypes.data}
        pointers["least_reach"] = limits.ctypes.data
        chain = ChainStruct(vocab=SHAPE.vocab, count=4, **pointers)
        assert required_library().draft_chain(ctypes.byref(rows.struct), ctypes.byref(chain)) == Result.DONE
    np.testing.assert_allclose(peaks[1], peaks[0], rtol=1e-5)
    assert (tokens[1] == tokens[0]).all()


def test_a_drafted_chain_is_stopped_before_its_first_token() -> None:
    cache, flag = Cache(model_of(replace(SHAPE, positions=0)), LIMIT), StopFlag()
    rows, vocab, count = Rows(cache, [1, 2], 0, last=1), SHAPE.vocab, 3
    tokens, numbers = np.full(count, -1, np.int32), np.zeros((3, count), np.float32)
    pointers = {name: row.ctypes.data for name, row in zip(("peaks", "chosen", "least_reach"), numbers, strict=True)}
    chain = ChainStruct(tokens=tokens.ctypes.data, vocab=vocab, count=count, **pointers)
    arguments = ctypes.byref(rows.struct), ctypes.byref(chain)
    rows.struct.stop = flag.address
    flag.set()
    assert required_library().draft_chain(*arguments) == Result.STOPPED and (tokens == -1).all()
    flag.clear()
    assert required_library().draft_chain(*arguments) == Result.DONE and (tokens >= 0).all()
    chain.vocab = vocab + 1
    assert required_library().draft_chain(*arguments) == Result.INVALID
