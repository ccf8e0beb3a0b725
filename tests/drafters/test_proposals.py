"""Drafts of models and heads: other vocabularies, shapes of trees, ends of drafts, and pauses of policy `path`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes.tiny_models import TableHead, TableModel, up_to
from torch import Tensor

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.policies import PathProbability
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import HEAD, MODEL, Draft, Step, Verdict
from specdemo.drafters.chain import ChainDrafter, ModelDrafter, ModelScorer, UniversalDrafter
from specdemo.drafters.suffix import HybridDrafter, SuffixDrafter
from specdemo.drafters.tree import TreeDrafter

VOCAB = 6
TEXT = [1, 2]
MODEL_OF_TABLE = TableModel(VOCAB, seed=3)
SAMPLED, GREEDY = SamplingParams(temperature=0.5), SamplingParams(temperature=0)
IDS = (0, 2, 3, 5)


class Script:
    """Gives the listed tokens and records distributions and positions."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = [*tokens]
        self.probs: list[list[float]] = []
        self.positions: list[int] = []

    def sample(self, probs: Tensor, position: int) -> int:
        self.probs.append(probs.tolist())
        self.positions.append(position)
        return self.tokens.pop(0)


def softmax(logits: Tensor, temperature: float = 0.5) -> list[float]:
    probs: list[float] = (logits / temperature).softmax(-1).tolist()
    return probs


def test_models_of_other_sizes() -> None:
    """Ids unknown to the target are masked; texts and drafts of ids unknown to the drafter are impossible."""
    large = TableModel(VOCAB + 3, seed=1)
    noise = Script(5)
    draft = ModelDrafter(large.score, SAMPLED, noise, VOCAB, VOCAB + 3).propose(TEXT, up_to(1))
    expected = softmax(large.logits(TEXT)[:VOCAB])
    assert noise.probs[0] == pytest.approx(expected, abs=1e-5) and draft.tokens == (5,)
    small = TableModel(4, seed=1)
    noise = Script(3)
    draft = ModelDrafter(small.score, SAMPLED, noise, VOCAB, 4).propose(TEXT, up_to(1))
    assert noise.probs[0] == pytest.approx([*softmax(small.logits(TEXT)), 0, 0], abs=1e-5)
    assert ModelDrafter(small.score, SAMPLED, Script(), VOCAB, 4).propose([1, 4], up_to(1)) == Draft()
    tree = TreeDrafter(ModelScorer(small.score, VOCAB, 4), GREEDY, Script(), VOCAB)
    assert len(tree.propose(TEXT, up_to(1))) == 3 and tree.propose([1, 4], up_to(1)) == Draft()


def test_random_numbers_of_a_chain_have_the_positions_of_its_tokens() -> None:
    noise = Script(5, 0, 3)
    draft = ModelDrafter(MODEL_OF_TABLE.score, SAMPLED, noise, VOCAB).propose(TEXT, up_to(3))
    assert draft.tokens == (5, 0, 3) and noise.positions == [2, 3, 4] and draft.origin == (MODEL,) * 3


def test_sampled_trees_grow_from_the_most_probable_siblings() -> None:
    """Positions of random numbers are depths; a second child is drawn from the rest."""
    noise = Script(5, 0, 3, 2, 0, 5)
    tree = TreeDrafter(TableHead(MODEL_OF_TABLE, None), SAMPLED, noise, VOCAB, nodes=6, width=2, beam=2)
    draft = tree.propose(TEXT, up_to(2))
    first = softmax(MODEL_OF_TABLE.logits(TEXT))
    leaders = (0, 1) if first[5] > first[0] / (1 - first[5]) else (1, 0)
    assert draft.tokens == (5, 0, 3, 2, 0, 5) and draft.parents == (-1, -1, *(n for n in leaders for _ in range(2)))
    assert noise.positions == [2, 2, 3, 3, 3, 3] and draft.origin == (HEAD,) * 6


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
            row = MODEL_OF_TABLE.logits([*TEXT, *(tokens[i] for i in scored.path(node))])[list(ids)].softmax(-1)
            chances = dict(zip(ids, row.tolist(), strict=True))
            for token in sorted(ids, key=lambda v: -chances[v])[: min(width, nodes - len(tokens))]:
                probs[len(tokens)] = probs[node] * chances[token]
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


# --- pauses of policy `path` after losses -----------------------------------------------------------------------------


REPETITION = [4, 5, 3, 0, 1, 4, 5, 3, 0]  # continues with 1, 4, ...


class CountedModel(TableModel):
    """Counts the logits that drafters request."""

    requests = 0

    def logits(self, prefix: Sequence[int]) -> Tensor:
        self.requests += 1
        return super().logits(prefix)


def model_drafter(model: TableModel, temperature: float) -> ModelDrafter:
    sampling = SamplingParams(temperature=temperature)
    return ModelDrafter(model.score, sampling, Noise(0, "draft"), VOCAB, extend=model.extend)


def scored(make: Callable[..., Drafter], scorer: ModelScorer | TableHead, temperature: float) -> Drafter:
    return make(scorer, SamplingParams(temperature=temperature), Noise(0, "draft"), VOCAB)


DRAFTERS: dict[str, Callable[[TableModel, float], Drafter]] = {
    "model": model_drafter,
    "model of another vocabulary": lambda model, temperature: UniversalDrafter(
        model_drafter(model, 0.0), list, lambda tokens, new: list(new), 100
    ),
    "head": lambda model, temperature: scored(ChainDrafter, TableHead(model, None), temperature),
    "tree": lambda model, temperature: scored(TreeDrafter, ModelScorer(model.score, VOCAB), temperature),
}


def lose(policy: PathProbability) -> None:
    """Observe rejected drafts of a model up to a pause."""
    draft = Draft.chain((1, 2), origin=(MODEL, MODEL))
    while policy.path_limits != [math.inf] * 4:
        policy.observe(Step(1, (3,), draft, Verdict((), 3), 4, 0.0, 1.0, 0.0, 0.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_compute_nothing_in_a_pause(name: str, temperature: float) -> None:
    model = CountedModel(VOCAB, seed=1)
    drafter, policy = DRAFTERS[name](model, temperature), PathProbability(4, costs=(0.05,), most_lost=(0.1, 0.1))
    assert drafter.propose(TEXT, DraftBudget(4, policy)).tokens and model.requests
    lose(policy)
    model.requests = 0
    assert drafter.propose(TEXT, DraftBudget(4, policy)) == Draft()
    assert model.requests == 0


def test_suffixes_of_the_hybrid_are_drafted_in_a_pause() -> None:
    model, policy = CountedModel(VOCAB, seed=1), PathProbability(4)
    drafter = HybridDrafter(SuffixDrafter(), model_drafter(model, 0.0))
    lose(policy)
    assert drafter.propose(REPETITION, DraftBudget(4, policy)).tokens == (1, 4, 5, 3)
    assert drafter.propose([*REPETITION, 3, 2], DraftBudget(4, policy)) == Draft()
    assert model.requests == 0
