"""Beam search: the same text as transformers, computed from forests of a single text instead of a batch."""

import random
from functools import cache
from typing import Any

import pytest
import torch
from fakes.tiny_models import committed, run, tiny_model
from transformers import LogitsProcessorList, PreTrainedModel, TopKLogitsWarper

from specdemo.core.decode import EmptyDrafter
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.policies import Fixed
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Step
from specdemo.core.step_record import step_of
from specdemo.core.trace import to_json
from specdemo.core.verifier import BeamSearch
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel

pytestmark = pytest.mark.slow

VOCAB, STOP = 61, (7, 19)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"num_beams": 4},
    "long": {"num_beams": 3, "length_penalty": 2.0, "min_length": 6},
    "short": {"num_beams": 2, "length_penalty": -0.5, "top_k": 3},
    "penalised": {"num_beams": 5, "length_penalty": 0.0, "repetition_penalty": 1.3},
}


def searched(model: Any, prompt: list[int], length: int, settings: dict[str, Any]) -> list[Step]:
    """Steps of the beam search under test."""
    settings = dict(settings)
    sampling = SamplingParams(repetition_penalty=settings.pop("repetition_penalty", 1.0))
    cached = CachedModel(model)
    search = BeamSearch(cached.score, sampling, STOP, max_tokens=length, context=cached.context, **settings)
    return run(prompt, search, EmptyDrafter(), Fixed(1), length, stop=STOP)


@cache
def prompts(kind: str, settings: str) -> list[tuple[list[int], int, list[int]]]:
    """Prompts, lengths and texts of transformers, computed once for both engines."""
    model, rng = tiny_model(kind), random.Random(settings)
    drawn = [([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))], rng.randrange(8, 24)) for _ in range(8)]
    return [(prompt, length, found(model, prompt, length, SETTINGS[settings])) for prompt, length in drawn]


def found(model: PreTrainedModel, prompt: list[int], length: int, settings: dict[str, Any]) -> list[int]:
    """Oracle: beam search of transformers."""
    ids = torch.tensor([prompt])
    top_k = settings.get("top_k")
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=length,
        min_new_tokens=settings.get("min_length"),
        num_beams=settings["num_beams"],
        length_penalty=settings.get("length_penalty", 1.0),
        repetition_penalty=settings.get("repetition_penalty"),
        logits_processor=LogitsProcessorList([TopKLogitsWarper(top_k)] if top_k else []),
        eos_token_id=list(STOP),
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    ends = [i for i, token in enumerate(out) if token in STOP]
    return out[: ends[0] + 1] if ends else out


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["llama lean", "gpt2"])
def test_results_equal_those_of_transformers(kind: str, settings: str) -> None:
    kind, _, lean = kind.partition(" ")
    model = tiny_model(kind)
    ours = LlamaWeights(model) if lean else model
    stopped = early = waited = 0
    for prompt, length, expected in prompts(kind, settings):
        steps = searched(ours, prompt, length, SETTINGS[settings])
        assert committed(steps) == expected, (prompt, length)
        stopped += committed(steps)[-1] in STOP
        early += len(committed(steps)) < length
        waited += any(not step.tokens for step in steps)
    assert waited
    if kind == "llama" and settings != "long":  # the others seldom end a text
        assert stopped and early


def test_committed_tokens_are_final() -> None:
    """The best beam may change, but the committed text only grows."""
    model = tiny_model("llama")
    changed = 0
    for seed in range(10):
        whole: list[int] = []
        before: tuple[int, ...] = ()
        steps = searched(model, [seed, 5], 16, {"num_beams": 4})
        for step in steps:
            shown = (*whole, *step.tokens, *step.verdict.pending)
            changed += shown[: len(before)] != before
            whole += step.tokens
            before = shown
            assert step.searched and step.kind == "plain" and not len(step.draft)
            assert step_of(to_json(StepEvent(step, tuple(map(str, step.tokens))))) == step
    assert changed


def test_beams_are_rejected_for_sliding_windows() -> None:
    with pytest.raises(UserError, match="sliding window"):
        searched(tiny_model("mistral-sliding"), [1, 2, 3], 8, {"num_beams": 3})
