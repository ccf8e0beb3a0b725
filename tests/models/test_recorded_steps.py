"""Steps of a run as CUDA graphs: equal tokens, launches and reads of the host, on a fake of `torch.cuda`."""

from pathlib import Path
from typing import Any

import pytest
from fakes.cuda import FakeCuda, HostCalls
from fakes.heads import head_for
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo import generate as run_recipe
from specdemo.core.events import Header, StepEvent
from specdemo.core.step import Step
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_engine")]
GAMMA = 4


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Any]:
    folder = str(save_model(tmp_path / "model", byte_level_tokenizer(), max_position_embeddings=512))
    drafter = str(save_model(tmp_path / "drafter", byte_level_tokenizer(), num_hidden_layers=1))
    shared = {"target": folder, "device": "cpu", "max_tokens": 40, "gamma": GAMMA}
    return {"draft": {**shared, "drafter": drafter}, "eagle": {**shared, "head": head_for(folder, tmp_path / "head")}}


def steps_of(recipe: Recipe, calls: HostCalls | None = None) -> tuple[list[Step], list[tuple[int, int, int]]]:
    """Return the steps of a run, and the calls of each."""
    steps, counts = [], []
    for event in run_recipe(recipe, "abcabcab", ModelPool()):
        if calls is not None and isinstance(event, Header | StepEvent):
            counts.append(calls.counts)
        if isinstance(event, StepEvent):
            steps.append(event.step)
    differences = [
        (after[0] - before[0], after[1] - before[1], after[2] - before[2])
        for before, after in zip(counts, counts[1:], strict=False)
    ]
    return steps, differences


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["draft", "eagle"])
def test_a_step_has_two_graphs_and_the_tokens_of_eager_passes(
    method: str, temperature: float, pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(**pair[method], method=method, temperature=temperature)
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    monkeypatch.setattr(LlamaWeights, "recordable", property(lambda weights: False))
    eager_calls = HostCalls(cuda)
    with eager_calls.counted(monkeypatch):
        expected, eager = steps_of(recipe, eager_calls)
    monkeypatch.setattr(LlamaWeights, "recordable", property(lambda weights: True))
    calls = HostCalls(cuda)
    with calls.counted(monkeypatch):
        steps, counts = steps_of(recipe, calls)
    assert [step.draft.tokens for step in steps] == [step.draft.tokens for step in expected]
    assert [step.tokens for step in steps] == [step.tokens for step in expected]
    drafting = [count for count, step in zip(counts, steps, strict=True) if len(step.draft) == GAMMA][1:]
    assert {replays for _, replays, _ in drafting} == {2} and len(drafting) > 5
    assert {reads for *_, reads in drafting} <= ({2} if temperature == 0 else {5, 6})
    plain = [count for count, step in zip(eager, expected, strict=True) if len(step.draft) == GAMMA][1:]
    assert max(launches for launches, *_ in drafting) < min(launches for launches, *_ in plain) / 4
