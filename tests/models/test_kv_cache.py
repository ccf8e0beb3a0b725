"""Batch invariance check: detects dependent rows, finds sufficient padding, and its positive results are correct."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from fakes.tiny_models import CONTEXT, tiny_model
from torch import Tensor

from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.models import kv_cache as invariance
from specdemo.models.engines.llama import LlamaEngine
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.worker import Worker

pytestmark = pytest.mark.slow

GREEDY, NOISE = SamplingParams(temperature=0), Noise(0, "unused when greedy")


def disturbed(monkeypatch: pytest.MonkeyPatch, noise: Callable[[int], float]) -> None:
    """Make logits depend on the number of rows of the pass."""
    original = LlamaEngine.run

    def run(self: LlamaEngine, new: list[int], held: int, draft: Draft) -> Tensor:
        return original(self, new, held, draft) + noise(len(new))

    monkeypatch.setattr(LlamaEngine, "run", run)
    monkeypatch.setattr(invariance, "_starts", lambda model: (50,))  # as on a GPU


def test_dependence_on_the_number_of_rows_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed(monkeypatch, lambda rows: 1e-4 * rows)
    monkeypatch.setattr(invariance, "NO_COST", 0.0)
    found = invariance.check_invariance(LlamaWeights(tiny_model("llama")))
    assert not found.equal and found.pad == 1 and found.compared > 0


def test_padding_gives_equal_rows_if_free(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed(monkeypatch, lambda rows: 1e-4 * rows)
    monkeypatch.setattr(invariance, "NO_COST", 1e9)
    model = LlamaWeights(tiny_model("llama"))
    found = invariance.check_invariance(model)
    assert found.equal and found.pad == max(invariance.MEASURED_ROWS)


def test_broken_padding_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding, logits depend on the number of rows: the check must fail."""
    disturbed(monkeypatch, lambda rows: 1e-4 * rows)
    monkeypatch.setattr(invariance, "NO_COST", 1e9)
    monkeypatch.setattr(CachedModel, "_padded", lambda self, draft, held, length: draft)
    assert not invariance.check_invariance(LlamaWeights(tiny_model("llama"))).equal


def test_torch_on_a_cpu_claims_no_equal_bits() -> None:
    """Rows had equal bits at the compared numbers of keys, but not at others."""
    found = invariance.check_invariance(LlamaWeights(tiny_model("llama")))
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
        invariance.check_invariance(model)
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


def test_cost_of_a_pass() -> None:
    cost = invariance.check_invariance(LlamaWeights(tiny_model("llama"))).cost
    assert list(cost) == list(invariance.MEASURED_ROWS) and cost[1] == 1.0 and all(value > 0 for value in cost.values())
