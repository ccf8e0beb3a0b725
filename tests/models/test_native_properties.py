"""Properties of the native engine for random shapes: bits depend neither on other rows, nor on passes and threads."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from fakes.native_fuzz import CAPACITY, tree
from fakes.native_structures import Cache, RandomModel, Rows, random_shape
from fakes.properties import holds_for
from hypothesis import strategies as st

from specdemo.native.build import required_library
from specdemo.native.formats import FORMATS
from specdemo.native.interface import Result

pytestmark = pytest.mark.slow


def logits(rows: Rows) -> np.ndarray:
    assert rows.run() == Result.DONE, rows.fault()
    return rows.logits


@holds_for(40, rng=st.randoms(use_true_random=False), form=st.sampled_from([*FORMATS]), threads=st.integers(1, 4))
def test_rows_of_prompts_and_forests_have_the_bits_of_single_rows(rng: random.Random, form: str, threads: int) -> None:
    shape = replace(random_shape(rng, form), fused=0)
    model = RandomModel(required_library(), shape, rng.randrange(1 << 30))
    count = rng.randrange(1, 18)
    prompt = [rng.randrange(shape.vocab) for _ in range(count)]
    cache, single = Cache(model, CAPACITY), Cache(model, CAPACITY)
    together = logits(Rows(cache, prompt, 0, threads=threads))
    alone = [logits(Rows(single, [token], i, threads=1))[0] for i, token in enumerate(prompt)]
    np.testing.assert_array_equal(together, alone)
    forest = tree(rng, cache, count)
    of_nodes, ids = logits(forest), forest.numbers["ids"]
    starts, extra = forest.numbers["starts"], forest.numbers["extra"]
    first = logits(Rows(single, ids[:1], count, threads=1))[0]
    np.testing.assert_array_equal(of_nodes[0], first)
    for row in range(1, len(ids)):
        path = [slot - count for slot in extra[starts[row] : starts[row + 1]]]
        for depth, node in enumerate(path):
            last = logits(Rows(single, ids[node : node + 1], count + 1 + depth, threads=1))[0]
        np.testing.assert_array_equal(of_nodes[row], last)


@holds_for(40, rng=st.randoms(use_true_random=False), form=st.sampled_from([*FORMATS]), kept=st.integers(1, 8))
def test_a_text_that_replaces_another_has_the_bits_of_a_new_text(rng: random.Random, form: str, kept: int) -> None:
    shape = replace(random_shape(rng, form), fused=0)
    model = RandomModel(required_library(), shape, rng.randrange(1 << 30))
    old, new = ([rng.randrange(shape.vocab) for _ in range(8)] for _ in range(2))
    used, fresh = Cache(model, CAPACITY), Cache(model, CAPACITY)
    logits(Rows(used, old, 0))
    again = logits(Rows(used, new, kept))
    logits(Rows(fresh, old[:kept], 0))
    np.testing.assert_array_equal(again, logits(Rows(fresh, new, kept)))
