"""Steps of a run as CUDA graphs: equal tokens, launches and reads of the host, on a fake of `torch.cuda`."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fakes.cuda import FakeCuda, HostCalls
from fakes.heads import head_for
from fakes.tiny_models import byte_level_tokenizer, save_model
from safetensors.torch import load_file, save_file

from specdemo import generate as run_recipe
from specdemo.core.comparison import ChainComparison
from specdemo.core.distributions import DenseProbs
from specdemo.core.events import Header, StepEvent
from specdemo.core.policies import POLICIES, CostModel, DraftLengths, PathProbability
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Step, Verdict
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_engine")]
GAMMA = 4


class Counted(NamedTuple):
    step: Step
    launches: int
    replays: int
    reads: int
    kv_bytes: float | None


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    target = str(save_model(folder / "model", byte_level_tokenizer(), max_position_embeddings=512))
    drafter = str(save_model(folder / "drafter", byte_level_tokenizer(), num_hidden_layers=1))
    shared = {"target": target, "device": "cpu", "max_tokens": 40, "gamma": GAMMA}
    return {
        "draft": {**shared, "method": "draft", "drafter": drafter},
        "copy": {**shared, "method": "draft", "drafter": target},  # all tokens are accepted at temperature 0
        "eagle": {**shared, "method": "eagle", "head": head_for(target, folder / "head")},
        "hybrid": {**shared, "method": "hybrid", "head": confident_head(target, folder / "other"), "policy": "path"},
        "path": {**shared, "method": "draft", "drafter": confident_model(folder / "confident"), "policy": "path"},
        "ar": {"target": target, "device": "cpu", "max_tokens": 12, "method": "ar"},
    }


def confident_head(target: str, folder: Path) -> str:
    """Write a random head whose largest probabilities are of all sizes; return its directory."""
    head_for(target, folder)
    return scaled_norm(folder, "norm.weight", 12)


def confident_model(folder: Path) -> str:
    """Write a random model whose largest probabilities are of all sizes; return its directory."""
    save_model(folder, byte_level_tokenizer(), num_hidden_layers=1)
    return scaled_norm(folder, "model.norm.weight", 13)


def scaled_norm(folder: Path, name: str, factor: float) -> str:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] *= factor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def run(recipe: Recipe, recorded: bool, patch: pytest.MonkeyPatch, fail: bool = False) -> list[Counted]:
    """Return the steps of a run whose passes are recorded or not; `fail`: captures of chains fail."""
    return runs([recipe], recorded, patch, fail)


def runs(recipes: list[Recipe], recorded: bool, patch: pytest.MonkeyPatch, fail: bool = False) -> list[Counted]:
    """Return the steps of runs with the same models."""
    cuda, pool = FakeCuda(), ModelPool()
    with patch.context() as inner:
        cuda.install(inner)
        inner.setattr(LlamaWeights, "recordable", property(lambda weights: recorded))
        if fail:
            for module in ("llama", "torch_head"):
                inner.setattr(f"specdemo.models.engines.{module}.chain_output", _failed)
        calls, found = HostCalls(cuda), []
        before = calls.counts
        with calls.counted(inner):
            for event in (event for recipe in recipes for event in run_recipe(recipe, "abcabcab", pool)):
                if isinstance(event, StepEvent):
                    changes = (after - first for after, first in zip(calls.counts, before, strict=True))
                    found.append(Counted(event.step, *changes, event.memory.kv))
                if isinstance(event, Header | StepEvent):
                    before = calls.counts
    return found


def _failed(*arguments: object) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def path_without_costs(lengths: DraftLengths, costs: CostModel) -> PathProbability:
    """Return a policy without pauses, for which drafts of a random head have different lengths."""
    return PathProbability(lengths.most, costs=(0.1,), most_lost=(math.inf, math.inf))


def drafts_by_graph(step: Step) -> bool:
    return step.gamma > 0 and {origin.source for origin in step.draft.origin} <= {"model", "head"}


def probabilities(verdict: Verdict) -> torch.Tensor:
    tops = [*verdict.target_top, *verdict.draft_top, *([verdict.token_top] if verdict.token_top else [])]
    values = [*verdict.p, *verdict.beta, *verdict.bound, *(p for top in tops for _, p in top.top)]
    return torch.tensor([-1.0 if value is None else value for value in values])


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("draft", {"temperature": 0.0}),
        ("copy", {"temperature": 0.0}),
        ("draft", {"temperature": 1.0}),
        ("copy", {"temperature": 1.0, "drafter_temperature": 2.0, "top": 3, "top_k": 20, "top_p": 0.8}),
        ("copy", {"temperature": 1.0, "gamma": 7}),  # a shorter draft at the end is padded
        ("copy", {"temperature": 0.1, "drafter_temperature": 0.0}),
        ("eagle", {"temperature": 0.0}),
        ("eagle", {"temperature": 1.0, "min_p": 0.01}),
        ("hybrid", {"temperature": 0.0}),
        ("hybrid", {"temperature": 1.0, "top_p": 0.9}),
        ("path", {"temperature": 0.0}),
        ("path", {"temperature": 1.0}),
        ("ar", {"temperature": 1.0}),
    ],
)
def test_a_step_is_two_graphs_with_the_tokens_of_separate_passes(
    name: str, changed: dict[str, Any], recipes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph drafts, the other verifies; the host reads the result of both at once, and nothing else.

    With policy path the draft is the part of the recorded chain that would have been drafted without a recording.
    """
    monkeypatch.setitem(POLICIES, "path", replace(POLICIES["path"], make=path_without_costs))
    recipe = Recipe(**{**recipes[name], **changed})
    expected, found = run(recipe, False, monkeypatch), run(recipe, True, monkeypatch)
    assert [(one.step.draft.tokens, one.step.tokens) for one in found] == [
        (one.step.draft.tokens, one.step.tokens) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(probabilities(one.step.verdict), probabilities(other.step.verdict), atol=1e-4)
        assert one.step.verdict.draw == other.step.verdict.draw
    for one, other in list(zip(found, expected, strict=True))[2:]:  # the first draft also reads the prompt
        assert one.replays == (2 if name != "ar" and drafts_by_graph(one.step) else 1)
        if not changed.get("top"):
            assert one.reads == 1
        if len(one.step.draft) == GAMMA:
            assert one.launches < other.launches / 3
    lengths = {len(one.step.draft) for one in found if drafts_by_graph(one.step)}
    assert name != "hybrid" or lengths >= {0, 1, 2}
    if name in ("eagle", "hybrid", "ar"):  # also after the end of a draft, where the recorded chain continues
        assert [one.kv_bytes for one in found] == [one.kv_bytes for one in expected]
    assert name != "path" or len(lengths) > 1
    accepted = {len(one.step.verdict.accepted) for one in found if one.step.draft.tokens}
    assert name == "ar" or recipe.temperature == 0 or len(accepted) > 1


@pytest.mark.parametrize(("name", "rule"), [("copy", "block"), ("eagle", "block"), ("copy", "coupled")])
def test_the_host_reads_a_draft_before_another_verification(
    name: str, rule: str, recipes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(**recipes[name], temperature=1.0, rule=rule)
    expected, found = run(recipe, False, monkeypatch), run(recipe, True, monkeypatch)
    assert [(one.step.draft, one.step.tokens) for one in found] == [
        (replace(one.step.draft, token_probs=other.step.draft.token_probs), one.step.tokens)
        for one, other in zip(expected, found, strict=True)
    ]
    assert all(one.replays == 2 and one.reads > 1 for one in found[2:] if one.step.draft.tokens)


def test_a_device_times_the_draft(recipes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay takes longer here than the host, so that a draft takes the whole step."""
    monkeypatch.setattr("fakes.cuda.REPLAY_MS", 1e9)
    steps = [one.step for one in run(Recipe(**recipes["copy"], temperature=0.0), True, monkeypatch)]
    assert all(step.verify_s == 0 < step.draft_s < 1e6 for step in steps if drafts_by_graph(step) and step.draft.tokens)
    assert steps[0].verify_s > 0


@pytest.mark.parametrize("name", ["copy", "eagle"])
def test_a_failed_capture_of_chains_continues_eagerly(
    name: str, recipes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(**recipes[name], temperature=0.0)
    expected, found = run(recipe, True, monkeypatch), run(recipe, True, monkeypatch, fail=True)
    assert [(one.step.draft.tokens, one.step.tokens) for one in found] == [
        (one.step.draft.tokens, one.step.tokens) for one in expected
    ]


def test_steps_stay_recorded_after_runs_with_other_parameters(
    recipes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdemo.models.engines.cuda_graphs.GRAPH_LIMIT", 10)
    changed = [Recipe(**{**recipes["draft"], "max_tokens": 12}, temperature=0.1 * i) for i in range(1, 6)]
    for counted in runs(changed, True, monkeypatch):
        assert not counted.step.draft.tokens or counted.reads == 1


def test_buffers_of_a_longer_draft_are_overwritten() -> None:
    """Rows after the draft have no draft distribution: their token is sampled from p."""
    q, expected = torch.full((4, 3), 0.5), torch.tensor([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0]])
    for probs in (DenseProbs(expected), None):
        draft = Draft.chain((1, 1), probs=probs)
        ChainComparison(SamplingParams(), draft, Noise(0, "correct")).write(0, q, torch.ones(3))
        assert torch.equal(q[:2], expected if probs else expected[[1, 1]]) and not q[2:].any()
