"""CUDA graphs on a fake of `torch.cuda`: tokens, launches and reads of steps; streams, lifetimes, failures, times."""

import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fakes.cuda import STREAMS, FakeCuda, HostCalls
from fakes.heads import head_for
from fakes.tiny_models import LLAMA, byte_level_tokenizer, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from specdemo import generate as run_recipe
from specdemo.core.comparison import ChainComparison
from specdemo.core.distributions import DenseProbs
from specdemo.core.events import End, Header, StepEvent
from specdemo.core.policies import POLICIES, CostModel, DraftLengths, PathProbability
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Step, Verdict
from specdemo.models import batch_invariance
from specdemo.models.batch_invariance import BatchInvariance, check_invariance
from specdemo.models.engines import cuda_graphs
from specdemo.models.engines.cuda_graphs import GRAPH_ROWS
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.select import engine_of
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_engine")]
GAMMA = 4
VOCAB = LLAMA["vocab_size"]


class Counted(NamedTuple):
    step: Step
    launches: int
    replays: int
    reads: int
    kv_bytes: float | None


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Models and heads named `confident` have largest probabilities of all sizes."""
    folder = tmp_path_factory.mktemp("models")
    target = str(save_model(folder / "model", byte_level_tokenizer(), max_position_embeddings=512))
    drafter = str(save_model(folder / "drafter", byte_level_tokenizer(), num_hidden_layers=1))
    confident = save_model(folder / "confident", byte_level_tokenizer(), num_hidden_layers=1)
    scale_norm(confident, "model.norm.weight", 13)
    heads = {name: head_for(target, folder / f"{name} head") for name in ("random", "confident")}
    scale_norm(Path(heads["confident"]), "norm.weight", 12)
    shared = {"target": target, "device": "cpu", "max_tokens": 28, "gamma": GAMMA}
    return {
        "draft": {**shared, "method": "draft", "drafter": drafter},
        "copy": {**shared, "method": "draft", "drafter": target},  # all tokens are accepted at temperature 0
        "eagle": {**shared, "method": "eagle", "head": heads["random"]},
        "hybrid": {**shared, "method": "hybrid", "head": heads["confident"], "policy": "path"},
        "path": {**shared, "method": "draft", "drafter": str(confident), "policy": "path"},
        "ar": {"target": target, "device": "cpu", "max_tokens": 12, "method": "ar"},
    }


def scale_norm(folder: Path, name: str, factor: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] *= factor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Device:
    """A fake of a GPU whose models stay loaded; `recorded`: passes are recorded."""

    def __init__(self, recorded: bool) -> None:
        self.recorded, self.cuda, self.pool = recorded, FakeCuda(), ModelPool()

    def run(self, *recipes: Recipe) -> list[Counted]:
        calls, counted = HostCalls(self.cuda), []
        before = calls.counts
        with pytest.MonkeyPatch.context() as patch:
            self.cuda.install(patch)
            patch.setattr(LlamaWeights, "recordable", property(lambda weights: self.recorded))
            with calls.counted(patch):
                for event in (event for recipe in recipes for event in run_recipe(recipe, "abcabcab", self.pool)):
                    if isinstance(event, StepEvent):
                        changes = (after - first for after, first in zip(calls.counts, before, strict=True))
                        counted.append(Counted(event.step, *changes, event.memory.kv))
                    if isinstance(event, Header | StepEvent):
                        before = calls.counts
        return counted


class Devices:
    """Devices without and with recordings."""

    def __init__(self, recipes: dict[str, dict[str, Any]]) -> None:
        self.recipes, self.eager, self.recording = recipes, Device(recorded=False), Device(recorded=True)

    def runs(self, name: str, **changed: Any) -> tuple[list[Counted], list[Counted]]:
        """Return the steps of separate passes and of recorded ones."""
        recipe = Recipe(**{**self.recipes[name], **changed})
        return self.eager.run(recipe), self.recording.run(recipe)


@pytest.fixture(scope="module")
def devices(recipes: dict[str, dict[str, Any]]) -> Devices:
    return Devices(recipes)


def texts(run: list[Counted]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(counted.step.draft.tokens, counted.step.tokens) for counted in run]


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
        ("path", {"temperature": 1.0, "top_p": 0.9}),
        ("ar", {"temperature": 1.0}),
    ],
)
def test_a_step_is_two_graphs_with_the_tokens_of_separate_passes(
    name: str, changed: dict[str, Any], devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph drafts, the other verifies; the host reads only the result of both, at once.

    With policy path the draft is the part of the recorded chain that would have been drafted without a recording.
    """
    monkeypatch.setitem(POLICIES, "path", replace(POLICIES["path"], make=path_without_costs))
    expected, found = devices.runs(name, **changed)
    assert texts(found) == texts(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.allclose(probabilities(one.step.verdict), probabilities(other.step.verdict), atol=1e-4)
        assert one.step.verdict.draw == other.step.verdict.draw
        if number > 1:  # the first draft also reads the prompt
            assert one.replays == (2 if name != "ar" and drafts_by_graph(one.step) else 1)
            assert one.reads == 1 or changed.get("top")
            assert len(one.step.draft) < GAMMA or one.launches < other.launches / 3
    lengths = {len(one.step.draft) for one in found if drafts_by_graph(one.step)}
    assert name != "hybrid" or lengths >= {0, 1, 2}
    if name in ("eagle", "hybrid", "ar"):  # also after the end of a draft, where the recorded chain continues
        assert [one.kv_bytes for one in found] == [one.kv_bytes for one in expected]
    assert name != "path" or len(lengths) > 1
    accepted = {len(one.step.verdict.accepted) for one in found if one.step.draft.tokens}
    assert name == "ar" or changed["temperature"] == 0 or len(accepted) > 1


@pytest.mark.parametrize(("name", "rule"), [("copy", "block"), ("eagle", "block"), ("copy", "coupled")])
def test_the_host_reads_a_draft_before_another_verification(name: str, rule: str, devices: Devices) -> None:
    expected, found = devices.runs(name, temperature=1.0, rule=rule)
    assert [(one.step.draft, one.step.tokens) for one in found] == [
        (replace(one.step.draft, token_probs=other.step.draft.token_probs), one.step.tokens)
        for one, other in zip(expected, found, strict=True)
    ]
    assert all(one.replays == 2 and one.reads > 1 for one in found[2:] if one.step.draft.tokens)


def test_a_device_times_the_draft(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay takes longer here than the host, so that a draft takes the whole step."""
    monkeypatch.setattr("fakes.cuda.REPLAY_MS", 1e9)
    steps = [counted.step for counted in devices.runs("copy", temperature=0.0)[1]]
    assert all(step.verify_s == 0 < step.draft_s < 1e6 for step in steps if drafts_by_graph(step) and step.draft.tokens)
    assert steps[0].verify_s > 0


@pytest.mark.parametrize("name", ["copy", "eagle"])
def test_a_failed_capture_of_chains_continues_eagerly(
    name: str, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    recipe = Recipe(**{**devices.recipes[name], "max_tokens": 12}, temperature=0.0)
    expected = devices.recording.run(recipe)
    for module in ("llama", "torch_head"):
        monkeypatch.setattr(f"specdemo.models.engines.{module}.chain_output", fail)
    assert texts(Device(recorded=True).run(recipe)) == texts(expected)


def test_steps_stay_recorded_after_runs_with_other_parameters(
    recipes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "GRAPH_LIMIT", 10)
    changed = [Recipe(**{**recipes["draft"], "max_tokens": 12}, temperature=0.1 * i) for i in range(1, 6)]
    for counted in Device(recorded=True).run(*changed):
        assert not counted.step.draft.tokens or counted.reads == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_trees_are_recorded(temperature: float, devices: Devices) -> None:
    """A head computes a row for each node, also of other branches."""
    expected, found = devices.runs("eagle", method="tree", temperature=temperature)
    assert texts(found) == texts(expected)
    drafts = [counted for counted in found if len(counted.step.draft) > 4]
    assert len(drafts) > 2 and all(counted.replays > 2 for counted in drafts)
    assert any(len(set(counted.step.draft.parents)) < len(counted.step.draft) for counted in drafts)


def test_buffers_of_a_longer_draft_are_overwritten() -> None:
    """Rows after the draft have no draft distribution: their token is sampled from p."""
    q, expected = torch.full((4, 3), 0.5), torch.tensor([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0]])
    for probs in (DenseProbs(expected), None):
        draft = Draft.chain((1, 1), probs=probs)
        ChainComparison(SamplingParams(), draft, Noise(0, "correct")).write(0, q, torch.ones(3))
        assert torch.equal(q[:2], expected if probs else expected[[1, 1]]) and not q[2:].any()


# --- passes of an engine: streams, lifetimes, failures and the time of captures ---


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    monkeypatch.setattr(batch_invariance, "STARTS", {"cpu": (50,)})  # compare rows, as on a GPU
    return cuda


def weights(kind: type = LlamaConfig, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaWeights:
    torch.manual_seed(0)
    config = kind(**{**LLAMA, "max_position_embeddings": 4096, **changes})
    return LlamaWeights(AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False))


def scripts(seed: int = 0) -> list[tuple[list[int], Draft]]:
    """Texts with chains and forests of all recorded row counts, around the boundaries of key counts."""
    rng, script = random.Random(seed), []
    for length in (9, 250, 505, 40):
        for rows in (1, 2, 3, 4, 5, 7, 8, 11, 16):
            parents = tuple(i - 1 if rows % 2 else rng.randrange(-1, i) for i in range(rows - 1))
            draft = Draft(tuple(rng.randrange(VOCAB) for _ in parents), parents)
            script.append(([rng.randrange(VOCAB) for _ in range(length)], Draft()))
            script.append(([*script[-1][0], rng.randrange(VOCAB)], draft))
    return script


@pytest.mark.parametrize(("kind", "dtype"), [(LlamaConfig, torch.float32), (Qwen3Config, torch.bfloat16)])
def test_replay_equals_eager(kind: type, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """For chains and forests of 1 to 16 rows, below and above 512 keys; operations during captures are legal.

    Logits and hidden states are compared, also those of a path of each draft.
    """
    model, taps = weights(kind, dtype), (0, 2, 1)
    eager, script = CachedModel(model, taps=taps), scripts()

    def outputs(cached: CachedModel, tokens: list[int], draft: Draft) -> list[torch.Tensor]:
        logits = cached.score(tokens, draft)
        path = [draft.tokens[node] for node in draft.path(len(draft) - 1)]
        states = cached.states([*tokens, *path], 0)
        assert states is not None
        return [logits, *states.clone().unbind(1)]

    expected = [outputs(eager, *item) for item in script]
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    engine_of(model).release()
    replayed = CachedModel(model, taps=taps)
    for item, values in zip(script, expected, strict=True):
        for found, value in zip(outputs(replayed, *item), values, strict=True):
            tolerance = (1e-5 if dtype == torch.float32 else 3e-2) * float(value.abs().max())
            assert found.shape == value.shape and (found - value).abs().max() <= tolerance, (len(item[0]), item[1])
    assert cuda.replays > len(cuda.captures) > len(GRAPH_ROWS) and not model.graph_failure


def recorded(cached: CachedModel) -> bool:
    return bool(cached._cache.recorder.recordings)


def test_a_cache_beyond_the_streams_takes_that_of_the_least_recently_used(cuda: FakeCuda) -> None:
    """Logits stay equal in all bits, recorded or not; the next caches wait for a number of passes."""
    model = weights(num_hidden_layers=1)
    caches = [CachedModel(model) for _ in range(STREAMS)]
    expected = [cached.score([1, 2, 3], Draft.chain((4, 5, 6, 7, 8, 9))) for cached in caches][0]
    caches[0].score([1, 2, 3, 9], Draft())
    first, second = CachedModel(model), CachedModel(model)
    for cached in (first, second):
        assert torch.equal(cached.score([1, 2, 3], Draft.chain((4, 5, 6, 7, 8, 9))), expected)
    assert recorded(first) and not recorded(second) and not model.graph_failure
    assert [i for i, cached in enumerate(caches) if not recorded(cached)] == [1]
    captures, tokens = len(cuda.captures), [1, 2, 3]
    for step in range(300):
        tokens.append(step % VOCAB)
        second.score(tokens, Draft())
        if recorded(second):
            break
    assert 200 < step < 299 and len(cuda.captures) == captures + 1
    for cached in caches:  # raises if a workspace was freed
        cached.score([1, 2, 3, 5], Draft())


def test_no_workspace_is_used_after_its_release(
    cuda: FakeCuda, recipes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load, measure, run, draft with own layers, grow the cache, fill the limit of graphs, drop."""
    pool = ModelPool()
    for method in ("draft", "self", "draft"):
        *_, end = run_recipe(Recipe(**{**recipes["copy"], "method": method}), "abcd", pool)
        assert isinstance(end, End) and end.reason == "length"
    monkeypatch.setattr(cuda_graphs, "GRAPH_LIMIT", 12)
    model = weights(num_hidden_layers=1)
    assert check_invariance(model).compared
    first, second = CachedModel(model), CachedModel(model)
    for length in (5, 600):
        for rows in GRAPH_ROWS:
            for cached in (first, second):
                cached.score([rows] * length, Draft.chain((1,) * (rows - 1)))
                cached.score([rows] * length + [2], Draft.chain((1,) * (rows - 1)))
                assert len(cached._cache.recorder.recordings) <= 12
    pool.clear()
    first.score([1, 2, 3], Draft())
    assert cuda.current is cuda.default


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("out of memory")])
def test_a_failed_capture_continues_eagerly(
    error: Exception, cuda: FakeCuda, recipes: dict[str, dict[str, Any]]
) -> None:
    def fail() -> None:
        raise error

    recipe = Recipe(**recipes["copy"], temperature=0.0)
    expected = [event.step.tokens for event in run_recipe(recipe, "abcd") if isinstance(event, StepEvent)]
    cuda.fail = fail
    events = list(run_recipe(recipe, "abcd"))
    assert [event.step.tokens for event in events if isinstance(event, StepEvent)] == expected
    header = next(event for event in events if isinstance(event, Header))
    assert header.environment["engine"].endswith(f"; no CUDA graphs: {error}")
    assert cuda.current is cuda.default


@pytest.mark.parametrize(
    ("changed", "pad"),
    [
        ({}, 8),
        ({"policy": "auto"}, 1),
        pytest.param({"method": "tree"}, 8, marks=pytest.mark.exhaustive),
        pytest.param({"method": "nasd"}, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_no_capture_is_timed(
    changed: dict[str, Any],
    pad: int,
    cuda: FakeCuda,
    recipes: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock advances during captures only, by 100 s each: every time of the run is 0."""
    found = BatchInvariance(True, pad, 1, {1: 1.0})
    monkeypatch.setattr("specdemo.models.load.check_invariance", lambda model: found)
    clock = SimpleNamespace(perf_counter=lambda: 100.0 * len(cuda.captures), monotonic=time.monotonic)
    for module in ("specdemo.generate", "specdemo.models.chat_prompt", "specdemo.worker"):
        monkeypatch.setattr(sys.modules[module], "time", clock)
    for prompt in ("abcd", "a" * 250):
        events = list(run_recipe(Recipe(**{**recipes["copy"], "temperature": 0.0, **changed}), prompt))
        steps = [event.step for event in events if isinstance(event, StepEvent)]
        assert len(steps) > 3 and cuda.captures
        assert {step.draft_s + step.verify_s + step.t for step in steps} == {0.0}
