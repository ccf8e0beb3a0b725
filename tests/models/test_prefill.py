"""Prefill in chunks, and passes that are ended: equality with a single pass, turns of other jobs, signals, Stop, time
limits, progress.
"""

import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from fakes.tiny_models import LLAMA, from_config, tiny_model
from torch import Tensor
from transformers import LlamaConfig

from specdemo.core.events import Event, Header, Loading, StepEvent
from specdemo.core.step import Draft
from specdemo.generate import generate
from specdemo.models import kv_cache
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native import NativeEngine
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.kv_cache import CHUNK_S, MOST_ROWS, CachedModel, ChunkSize
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.worker import Stopped, Worker

PATIENCE = 60.0
TEXT = [1 + (7 * i) % 59 for i in range(60)]
PROMPT = "def fibonacci(n):\n    " + "x = 1\n    " * 12
ENGINES: dict[str, Callable[[], Any]] = {
    "native": lambda: NativeWeights(tiny_model("llama")),
    "torch": lambda: LlamaWeights(tiny_model("llama")),
    "transformers": lambda: tiny_model("gpt2"),
}


@pytest.mark.parametrize("row_s", [1e-6, 1e-3, 0.02, 0.3, 0.7])
def test_chunks_take_at_most_a_second(row_s: float) -> None:
    """On a device of any speed; passes become up to three times as slow after the first chunk."""
    rng = random.Random(1)
    size, durations = ChunkSize(64), []
    for i in range(200):
        seconds = size.rows * row_s * (1 + i / 100) * rng.uniform(0.9, 1.1)
        durations.append((size.rows, seconds))
        size.observe(seconds)
    assert all(seconds <= 2 * CHUNK_S or rows == 1 for rows, seconds in durations[1:])
    assert row_s * 10 > CHUNK_S or durations[-1][1] > CHUNK_S / 8 or durations[-1][0] == MOST_ROWS


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "first_rows", lambda *_: 4)
    monkeypatch.setattr(kv_cache, "MOST_ROWS", 4)
    monkeypatch.setattr(kv_cache, "CHUNK_S", math.inf)  # of a loaded machine


def one_pass(model: Any, text: list[int]) -> Tensor:
    """Return the logits after `text`, computed token by token by another cache."""
    with closing(CachedModel(model)) as cached:
        for end in range(1, len(text) + 1):
            logits = cached.score(text[:end], Draft())
        return logits


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupted_prefill_leaves_a_usable_cache(engine: str, short_chunks: None) -> None:
    model = ENGINES[engine]()
    expected = one_pass(model, TEXT)
    for chunks in (0, 1, 5, 14):
        with closing(CachedModel(model)) as cached:
            positions = cached.prefill(TEXT)
            assert [next(positions) for _ in range(chunks)] == [4 * (i + 1) for i in range(chunks)]
            positions.close()
            if chunks == 5:  # the text of another request
                cached.score([*TEXT[:7], 3, 4], Draft())
            rest = [56, *cached.prefill(TEXT)]
            assert len(TEXT) - 4 <= rest[-1] < len(TEXT)
            logits = cached.score(TEXT, Draft())
            assert torch.equal(logits, expected) if engine == "native" else torch.allclose(logits, expected, atol=1e-3)


def test_a_stopped_chunk_leaves_the_chunks_before_it(short_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ENGINES["native"]()
    cached, expected = CachedModel(model), one_pass(model, TEXT)
    engine = type(cached.engine)
    run, passes = engine.run, []

    def stopped(self: Any, entries: Any) -> Any:
        passes.append(len(entries[0].new))
        if len(passes) == 3:
            raise Stopped
        return run(self, entries)

    monkeypatch.setattr(engine, "run", stopped)
    with pytest.raises(Stopped):
        list(cached.prefill(TEXT))
    assert passes == [4, 4, 4]
    assert torch.equal(cached.score(TEXT, Draft()), expected)
    assert sum(passes[3:]) == len(TEXT) - 8
    cached.close()


# --- runs ----------------------------------------------------------------------------------------------------------

POOL = ModelPool()


def events(prompt: str = PROMPT, **options: Any) -> Iterator[Event]:
    return generate(Recipe(**{"pair": "bundled", "device": "cpu", "max_tokens": 8, **options}), prompt, POOL)


def prefills(run: list[Event]) -> list[Loading]:
    return [event for event in run if isinstance(event, Loading) and event.total]


@pytest.mark.slow
def test_target_and_drafter_read_a_prompt_in_chunks(short_chunks: None) -> None:
    chunked = list(events(method="draft", temperature=0.0))
    begun = next(i for i, event in enumerate(chunked) if isinstance(event, Header))
    chunked = chunked[begun:]
    first = next(i for i, event in enumerate(chunked) if isinstance(event, StepEvent))
    before, after = prefills(chunked[:first]), prefills(chunked[first:])
    length = len(chunked[0].prompt_tokens)
    for progress, text in ((before, "prompt"), (after, "drafter: prompt")):
        assert {event.text for event in progress} == {text} and {event.total for event in progress} == {length}
        assert [event.done for event in progress] == list(range(4, length, 4))
    assert isinstance(chunked[first + 1], Loading) and isinstance(chunked[-2], StepEvent)
    assert chunked[first + 1 + len(after)].step.draft_s > 0
    short = list(events(method="draft", temperature=0.0, prompt="def f"))
    assert not prefills(short)


# --- passes that are ended ---


def test_stop_ends_a_pass_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over a prompt through 1,000 layers takes many seconds."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "max_position_embeddings": 512}
    layer = from_config(LlamaConfig(**{**LLAMA, **sizes})).eval().requires_grad_(False)
    model = CachedModel(NativeWeights(layer).with_layers([0] * 1000))
    began, worker = threading.Event(), Worker()
    call = NativeEngine._call

    def announced(self: NativeEngine, *arguments: Any) -> list[Tensor]:
        began.set()
        return call(self, *arguments)

    monkeypatch.setattr(NativeEngine, "_call", announced)
    text = [i % 50 for i in range(250)]

    def job() -> Iterator[str]:
        model.score(text, Draft())
        yield "complete"

    stream = worker.submit(job)
    assert began.wait(PATIENCE)
    stream.stop()
    assert stream.wait(PATIENCE) and stream.items == [] and stream.error is None
    worker.close()
    assert model.kv_bytes == 0
    assert torch.equal(model.score(text[:3], Draft()), CachedModel(model.model).score(text[:3], Draft()))
