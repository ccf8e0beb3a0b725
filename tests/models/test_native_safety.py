"""The native engine refuses hostile passes, runs large heads and can be stopped."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.native_structures import Cache, RandomModel, Rows, Shape

from specdemo.models.engines.native_matrix import WritableMatrix
from specdemo.models.memory import LargePageBuffer
from specdemo.models.model_sizes import MAX_HEAD_DIM, MAX_HEADS, MAX_HEADS_WIDTH
from specdemo.native.build import required_library
from specdemo.native.formats import FORMATS, Format
from specdemo.native.interface import ChainStruct, PassStopped, Result, StopFlag, check_model, check_result

SHAPE = Shape(positions=12, bias=True)
CAPACITY = 32


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return required_library()


def a_pass(library: ctypes.CDLL, shape: Shape = SHAPE) -> Rows:
    """Return a valid pass: two rows after three positions, and a sibling of the second."""
    cache = Cache(RandomModel(library, shape), CAPACITY)
    return Rows(cache, [1, 2, 3], 3, [3, 4, 4], [4, 4, 4], [(), (4,), (5,)], taps=[0, 2])


def matrix(name: str, field: str, value: int | None) -> Callable[[Rows], None]:
    return lambda rows: setattr(getattr(rows.model.layers[1], name), field, value)


def model(field: str, value: int) -> Callable[[Rows], None]:
    return lambda rows: setattr(rows.model.struct, field, value)


def number(name: str, index: int, value: int) -> Callable[[Rows], None]:
    return lambda rows: rows.numbers[name].__setitem__(index, value)


def field(name: str, value: int | None) -> Callable[[Rows], None]:
    return lambda rows: setattr(rows.struct, name, value)


def text(name: str, value: int | None) -> Callable[[Rows], None]:
    return lambda rows: setattr(rows.text, name, value)


HOSTILE = {
    "more rotated values than the head has": (model("rotated", 10), "rotated values"),
    "odd rotated values": (model("rotated", 7), "rotated values"),
    "negative rotated values": (model("rotated", -2), "rotated values"),
    "no head size": (model("head_dim", 0), "heads"),
    "other head size": (model("head_dim", 16), "sizes of a matrix"),
    "no heads": (model("heads", 0), "heads"),
    "heads that are not a multiple": (model("heads", 5), "heads"),
    "no key heads": (model("kv_heads", 0), "heads"),
    "more heads than fit into 32 bits": (model("heads", 2**31 - 2), "heads"),
    "no width": (model("width", 0), "width"),
    "large width": (model("width", 2**31 - 1), "width"),
    "no inner width": (model("inner", -1), "width"),
    "no layers": (model("layer_count", 0), "no layers"),
    "unknown activation": (model("activation", 3), "activation"),
    "unknown cache": (model("cache_form", 3), "cache"),
    "unknown number format": (matrix("down", "form", 10), "number format"),
    "wide matrix": (matrix("out", "inputs", 64), "sizes of a matrix"),
    "long matrix": (matrix("qkv", "outputs", 96), "sizes of a matrix"),
    "groups that do not fit": (matrix("gate_up", "form", 4), "group"),
    "scales are missing": (matrix("gate_up", "form", 6), "scales"),
    "negative window": (lambda rows: setattr(rows.model.layers[0], "window", -1), "window"),
    "token beyond the vocabulary": (number("ids", 1, SHAPE.vocab), "vocabulary"),
    "negative token": (number("ids", 0, -1), "vocabulary"),
    "position beyond the rotations": (number("positions", 0, CAPACITY), "position"),
    "position beyond those of the model": (number("positions", 0, SHAPE.positions), "position"),
    "negative position": (number("positions", 2, -1), "position"),
    "prefix beyond the rows": (number("prefix", 1, 7), "sees"),
    "negative prefix": (number("prefix", 1, -1), "sees"),
    "slot beyond the rows": (number("extra", 0, 6), "sees"),
    "negative slot": (number("extra", 1, -1), "sees"),
    "negative start": (number("starts", 0, -1), "sees"),
    "decreasing starts": (number("starts", 1, 2), "sees"),
    "rows beyond the cache": (text("held", CAPACITY - 2), "rows"),
    "negative length": (text("held", -1), "rows"),
    "no rows": (field("rows", 0), "rows"),
    "fewer rows than the text": (field("rows", 2), "rows"),
    "more rows than the text": (field("rows", 4), "rows"),
    "text without rows": (text("rows", 0), "rows"),
    "no texts": (field("text_count", 0), "rows"),
    "more logits than rows": (text("last", 4), "logits"),
    "negative logits": (text("last", -1), "logits"),
    "no threads": (field("threads", 0), "threads"),
    "no text": (field("texts", None), "buffers"),
    "no cache": (text("cache", None), "buffers"),
    "no logits": (field("logits", None), "buffers"),
    "no list of hidden states": (field("taps", None), "buffers"),
    "cache of a part of a group": (text("capacity", CAPACITY - 8), "capacity"),
    "huge cache": (text("capacity", 2**62), "cache"),
    "hidden state of no layer": (lambda rows: rows.taps.__setitem__(0, 3), "hidden"),
    "negative hidden state": (lambda rows: rows.taps.__setitem__(0, -1), "hidden"),
}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_rows_are_written_in_four_forms_and_within_the_matrix(form: Format) -> None:
    stored, rows = WritableMatrix(64, 256, form, LargePageBuffer(0)), torch.full((2, 256), 0.5)
    if form.name in ("F32", "INT8", "Q8_0", "CODE4"):
        stored.write(rows, 3)
        for first in (-1, 63, 64):
            with pytest.raises(ValueError, match="do not fit into a matrix"):
                stored.write(rows, first)
        torch.testing.assert_close(stored.rows(torch.arange(2, 6))[1:3], rows, rtol=0.01, atol=0)
    else:
        with pytest.raises(ValueError, match=f"do not fit into a matrix .* of {form.name}"):
            stored.write(rows, 3)


@pytest.mark.parametrize(("spoil", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_contradictions_are_refused_before_anything_is_written(
    spoil: Callable[[Rows], None], reason: str, library: ctypes.CDLL
) -> None:
    rows = a_pass(library)
    assert rows.run() == Result.DONE
    rows.logits.fill(np.nan), rows.cache.kv.fill(0), rows.states.fill(0)
    spoil(rows)
    result = rows.run()
    assert result == Result.INVALID
    with pytest.raises(ValueError, match=f"^invalid pass: .*{reason}"):
        check_result(library, result, rows.struct)
    assert np.isnan(rows.logits).all() and not rows.cache.kv.any() and not rows.states.any()


def test_models_are_refused_when_they_are_registered(library: ctypes.CDLL) -> None:
    invalid = RandomModel(library, SHAPE)
    check_model(library, invalid.struct)
    invalid.struct.rotated = 4096
    with pytest.raises(ValueError, match="rotated values"):
        check_model(library, invalid.struct)
    assert library.scratch_floats(ctypes.byref(invalid.struct), 1) == -1


@pytest.mark.parametrize(("heads", "head_dim"), [(MAX_HEADS, 64), (64, MAX_HEAD_DIM)])
def test_large_heads_need_no_stack(heads: int, head_dim: int, library: ctypes.CDLL) -> None:
    """All query heads share a key head: their results take 1 MB, twice the stack of the thread."""
    assert heads * head_dim == MAX_HEADS_WIDTH
    shape = Shape(
        *(1, 1, heads, 1, head_dim), rotated=head_dim, layers=1, vocab=3, form="BF16", cache_form="BF16", tied=True
    )
    rows = Rows(Cache(RandomModel(library, shape), 16), [1, 2], 0)
    results: list[int] = []
    before = threading.stack_size(512 << 10)
    running = threading.Thread(target=lambda: results.append(rows.run()))
    running.start()
    threading.stack_size(before)
    running.join()
    assert results == [Result.DONE] and np.isfinite(rows.logits).all()


@pytest.fixture(scope="module")
def slow_model(library: ctypes.CDLL) -> RandomModel:
    """Model whose passes over 512 rows take long enough to be stopped."""
    shape = replace(SHAPE, width=256, inner=512, heads=4, kv_heads=4, head_dim=64, layers=24, positions=0, form="BF16")
    return RandomModel(library, shape)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pass_is_stopped_and_the_next_has_the_same_bits(
    threads: int, slow_model: RandomModel, library: ctypes.CDLL
) -> None:
    """The flag is set as soon as the pass has written the keys of the first layer."""
    cache, flag = Cache(slow_model, 512), StopFlag()
    rows = Rows(cache, [i % SHAPE.vocab for i in range(512)], 0, last=1, threads=threads)
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
        check_result(library, results[0], rows.struct)
    assert rows.run() == Result.STOPPED
    flag.clear()
    assert rows.run() == Result.DONE and rows.logits.tobytes() == expected.tobytes()


def test_listed_positions_are_read_by_the_first_pass_of_a_chain_only(library: ctypes.CDLL) -> None:
    peaks, chosen, tokens = np.zeros((2, 4), np.float32), np.zeros(4, np.float32), np.zeros((2, 4), np.int32)
    for i, seen in enumerate(([[1, 2]], [[0, 1], [(0,), (1,)]])):  # the same positions
        cache = Cache(RandomModel(library, replace(SHAPE, positions=0)), CAPACITY)
        rows = Rows(cache, [1, 2], 0, [0, 1], *seen, last=1)
        pointers = {"peaks": peaks[i].ctypes.data, "chosen": chosen.ctypes.data, "tokens": tokens[i].ctypes.data}
        chain = ChainStruct(top_p=1.0, vocab=SHAPE.vocab, count=4, **pointers)
        assert library.draft_chain(ctypes.byref(rows.struct), ctypes.byref(chain)) == Result.DONE
    np.testing.assert_allclose(peaks[1], peaks[0], rtol=1e-5)
    assert (tokens[1] == tokens[0]).all()


def test_a_drafted_chain_is_stopped_before_its_first_token(library: ctypes.CDLL) -> None:
    cache, flag = Cache(RandomModel(library, replace(SHAPE, positions=0)), CAPACITY), StopFlag()
    rows, vocab, count = Rows(cache, [1, 2], 0, last=1), SHAPE.vocab, 3
    tokens, numbers = np.full(count, -1, np.int32), np.zeros((2, count), np.float32)
    peaks, chosen = numbers[0].ctypes.data, numbers[1].ctypes.data
    chain = ChainStruct(top_p=1.0, peaks=peaks, chosen=chosen, tokens=tokens.ctypes.data, vocab=vocab, count=count)
    arguments = ctypes.byref(rows.struct), ctypes.byref(chain)
    rows.struct.stop = flag.address
    flag.set()
    assert library.draft_chain(*arguments) == Result.STOPPED and (tokens == -1).all()
    flag.clear()
    assert library.draft_chain(*arguments) == Result.DONE and (tokens >= 0).all()
    chain.vocab = vocab + 1
    assert library.draft_chain(*arguments) == Result.INVALID
