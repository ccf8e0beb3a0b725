"""CUDA graphs on a fake of `torch.cuda`: streams, lifetimes, legality, failures and the time of captures."""

import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.cuda import STREAMS, FakeCuda
from fakes.heads import random_head
from fakes.tiny_models import LLAMA, byte_level_tokenizer, save_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from specdemo import generate as run_recipe
from specdemo.core.events import End, Header, StepEvent
from specdemo.core.step import Draft
from specdemo.models import batch_invariance
from specdemo.models.batch_invariance import BatchInvariance, check_invariance
from specdemo.models.cached_head import Head
from specdemo.models.engines.cuda_graphs import GRAPH_LIMIT, GRAPH_ROWS
from specdemo.models.engines.engine import RepeatedPasses
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.select import engine_of
from specdemo.models.heads import load_head
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import HeadSpec, ModelSpec
from specdemo.plan import plan_run
from specdemo.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_engine")]

VOCAB = LLAMA["vocab_size"]


def compare_at(monkeypatch: pytest.MonkeyPatch, *starts: int) -> None:
    """Compare rows on a CPU, as on a GPU."""
    monkeypatch.setattr(batch_invariance, "SECONDS", 0.01)
    monkeypatch.setattr(batch_invariance, "STARTS", {"cpu": starts})


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    compare_at(monkeypatch, 50)
    return cuda


def weights(kind: type = LlamaConfig, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaWeights:
    torch.manual_seed(0)
    config = kind(**{**LLAMA, "max_position_embeddings": 4096, **changes})
    return LlamaWeights(AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False))


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Any]:
    folder = str(save_model(tmp_path / "model", byte_level_tokenizer(), max_position_embeddings=512))
    return {"target": folder, "drafter": folder, "device": "cpu", "max_tokens": 12, "temperature": 0.0}


def texts(seed: int = 0) -> list[tuple[list[int], Draft]]:
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
    eager, script = CachedModel(model, taps=taps), texts()

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


def head_of(folder: Path, model: LlamaWeights) -> Head:
    name = random_head(folder, model.config, [*range(0, VOCAB, 2)], max_position_embeddings=900)
    target = LoadedModel(ModelSpec("small/target"), model, None, 0, "")
    return load_head(HeadSpec(name, target.spec), target)


def drafts(head: Head, model: LlamaWeights) -> list[torch.Tensor]:
    """Return the logits of drafts for texts that grow, lose tokens and end with the context, also of a second branch.

    The prepared capacity is that of the first texts.
    """
    target, rows = CachedModel(model, taps=head.taps), []
    cached = target.head = head.open(target)
    for length in (9, 12, 11, 250, 252, 600, 899, 20):
        tokens = [(7 * i + i // 9) % VOCAB for i in range(length)]
        target.score(tokens[:-1], Draft())
        if length == 9:
            target.prepare(RepeatedPasses(frozenset({1, 2, 3, 4}), 9, 200))
        first = cached.start(tokens)
        assert first is not None
        rows += [first, cached.step(4), cached.step(6)] if length < 899 else [first]
        before = cached.draft_rows()
        if length < 899:
            rows.append(cached.step(8))
            cached.restore(before)
            rows.append(cached.step(2))
    assert target.reserved_bytes > target.kv_bytes
    return rows


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all((row - value).abs().max() <= 1e-5 * float(value.abs().max()) for row, value in pairs)


def test_draft_rows_of_heads_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = weights()
    expected = drafts(head_of(tmp_path / "eager", model), model)
    model.engine = None
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    assert equal(drafts(head_of(tmp_path / "recorded", model), model), expected)
    assert not model.graph_failure
    assert cuda.replays > 28  # four steps for each of seven texts


def test_no_workspace_is_used_after_its_release(cuda: FakeCuda, pair: dict[str, Any]) -> None:
    """Load, measure, run, draft with own layers, grow the cache, fill the limit of graphs, drop."""
    pool = ModelPool()
    for recipe in (Recipe(**pair), Recipe(**pair, method="self"), Recipe(**pair)):
        assert [event.reason for event in run_recipe(recipe, "abcd", pool) if isinstance(event, End)] == ["length"]
    model = weights(num_hidden_layers=1)
    assert check_invariance(model).compared
    first, second = CachedModel(model), CachedModel(model)
    for length in (5, 300, 600, 1100):
        for rows in GRAPH_ROWS:
            for cached in (first, second):
                cached.score([rows] * length, Draft.chain((1,) * (rows - 1)))
                cached.score([rows] * length + [2], Draft.chain((1,) * (rows - 1)))
                assert len(cached._cache.recorder.recordings) <= GRAPH_LIMIT
    pool.clear()
    first.score([1, 2, 3], Draft())
    assert cuda.current is cuda.default


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("out of memory")])
def test_a_failed_capture_continues_eagerly(error: Exception, cuda: FakeCuda, pair: dict[str, Any]) -> None:
    def fail() -> None:
        raise error

    expected = [event.step.tokens for event in run_recipe(Recipe(**pair), "abcd") if isinstance(event, StepEvent)]
    cuda.fail = fail
    events = list(run_recipe(Recipe(**pair), "abcd"))
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
    changed: dict[str, Any], pad: int, cuda: FakeCuda, pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock advances during captures only, by 100 s each: every time of the run is 0."""
    found = BatchInvariance(True, pad, 1, {1: 1.0})
    monkeypatch.setattr("specdemo.models.load.check_invariance", lambda model: found)
    clock = SimpleNamespace(perf_counter=lambda: 100.0 * len(cuda.captures), monotonic=time.monotonic)
    for module in ("specdemo.generate", "specdemo.models.chat_prompt", "specdemo.worker"):
        monkeypatch.setattr(sys.modules[module], "time", clock)
    for prompt in ("abcd", "a" * 250):
        events = list(run_recipe(Recipe(**{**pair, "max_tokens": 24, **changed}), prompt))
        steps = [event.step for event in events if isinstance(event, StepEvent)]
        assert len(steps) > 3 and cuda.captures
        assert {step.draft_s + step.verify_s + step.t for step in steps} == {0.0}


@pytest.mark.parametrize(
    ("changed", "device", "claimed"),
    [
        ({"gamma": 7}, "cpu", True),
        ({"gamma": 8}, "cpu", False),  # nine rows
        ({"method": "tree"}, "cpu", False),
        ({"gamma": 7, "max_tokens": 1500}, "cuda", True),
        ({"gamma": 7, "max_tokens": 2500}, "cuda", False),
    ],
)
def test_equal_bits_are_claimed_for_compared_rows_and_contexts_only(
    changed: dict[str, Any], device: str, claimed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_model(tmp_path / "model", byte_level_tokenizer(), max_position_embeddings=4096))
    pool, recipe = ModelPool(), Recipe(target=folder, drafter=folder, device="cpu", temperature=0.0, **changed)
    loaded = pool.get(plan_run(recipe).target)
    loaded.__dict__["_invariance"] = BatchInvariance(True, 1, 10, {1: 1.0})
    compare_at(monkeypatch, *((50, 600, 2000) if device == "cuda" else ()))
    header = next(event for event in run_recipe(recipe, "abcd", pool) if isinstance(event, Header))
    assert header.bit_equal == claimed
