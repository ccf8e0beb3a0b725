"""Pauses of policy `path` after losses: models and heads compute nothing, copied text is drafted."""

import math
from collections.abc import Callable, Sequence

import pytest
from fakes.tiny_models import TableHead, TableModel
from torch import Tensor

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.origin import MODEL
from specdemo.core.policies import PathProbability
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Step, Verdict
from specdemo.drafters.chain import ChainDrafter
from specdemo.drafters.hybrid import HybridDrafter
from specdemo.drafters.model import ModelDrafter, ModelScorer
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.drafters.tree import TreeDrafter
from specdemo.drafters.universal import UniversalDrafter

VOCAB, TEXT = 8, [1, 2, 3]
REPETITION = [4, 5, 6, 7, 1, 4, 5, 6, 7]  # continues with 1, 4, ...


class CountedModel(TableModel):
    """Counts the logits that drafters request."""

    requests = 0

    def logits(self, prefix: Sequence[int]) -> Tensor:
        self.requests += 1
        return super().logits(prefix)


def model_drafter(model: TableModel, temperature: float) -> ModelDrafter:
    sampling = SamplingParams(temperature=temperature)
    return ModelDrafter(model.score, sampling, Noise(0, "draft"), VOCAB, extend=model.extend)


def tree(scorer: ModelScorer | TableHead, temperature: float) -> TreeDrafter:
    return TreeDrafter(scorer, SamplingParams(temperature=temperature), Noise(0, "draft"), VOCAB)


DRAFTERS: dict[str, Callable[[TableModel, float], Drafter]] = {
    "model": model_drafter,
    "model of another vocabulary": lambda model, temperature: UniversalDrafter(
        model_drafter(model, 0.0), list, lambda tokens, new: list(new), 100
    ),
    "head": lambda model, temperature: ChainDrafter(
        TableHead(model, None), SamplingParams(temperature=temperature), Noise(0, "draft"), VOCAB
    ),
    "tree": lambda model, temperature: tree(ModelScorer(model.score, VOCAB), temperature),
    "tree of a head": lambda model, temperature: tree(TableHead(model, None), temperature),
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
    assert drafter.propose(REPETITION, DraftBudget(4, policy)).tokens == (1, 4, 5, 6)
    assert drafter.propose([*REPETITION, 3, 2], DraftBudget(4, policy)) == Draft()
    assert model.requests == 0
