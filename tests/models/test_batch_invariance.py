"""Batch invariance check: detects dependent rows, finds sufficient padding, and its positive results are correct."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tiny_models import CONTEXT, byte_level_tokenizer, save_model, tiny_model
from torch import Tensor

from specdemo.core.events import Header
from specdemo.core.step import Draft
from specdemo.generate import generate
from specdemo.models import batch_invariance
from specdemo.models.batch_invariance import MEASURED_ROWS, BatchInvariance, check_invariance
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.llama import LlamaEngine
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe, plan_run
from specdemo.worker import Worker

pytestmark = pytest.mark.slow


def disturbed(monkeypatch: pytest.MonkeyPatch, noise: Callable[[int], float]) -> None:
    """Make logits depend on the number of rows of the pass."""
    original = LlamaEngine.run

    def run(self: LlamaEngine, entries: list[Entry]) -> list[Tensor]:
        return [logits + noise(len(entry.new)) for logits, entry in zip(original(self, entries), entries, strict=True)]

    monkeypatch.setattr(LlamaEngine, "run", run)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare rows on a CPU, as on a GPU."""
    monkeypatch.setattr(batch_invariance, "STARTS", {"cpu": (50,)})


@pytest.mark.parametrize(("padding_cost", "equal", "pad"), [(0.0, False, 1), (1e9, True, max(MEASURED_ROWS))])
def test_dependence_on_the_number_of_rows_is_detected(
    padding_cost: float, equal: bool, pad: int, compared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding gives equal rows, and is used if it is free."""
    disturbed(monkeypatch, lambda rows: 1e-4 * rows)
    monkeypatch.setattr(batch_invariance, "PADDING_COST", padding_cost)
    found = check_invariance(LlamaWeights(tiny_model("llama")))
    assert (found.equal, found.pad) == (equal, pad) and found.compared > 0


def test_torch_on_a_cpu_claims_no_equal_bits() -> None:
    """Rows had equal bits at the compared numbers of keys, but not at others."""
    found = check_invariance(LlamaWeights(tiny_model("llama")))
    assert not found.equal and found.compared == 0 and found.cost[1] == 1.0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral-sliding"])
def test_padded_passes_give_the_same_logits(kind: str) -> None:
    """Padded passes give the same logits up to rounding, also at the context limit."""
    model = tiny_model(kind)
    filled, plain = CachedModel(model, pad=6), CachedModel(model)
    rng = random.Random(3)
    tokens = [1, 2, 3]
    while len(tokens) < CONTEXT:
        draft = Draft.chain(tuple(rng.randrange(61) for _ in range(min(rng.randrange(4), CONTEXT - len(tokens)))))
        expected, found = plain.score(tokens, draft), filled.score(tokens, draft)
        assert found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
        tokens = [*tokens, *draft.tokens[: rng.randrange(len(draft) + 1)], rng.randrange(61)][:CONTEXT]


def test_other_runs_advance_during_the_measurement() -> None:
    worker, log = Worker(), []
    model = LlamaWeights(tiny_model("llama"))

    def measurement() -> Iterator[str]:
        log.append("begin")
        check_invariance(model)
        log.append("end")
        yield "measured"

    def steps() -> Iterator[int]:
        while "end" not in log:
            log.append("step")
            yield 1

    streams = worker.submit(measurement), worker.submit(steps)
    assert all(stream.wait(60) and stream.error is None for stream in streams)
    worker.close()
    assert log[log.index("begin") : log.index("end")].count("step") > 5


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
@pytest.mark.usefixtures("torch_engine")
def test_equal_bits_are_claimed_for_compared_rows_and_contexts_only(
    changed: dict[str, Any], device: str, claimed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_model(tmp_path / "model", byte_level_tokenizer(), max_position_embeddings=4096))
    pool, recipe = ModelPool(), Recipe(target=folder, drafter=folder, device="cpu", temperature=0.0, **changed)
    loaded = pool.get(plan_run(recipe).target)
    loaded.__dict__["_invariance"] = BatchInvariance(True, 1, 10, {1: 1.0})
    monkeypatch.setattr(batch_invariance, "STARTS", {"cpu": (50, 600, 2000) if device == "cuda" else ()})
    header = next(event for event in generate(recipe, "abcd", pool) if isinstance(event, Header))
    assert header.bit_equal == claimed
