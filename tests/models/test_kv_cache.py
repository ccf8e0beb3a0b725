"""Batch invariance check: detects dependent rows, finds sufficient padding, and its positive results are correct."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from fakes.tiny_models import CONTEXT, blurred, committed, run, tiny_model
from torch import Tensor

from specdemo.core.decode import EmptyDrafter
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.model import ModelDrafter
from specdemo.models import kv_cache as invariance
from specdemo.models.engines.llama import LAST_BLOCK_KEYS, LlamaEngine, padded_keys
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.worker import Worker

GREEDY, NOISE = SamplingParams(temperature=0), Noise(0, "unused when greedy")


def disturbed(monkeypatch: pytest.MonkeyPatch, noise: Callable[[int], float]) -> None:
    """Make logits depend on the number of rows of the pass."""
    original = LlamaEngine.run

    def run(self: LlamaEngine, new: list[int], held: int, draft: Draft) -> Tensor:
        return original(self, new, held, draft) + noise(len(new))

    monkeypatch.setattr(LlamaEngine, "run", run)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positive_results_are_correct(dtype: torch.dtype) -> None:
    """For a positive result, speculative greedy text equals AR greedy text for every gamma."""
    model, small = (
        LlamaWeights(tiny_model("llama").to(dtype)),
        LlamaWeights(blurred(tiny_model("llama"), "llama").to(dtype)),
    )
    if not (found := invariance.check_invariance(model)).equal:
        pytest.skip("this machine's kernels give rows other bits in other company")
    assert found.pad == 1 and found.compared >= 24
    rng = random.Random(5)
    accepted = 0
    for _ in range(5):
        prompt = [rng.randrange(61) for _ in range(rng.randrange(1, 20))]
        length = CONTEXT - len(prompt)

        def text(drafter: object, gamma: int, prompt: list[int] = prompt, length: int = length) -> list[int]:
            nonlocal accepted
            verifier = ModelVerifier(CachedModel(model).score, GREEDY, rejection, NOISE, NOISE)
            steps = run(prompt, verifier, drafter, Fixed(gamma), length)  # type: ignore[arg-type]
            accepted += sum(len(step.verdict.accepted) for step in steps)
            return committed(steps)

        plain = text(EmptyDrafter(), 1)
        for gamma in (1, 3, 5, 7):
            assert text(ModelDrafter(CachedModel(small).score, GREEDY, NOISE, 61), gamma) == plain
    assert accepted > 0


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


def test_attention_is_given_full_vectors_of_keys() -> None:
    for count in range(1, 2000):
        assert count <= padded_keys(count) < count + 192
        assert padded_keys(count) % 512 in {part % 512 for part in LAST_BLOCK_KEYS}
