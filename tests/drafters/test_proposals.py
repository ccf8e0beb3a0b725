"""Drafts of models and heads with scripted random tokens: distributions, positions, budgets and sparse vocabularies."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes.tiny_models import TableHead, TableModel, up_to
from torch import Tensor

from specdemo.core.distributions import DenseProbs, SparseRow
from specdemo.core.origin import HEAD, MODEL
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft
from specdemo.drafters.chain import ChainDrafter
from specdemo.drafters.model import ModelDrafter, ModelScorer
from specdemo.drafters.tree import TreeDrafter

VOCAB = 6
TEXT = [1, 2]
MODEL_OF_TABLE = TableModel(VOCAB, seed=3)
SAMPLED, GREEDY = SamplingParams(temperature=0.5), SamplingParams(temperature=0)
PENALTY = SamplingParams(temperature=0.5, repetition_penalty=1.5)
IDS = (0, 2, 3, 5)


class Script:
    """Gives the listed tokens and records positions and distributions."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = [*tokens]
        self.asked: list[tuple[int, list[float]]] = []

    def sample(self, probs: Tensor, position: int) -> int:
        self.asked.append((position, probs.tolist()))
        return self.tokens.pop(0)

    def sample_sparse(self, row: SparseRow, position: int) -> int:
        assert row.vocab_size == VOCAB
        return self.sample(row.dense(), position)


def softmax(logits: list[float], temperature: float = 0.5) -> list[float]:
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [weight / sum(weights) for weight in weights]


def table_probs(path: Sequence[int], sampling: SamplingParams, ids: Sequence[int] = range(VOCAB)) -> list[float]:
    """Return the distribution over the vocabulary after a text, restricted to `ids`."""
    logits = MODEL_OF_TABLE.logits(path).tolist()
    for token in set(path):
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    probs = dict(zip(ids, softmax([logits[v] for v in ids], sampling.temperature), strict=True))
    return [probs.get(v, 0.0) for v in range(VOCAB)]


def check_chain(draft: Draft, noise: Script, sampling: SamplingParams, ids: Sequence[int] = range(VOCAB)) -> None:
    """Compare the recorded distributions with those of the table."""
    assert draft.is_chain and draft.probs is not None and draft.token_probs is not None
    for i, token in enumerate(draft.tokens):
        expected = table_probs([*TEXT, *draft.tokens[:i]], sampling, ids)
        position, probs = noise.asked[i]
        assert position == len(TEXT) + i and probs == pytest.approx(expected, abs=1e-5)
        assert draft.token_probs[i] == pytest.approx(expected[token], abs=1e-5)
        dense = draft.probs.dense()
        assert dense is not None and dense[i].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("sampling", [SAMPLED, PENALTY])
def test_a_model_samples_from_its_distribution_after_the_draft(sampling: SamplingParams) -> None:
    noise = Script(5, 0, 3)
    draft = ModelDrafter(MODEL_OF_TABLE.score, sampling, noise, VOCAB).propose(TEXT, up_to(3))
    assert draft.tokens == (5, 0, 3) and draft.origin == (MODEL,) * 3 and isinstance(draft.probs, DenseProbs)
    check_chain(draft, noise, sampling)


def test_models_of_other_sizes() -> None:
    """Ids unknown to the target are masked; texts and drafts of ids unknown to the drafter are impossible."""
    large = TableModel(VOCAB + 3, seed=1)
    noise = Script(5)
    draft = ModelDrafter(large.score, SAMPLED, noise, VOCAB, VOCAB + 3).propose(TEXT, up_to(1))
    expected = softmax(large.logits(TEXT)[:VOCAB].tolist())
    assert noise.asked[0][1] == pytest.approx(expected, abs=1e-5) and draft.tokens == (5,)
    small = TableModel(4, seed=1)
    noise = Script(3)
    draft = ModelDrafter(small.score, SAMPLED, noise, VOCAB, 4).propose(TEXT, up_to(1))
    assert noise.asked[0][1] == pytest.approx([*softmax(small.logits(TEXT).tolist()), 0, 0], abs=1e-5)
    assert ModelDrafter(small.score, SAMPLED, Script(), VOCAB, 4).propose([1, 4], up_to(1)) == Draft()
    tree = TreeDrafter(ModelScorer(small.score, VOCAB, 4), GREEDY, Script(), VOCAB)
    assert len(tree.propose(TEXT, up_to(1))) == 3 and tree.propose([1, 4], up_to(1)) == Draft()


# --- trees ---


@pytest.mark.parametrize("ids", [None, IDS])
def test_siblings_are_sampled_without_replacement(ids: tuple[int, ...] | None) -> None:
    """Two children of the text, then two of each: q of a second child excludes the first, and positions are depths."""
    noise = Script(5, 0, 3, 2, 0, 5)
    scorer = TableHead(MODEL_OF_TABLE, ids)
    tree = TreeDrafter(scorer, SAMPLED, noise, VOCAB, nodes=6, width=2, beam=2)
    draft = tree.propose(TEXT, up_to(2))
    first = table_probs(TEXT, SAMPLED, ids or range(VOCAB))
    leaders = sorted((0, 1), key=lambda node: -(first[5] if node == 0 else first[0] / (1 - first[5])))
    assert draft.tokens == (5, 0, 3, 2, 0, 5) and draft.parents == (-1, -1, *(n for n in leaders for _ in range(2)))
    assert draft.origin == (HEAD,) * 6 and [position for position, _ in noise.asked] == [2, 2, 3, 3, 3, 3]
    assert draft.token_probs is not None and draft.probs is not None
    for node, token in enumerate(draft.tokens):
        parent = draft.parents[node]
        path = [*TEXT, *(draft.tokens[i] for i in draft.path(parent))]
        expected = table_probs(path, SAMPLED, ids or range(VOCAB))
        for elder in range(node):
            if draft.parents[elder] == parent:
                rest = 1 - expected[draft.tokens[elder]]
                expected = [0.0 if v == draft.tokens[elder] else x / rest for v, x in enumerate(expected)]
        assert noise.asked[node][1] == pytest.approx(expected, abs=1e-4)
        assert draft.token_probs[node] == pytest.approx(expected[token], abs=1e-4)
        dense = draft.probs.dense()
        assert dense is not None and dense[node].tolist() == pytest.approx(expected, abs=1e-4)


def grown(width: int, beam: int, nodes: int, depth: int, ids: Sequence[int] = range(VOCAB)) -> Draft:
    """Grow a tree of the most probable tokens by the definition."""
    tokens: list[int] = []
    parents: list[int] = []
    probs, level = {-1: 1.0}, [-1]
    for _ in range(depth):
        level = sorted(level, key=lambda node: -probs[node])[:beam]
        following = []
        scored = Draft(tuple(tokens), tuple(parents))
        for node in level:
            row = table_probs([*TEXT, *(tokens[i] for i in scored.path(node))], SamplingParams(), ids)
            for token in sorted(ids, key=lambda v: -row[v])[: min(width, nodes - len(tokens))]:
                probs[len(tokens)] = probs[node] * row[token]
                following.append(len(tokens))
                tokens.append(token)
                parents.append(node)
        level = following
    return Draft(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("kind", ["model", "head", "draft vocabulary"])
@pytest.mark.parametrize(
    ("width", "beam", "nodes", "depth"), [(3, 2, 12, 3), (2, 1, 9, 4), (1, 1, 3, 9), (4, 3, 20, 3), (9, 2, 30, 2)]
)
def test_greedy_trees_grow_from_the_most_probable_paths(
    kind: str, width: int, beam: int, nodes: int, depth: int
) -> None:
    ids = IDS if kind == "draft vocabulary" else tuple(range(VOCAB))
    head = TableHead(MODEL_OF_TABLE, IDS if kind == "draft vocabulary" else None)
    scorer = ModelScorer(MODEL_OF_TABLE.score, VOCAB) if kind == "model" else head
    draft = TreeDrafter(scorer, GREEDY, Script(), VOCAB, nodes, width, beam).propose(TEXT, up_to(depth))
    expected = grown(width, beam, nodes, depth, ids)
    assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
    assert draft.origin == (MODEL if kind == "model" else HEAD,) * len(draft) and draft.token_probs is None


def test_drafts_end_where_the_head_has_no_states_or_no_tokens() -> None:
    class NoStates(TableHead):
        def start(self, tokens: Any) -> None:
            return None

    banned = replace(GREEDY, bad_words=tuple((token,) for token in IDS))
    for head, sampling in ((NoStates(MODEL_OF_TABLE, None), GREEDY), (TableHead(MODEL_OF_TABLE, IDS), banned)):
        assert TreeDrafter(head, sampling, Script(), VOCAB).propose(TEXT, up_to(3)) == Draft()
        assert ChainDrafter(head, sampling, Script(), VOCAB).propose(TEXT, up_to(3)) == Draft()
    narrow = SamplingParams(temperature=0.5, top_k=1)
    best = int(MODEL_OF_TABLE.logits(TEXT).argmax())
    noise = Script(best)
    tree = TreeDrafter(ModelScorer(MODEL_OF_TABLE.score, VOCAB), narrow, noise, VOCAB)
    assert tree.propose(TEXT, up_to(1)).tokens == (best,)  # no second child has a probability
