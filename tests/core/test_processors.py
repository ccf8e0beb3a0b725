"""Custom logits processors: exact if they depend on position and text only, the same for target and drafter."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from fakes.enumeration import (
    DRAFTERS,
    PROMPT,
    ROUNDING,
    SAMPLING,
    distance,
    enumerate_distribution,
    true_distribution,
)
from fakes.tiny_models import byte_level_tokenizer, save_model
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig


def no_repetition(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Exclude the last token, in place, and prefer even tokens at even positions."""
    logits[tokens[-1]] = -torch.inf
    logits[len(tokens) % 2 :: 2] += 1.0
    return logits


@pytest.mark.parametrize("drafter", ["model", "straight", "tree", "n-grams", "hybrid", "siblings", "guessed forest"])
@pytest.mark.parametrize("name", ["plain", "top-p", "greedy"])
def test_the_text_follows_the_processed_distribution(name: str, drafter: str) -> None:
    sampling = replace(SAMPLING[name], processors=(no_repetition,))
    probs, drafted, _ = enumerate_distribution(sampling, DRAFTERS[drafter])
    expected = true_distribution(sampling, 3, ())
    assert distance(probs, expected) < ROUNDING and drafted > 0
    assert distance(expected, true_distribution(SAMPLING[name], 3, ())) > 0.1


def no_rise(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Allow falling tokens only after the prompt: no token may follow a text that rises."""
    start = len(PROMPT) - 1
    rises = any(b > a for a, b in pairwise(tokens[start:]))
    logits[tokens[-1] + 1 if not rises else 0 :] = -torch.inf
    return logits


@pytest.mark.parametrize(
    "drafter", ["model", "tree", "tree of a head", "lookahead", "n-grams", "guesses", "guessed forest"]
)
@pytest.mark.parametrize("name", ["plain", "greedy"])
def test_drafts_may_contain_excluded_tokens(name: str, drafter: str) -> None:
    """The rows after them are not processed, since no text contains them."""
    sampling = replace(SAMPLING[name], processors=(no_rise,))
    probs, *_ = enumerate_distribution(sampling, DRAFTERS[drafter], length=4)
    assert distance(probs, true_distribution(sampling, 4, ())) < ROUNDING


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer()))


@pytest.mark.parametrize("method", ["ar", "draft", "nasd"])
def test_a_run_applies_the_processors_to_target_and_drafter(target: str, method: str) -> None:
    def letters(tokens: Sequence[int], logits: Tensor) -> Tensor:
        allowed = 40 + len(tokens) % 20
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([allowed]), 0.0)

    drafter = {"drafter": target} if method == "draft" else {}
    recipe = Recipe(target=target, **drafter, method=method, temperature=1.0, max_tokens=12, device="cpu")
    events = generate(recipe, "abc", ModelPool(), processors=[letters])
    steps = [event for event in events if isinstance(event, StepEvent)]
    tokens = [token for event in steps for token in event.step.tokens]
    assert len(tokens) == 12 and {(b - a) % 20 for a, b in pairwise(tokens)} == {1}
    if method == "draft":
        assert steps[-1].metrics.accepted == steps[-1].metrics.drafted > 0


def test_processors_need_a_local_target() -> None:
    recipe = Recipe(cloud=CloudConfig("http://127.0.0.1:1"))
    with pytest.raises(UserError, match="processors needs a local target"):
        list(generate(recipe, "abc", processors=[no_repetition]))
