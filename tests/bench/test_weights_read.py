"""Bytes of weights that passes read: a pass of the drafter per token, per level of a tree, or none for copied text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.core.events import End, StepEvent
from specdemo.core.step import Draft
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

TEXT = "def add(a, b):\n    add(a, b)\n"


def by_model(draft: Draft) -> int:
    return sum(origin.source == "model" for origin in draft.origin)


def no_pass(draft: Draft) -> int:
    return 0


DRAFTER_PASSES: Mapping[str, Callable[[Draft], int]] = {
    **dict.fromkeys(("draft", "self"), len),
    "tree": lambda draft: draft.depth,
    "hybrid": by_model,
    **dict.fromkeys(("ar", "nasd", "suffix", "lookahead"), no_pass),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The drafter has the sizes of the layer that drafts in self-speculation."""
    folder = tmp_path_factory.mktemp("models")
    target = str(save_model(folder / "target", byte_level_tokenizer()))
    drafter = str(save_model(folder / "drafter", byte_level_tokenizer(), num_hidden_layers=1))
    return {"target": target, "drafter": drafter, "temperature": 0, "max_tokens": 48, "device": "cpu"}


@pytest.mark.parametrize("method", DRAFTER_PASSES)
def test_passes_after_the_first_step_are_counted(method: str, models: dict[str, Any]) -> None:
    pool = ModelPool()
    recipe = Recipe(method=method, **models)
    events = list(generate(recipe, TEXT, pool))
    _, *steps = (event.step for event in events if isinstance(event, StepEvent))
    drafter_passes = [DRAFTER_PASSES[method](step.draft) for step in steps]
    if method == "hybrid":
        assert 0 < sum(drafter_passes) < sum(step.draft.size for step in steps)
    target = pool.take(recipe.target_spec).weight_bytes
    drafter = pool.take(Recipe(**models).drafter_spec).weight_bytes
    end = events[-1]
    assert isinstance(end, End) and end.peak is not None
    assert end.peak.read == target * len(steps) + drafter * sum(drafter_passes)
