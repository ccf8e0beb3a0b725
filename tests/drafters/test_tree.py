"""Trees: shape, distributions of siblings, and unchanged greedy text."""

from __future__ import annotations

import pytest
import torch
from fakes.tiny_models import TableModel, blurred, committed, run, tiny_model, up_to

from specdemo.core.decode import EmptyDrafter
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.tree import ModelNodes, TreeDrafter
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel

pytestmark = pytest.mark.slow

MODEL = TableModel(8, seed=4)


def drafter(temperature: float, **shape: int) -> TreeDrafter:
    return TreeDrafter(
        ModelNodes(MODEL.score, 8), SamplingParams(temperature=temperature), Noise(1, "draft"), 8, **shape
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shape(temperature: float) -> None:
    """Within the budget of nodes, width and depth; the most probable nodes are expanded."""
    draft = drafter(temperature, nodes=9, width=3, beam=2).propose([1, 2], up_to(3))
    assert len(draft) == 9 and max(len(draft.path(node)) for node in range(9)) == 2
    kids = draft.children()
    assert kids[-1] == [0, 1, 2] and all(len(children) == 3 for children in kids.values()) and len(kids) == 3
    probs = MODEL.logits([1, 2]).softmax(-1)
    by_chance = sorted(range(3), key=lambda node: -float(probs[draft.tokens[node]]))
    if temperature == 0:
        assert set(kids) - {-1} == set(by_chance[:2])
        assert list(draft.tokens[:3]) == probs.topk(3).indices.tolist()
    shallow = drafter(temperature, nodes=9, width=3).propose([1, 2], up_to(1))
    assert len(shallow) == 3
    assert not drafter(temperature).propose([1, 2], up_to(0)).tokens


def test_the_most_probable_samples_are_expanded() -> None:
    orders = set()
    for seed in range(30):
        tree = TreeDrafter(ModelNodes(MODEL.score, 8), SamplingParams(), Noise(seed, "draft"), 8, width=3, beam=1)
        draft = tree.propose([3], up_to(2))
        best = max(range(3), key=lambda node: draft.token_probs[node])
        assert set(draft.parents) == {-1, best}
        orders.add(best)
    assert orders == {0, 1, 2}


def test_siblings_are_sampled_without_replacement_with_their_distributions() -> None:
    for seed in range(30):
        noise = Noise(seed, "draft")
        draft = TreeDrafter(ModelNodes(MODEL.score, 8), SamplingParams(), noise, 8, nodes=8, width=4).propose(
            [3], up_to(2)
        )
        for parent, children in draft.children().items():
            path = [3, *(draft.tokens[node] for node in draft.path(parent))]
            left = MODEL.logits(path).softmax(-1)
            for child in children:
                assert torch.allclose(draft.probs.row(child), left, atol=1e-6)
                assert draft.token_probs[child] == pytest.approx(float(left[draft.tokens[child]]), abs=1e-6)
                left = left.clone()
                left[draft.tokens[child]] = 0
                left /= left.sum()
            assert len({draft.tokens[child] for child in children}) == len(children)


@pytest.mark.parametrize("engine", ["lean", "transformers"])
def test_greedy_text_is_unchanged_and_trees_accept_more_than_chains(engine: str) -> None:
    model = tiny_model("llama")
    small = blurred(model, "llama", noise=0.6)
    if engine == "lean":
        model, small = LlamaWeights(model), LlamaWeights(small)
    greedy, noise = SamplingParams(temperature=0), Noise(0, "unused when greedy")
    rounds = {1: 0, 3: 0}
    for start in range(8):
        prompt = [start, 3, 2 * start]

        def text(drafter: object, prompt: list[int] = prompt) -> tuple[list[int], int]:
            verifier = ModelVerifier(CachedModel(model).score, greedy, rejection, noise, noise)
            steps = run(prompt, verifier, drafter, Fixed(4), 24)  # type: ignore[arg-type]
            return committed(steps), len(steps)

        expected, _ = text(EmptyDrafter())
        for width in rounds:
            tree = TreeDrafter(
                ModelNodes(CachedModel(small).score, 61), greedy, noise, 61, nodes=12 if width > 1 else 4, width=width
            )
            found, count = text(tree)
            assert found == expected
            rounds[width] += count
    assert rounds[3] < rounds[1]
