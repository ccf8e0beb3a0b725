"""Dense, sparse and one-hot distributions against sums over the vocabulary, with the compiled engine and without it."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specdemo.core.distributions import (
    DenseProbs,
    PointMass,
    PointMasses,
    SparseProbs,
    SparseRow,
    draft_prob,
    excess,
    node_probs,
    residual,
    without,
)

VOCAB = 8
SHAPES = {"chain": (-1, 0, 1), "tree": (-1, -1, 1), "forest in another order": (-1, 0, -1)}


@pytest.fixture(params=["compiled", "torch"])
def _engine(request: pytest.FixtureRequest) -> None:
    if request.param == "torch":
        request.getfixturevalue("torch_engine")


def random_probs(rng: random.Random, count: int, sparse: bool = False) -> list[float]:
    weights = [rng.random() * (not sparse or rng.random() < 0.5) for _ in range(count)]
    weights[rng.randrange(count)] += 0.1
    return [weight / sum(weights) for weight in weights]


def rows_of(probs: list[list[float]]) -> Tensor:
    return torch.tensor(probs, dtype=torch.float32)


def draft_rows(kind: str, rng: random.Random, tokens: tuple[int, ...]) -> tuple[Any, list[list[float]]]:
    """Return draft distributions of a kind, and the same as lists over the vocabulary."""
    if kind == "point":
        return PointMasses(tokens), [[float(v == token) for v in range(VOCAB)] for token in tokens]
    if kind == "dense":
        rows = [random_probs(rng, VOCAB, sparse=True) for _ in tokens]
        return DenseProbs(rows_of(rows)), rows
    ids = rng.sample(range(VOCAB), 3)
    values = [random_probs(rng, 3) for _ in tokens]
    lists = [[dict(zip(ids, probs, strict=True)).get(v, 0.0) for v in range(VOCAB)] for probs in values]
    return SparseProbs(torch.tensor(ids), rows_of(values), VOCAB), lists


@pytest.mark.parametrize("kind", ["dense", "sparse", "point"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("_engine")
def test_comparisons_are_sums_over_the_vocabulary(kind: str, shape: str) -> None:
    rng, parents = random.Random(f"{kind}/{shape}"), SHAPES[shape]
    for _ in range(20):
        tokens = tuple(rng.randrange(VOCAB) for _ in parents)
        drafted, q = draft_rows(kind, rng, tokens)
        p = [random_probs(rng, VOCAB, sparse=True) for _ in range(4)]
        tops = [rng.randrange(VOCAB) for _ in range(4)]
        for target, lists in (
            (rows_of(p), p),
            ([PointMass(top) for top in tops], [[float(v == top) for v in range(VOCAB)] for top in tops]),
        ):
            probs, overlaps = drafted.compare(target, tokens, parents)
            expected = [lists[parent + 1][token] for parent, token in zip(parents, tokens, strict=True)]
            assert probs == pytest.approx(expected, abs=1e-6)
            assert probs == pytest.approx(node_probs(target, tokens, parents), abs=1e-6)
            sums = [sum(map(min, lists[parent + 1], row)) for parent, row in zip(parents, q, strict=True)]
            assert overlaps == pytest.approx(sums, abs=1e-6)


def strided(rows: Tensor) -> Tensor:
    """Return equal values, with a stride of 2 between them."""
    return rows.repeat_interleave(2, -1)[..., ::2]


LAYOUTS = {
    "strided p": lambda p, ids, values: (strided(p), ids, values),
    "double p": lambda p, ids, values: (p.double(), ids, values),
    "strided ids": lambda p, ids, values: (p, strided(ids), values),
    "strided values": lambda p, ids, values: (p, ids, strided(values)),
    "double values": lambda p, ids, values: (p, ids, values.double()),
    "a part of the rows": lambda p, ids, values: (p.repeat(1, 2)[:, :VOCAB], ids.repeat(2)[:3], values),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_any_layout_give_the_same_figures(layout: str) -> None:
    """The compiled engine reads contiguous rows of float32 and int64; other rows are computed by torch."""
    rng, parents, tokens = random.Random(6), (-1, 0, 1), (3, 1, 4)
    drafted, q = draft_rows("sparse", rng, tokens)
    lists = [random_probs(rng, VOCAB) for _ in range(4)]
    p, ids, values = LAYOUTS[layout](rows_of(lists), drafted.ids, drafted.values)
    for probs in (
        SparseProbs(ids, values, VOCAB),
        DenseProbs(strided(rows_of(q)) if "strided" in layout else rows_of(q)),
    ):
        given, overlaps = probs.compare(p, tokens, parents)
        assert given == pytest.approx([lists[i][token] for i, token in enumerate(tokens)], abs=1e-6)
        assert overlaps == pytest.approx([sum(map(min, a, b)) for a, b in zip(lists, q, strict=False)], abs=1e-6)
    for node in range(3):
        parts = [max(0.0, a - b) for a, b in zip(lists[node], q[node], strict=True)]
        dense = strided(rows_of(q)).to(p.dtype)[node]
        for row in (SparseRow(ids, values[node], VOCAB), dense, dense.clone()):
            assert excess(p[node], row, 1.0) == pytest.approx(sum(parts), abs=1e-5)
            if isinstance(row, Tensor) or p.dtype == values.dtype:
                expected = [part / sum(parts) for part in parts]
                assert residual(p[node], row).tolist() == pytest.approx(expected, abs=1e-5)


def test_rows_of_other_sizes_are_not_passed_to_the_compiled_engine() -> None:
    """It would read beyond their ends."""
    p = torch.ones(4, VOCAB) / VOCAB
    ids = torch.zeros(1, dtype=torch.int64)
    for probs in (
        DenseProbs(torch.ones(2, VOCAB)),
        DenseProbs(torch.ones(3, VOCAB - 1)),
        SparseProbs(ids, torch.ones(2, 1), VOCAB),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            probs.compare(p, (1, 2, 3), (-1, 0, 1))
    short = torch.ones(VOCAB - 1) / (VOCAB - 1)
    for call in (excess, residual):
        with pytest.raises(RuntimeError):
            call(p[0], short, 1.0)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_token_is_excluded_unless_it_is_certain(kind: str) -> None:
    rng = random.Random(4)
    for _ in range(20):
        drafted, (probs,) = draft_rows(kind, rng, (rng.randrange(VOCAB),))
        row = drafted.row(0)
        token = max(range(VOCAB), key=probs.__getitem__)
        rest = without(row, token)
        expected = [0.0 if v == token else probs[v] / (1 - probs[token]) for v in range(VOCAB)]
        assert [draft_prob(rest, v) for v in range(VOCAB)] == pytest.approx(expected, abs=1e-5)
        assert draft_prob(row, token) == pytest.approx(probs[token])  # unchanged
    certain = torch.tensor([0.0, 1.0, 0.0])
    assert without(certain, 1) is certain
    sparse = SparseRow(torch.tensor([4, 2]), torch.tensor([1.0, 0.0]), VOCAB)
    assert without(sparse, 4) is sparse
    half = without(SparseRow(torch.tensor([4, 2]), torch.tensor([0.5, 0.5]), VOCAB), 4)
    assert half.dense().tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
