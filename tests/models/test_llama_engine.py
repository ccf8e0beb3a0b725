"""Llama engine: the same logits as transformers for every supported variant; other models are rejected."""

import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fakes.tiny_models import CONTEXT, LLAMA, byte_level_tokenizer, save_model
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from specdemo.core.step import Draft
from specdemo.models.engines import llama_weights as lean
from specdemo.models.engines.engine import FusedWeights
from specdemo.models.engines.llama import PROMPT_CHUNK
from specdemo.models.engines.llama_weights import LlamaWeights, PackedLinear, can_pack, pack, unsupported_reason
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load, load_with_transformers
from specdemo.models.memory import is_mapped
from specdemo.models.spec import ModelSpec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VOCAB = 61


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, PretrainedConfig] = {
    "grouped": LlamaConfig(**LLAMA),
    "one key head": LlamaConfig(**{**LLAMA, "num_key_value_heads": 1}),
    "as many key heads": LlamaConfig(**{**LLAMA, "num_key_value_heads": 4}),
    "tied": LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "biases everywhere": LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "wide heads": LlamaConfig(**LLAMA, head_dim=16),
    "linear rope": LlamaConfig(**LLAMA, **rope("linear", factor=4.0)),
    "llama3 rope": LlamaConfig(**LLAMA, **rope("llama3", factor=8.0, **LLAMA3)),
    "yarn rope": LlamaConfig(**LLAMA, **rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "mistral": MistralConfig(**LLAMA, sliding_window=None),
    "qwen2": Qwen2Config(**LLAMA),
    "qwen3": Qwen3Config(**LLAMA, head_dim=8),
    "qwen3 tied": Qwen3Config(**LLAMA, head_dim=16, tie_word_embeddings=True),
}


def random_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Randomise every parameter, including gains and biases, so that each affects the logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if parameter.ndim == 1 else 0.08 * 4)
    model.tie_weights()
    return model.to(dtype)


def rounds(seed: int, most: int = 7) -> list[tuple[list[int], Draft]]:
    """Return a growing text with chains and forests, partly accepted, and a final rollback."""
    rng = random.Random(seed)
    tokens, script = [rng.randrange(VOCAB) for _ in range(9)], []
    while len(tokens) < CONTEXT - most - 1:
        size = rng.randrange(most + 1)
        chain = rng.random() < 0.5
        parents = tuple(i - 1 if chain else rng.randrange(-1, i) for i in range(size))
        draft = Draft(tuple(rng.randrange(VOCAB) for _ in range(size)), parents)
        script.append((tokens, draft))
        kept = draft.path(rng.randrange(-1, size))
        tokens = [*tokens, *(draft.tokens[node] for node in kept), rng.randrange(VOCAB)]
    return [*script, (tokens[:20], Draft.chain((1, 2))), (tokens[:5] + [3], Draft())]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name: str) -> None:
    model = random_model(VARIANTS[name])
    assert unsupported_reason(model) is None
    theirs, ours = CachedModel(model), CachedModel(LlamaWeights(model))
    for tokens, draft in rounds(3):
        expected, found = theirs.score(tokens, draft), ours.score(tokens, draft)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert ours.kv_bytes == theirs.kv_bytes > 0


@pytest.mark.parametrize("convert", [LlamaWeights, NativeWeights])
def test_a_closed_cache_serves_the_next_text_but_never_two_at_once(convert: type[FusedWeights]) -> None:
    lean = convert(random_model(VARIANTS["grouped"]))
    first, second = CachedModel(lean), CachedModel(lean)
    assert first._cache is not second._cache
    cache = first._cache
    expected = first.score([1, 2, 3], Draft())
    assert cache.kv.any()
    first.close()
    assert cache.kv_bytes == 0 and not cache.kv.any()
    third = CachedModel(lean)
    assert third._cache is cache and third.kv_bytes == 0
    assert torch.equal(third.score([1, 2, 3], Draft()), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_rounding_equals_transformers(name: str) -> None:
    """Logits are equal to the last bit if both attention shapes are equal: a full block of keys."""
    model = random_model(VARIANTS[name], torch.bfloat16)
    rng = random.Random(2)
    tokens = [rng.randrange(VOCAB) for _ in range(CONTEXT)]
    expected = model(torch.tensor([tokens])).logits[0]
    assert torch.equal(CachedModel(LlamaWeights(model)).score(tokens[:1], Draft.chain(tuple(tokens[1:]))), expected)


def test_long_prompts_are_fed_in_pieces() -> None:
    """Masks have at most a chunk of rows, and the logits equal those of a single pass."""
    model = random_model(LlamaConfig(**{**LLAMA, "max_position_embeddings": 2048}))
    tokens = [i * i % VOCAB for i in range(2 * PROMPT_CHUNK + 37)]
    for draft in (Draft(), Draft((1, 2, 3), (-1, -1, 0))):
        lean = LlamaWeights(model)
        ours = CachedModel(lean)
        mask = Mock(wraps=ours.engine._mask)
        ours.engine._mask = mask
        expected = CachedModel(model).score(tokens, draft)
        assert (ours.score(tokens, draft) - expected).abs().max() <= 1e-5 * expected.abs().max()
        rows = [len(call.args[0]) for call in mask.call_args_list]
        assert len(rows) == 3 and max(rows) <= PROMPT_CHUNK + len(draft)


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(**LLAMA, sliding_window=8), "sliding window"),
        (LlamaConfig(**LLAMA, hidden_act="gelu"), "gelu"),
        (LlamaConfig(**LLAMA, **rope("dynamic", factor=2.0)), "dynamic"),
        (OPTConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2), "OPTForCausalLM"),
    ],
)
def test_unsupported_architectures_use_transformers_with_a_note(
    config: PretrainedConfig, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        LlamaWeights(random_model(config))
    tokenizer = byte_level_tokenizer()
    config.vocab_size = len(tokenizer)
    model = random_model(config)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load(ModelSpec(str(tmp_path), device="cpu"))
    assert loaded.engine.startswith("transformers: ") and words in loaded.engine
    expected = model(torch.tensor([[1, 2, 3]])).logits[0, -1]
    assert torch.allclose(CachedModel(loaded.model).score([1, 2, 3], Draft())[0], expected, rtol=1e-4, atol=1e-4)


def allocated(step: Callable[[], object]) -> int:
    """Return the bytes requested by all operations of a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    return sum(max(0, event.self_cpu_memory_usage) for event in seen.events())


def test_a_step_allocates_the_same_at_every_length() -> None:
    """No operation copies in proportion to the context after the first attention block."""
    model = random_model(LlamaConfig(**{**LLAMA, "max_position_embeddings": 2048}))
    text = [i % VOCAB for i in range(2000)]
    grown = {}
    for name, cached in (("lean", CachedModel(LlamaWeights(model))), ("transformers", CachedModel(model))):
        for draft in (Draft(), Draft.chain((1, 2, 3, 4))):
            sizes = []
            for length in (2000, 1000, 600):  # longest first: allocates its capacity before counting
                step = partial(cached.score, text[:length], draft)
                for _ in range(2):  # once to warm up
                    cached.score(text[: length - 1], Draft())  # leaves the last token to be fed
                    size = allocated(step)
                sizes.append(size)
            assert min(sizes) > 0
            grown[name, len(draft)] = max(sizes) / min(sizes)
    assert grown["lean", 0] < 1.05 and grown["lean", 4] < 1.05, grown
    assert grown["transformers", 4] > 1.5  # the measure detects masks that are rebuilt in each step


@pytest.fixture
def without_collections() -> Iterator[None]:
    """Disable garbage collection: memory must not reach twice the model's size."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(not can_pack(torch.ones(1)), reason="oneDNN is unavailable")
def test_matrices_are_freed_while_packing(without_collections: None, monkeypatch: pytest.MonkeyPatch) -> None:
    there = []

    class Counted(PackedLinear):
        def __init__(self, *args: Any) -> None:
            there.append(sum(one() is not None for one in matrices))
            super().__init__(*args)

    monkeypatch.setattr(lean, "PackedLinear", Counted)
    model = random_model(LlamaConfig(**{**LLAMA, "tie_word_embeddings": False}))
    matrices = [weakref.ref(module.weight) for module in model.modules() if type(module) is torch.nn.Linear]
    pack(model)
    assert not any(one() for one in matrices)
    assert len(there) > 5 and there == sorted(there, reverse=True) and there[-1] <= 1


def test_matrices_are_freed_while_joined(without_collections: None) -> None:
    model = random_model(LlamaConfig(**{**LLAMA, "tie_word_embeddings": False}))
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    joined = [weakref.ref(module.weight) for name, module in model.named_modules() if name.endswith(names)]
    weights = LlamaWeights(model, consume=True)
    assert len(weights.layers) * len(names) == len(joined) and not any(one() for one in joined)


def test_embeddings_are_copied_out_of_a_file_but_not_out_of_memory(tmp_path: Path) -> None:
    folder = save_model(tmp_path, byte_level_tokenizer())
    for dtype in ("float32", "bfloat16"):  # the file's dtype and a different dtype
        model, _ = load_with_transformers(ModelSpec(str(folder), dtype=dtype, device="cpu"))
        weight = model.model.embed_tokens.weight
        assert is_mapped(weight) == (dtype == "float32")
        kept = LlamaWeights(model).embedding
        assert not is_mapped(kept) and torch.equal(kept, weight)
        assert (kept.data_ptr() == weight.data_ptr()) == (dtype != "float32")


ROW_COUNTS = """
import multiprocessing, os, specdemo, torch
from specdemo.models.memory import release_memory, process_bytes
from specdemo.models.engines.llama_weights import PackedLinear

def growth(results, **environment):
    os.environ.update(environment)
    specdemo.set_environment_defaults()
    layer, sizes = PackedLinear(torch.randn(256, 256), None), []
    for n in range(1, 201):
        layer(torch.randn(n, 256))
        if n in (100, 200):
            release_memory()
            sizes.append(process_bytes())
    results.put(sizes[1] - sizes[0])

context = multiprocessing.get_context("fork")  # the variables apply to the first product
for capacity in ({}, {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}):
    results = context.Queue()
    context.Process(target=growth, args=(results,), kwargs=capacity).start()
    print(results.get())
"""


@pytest.mark.skipif(not can_pack(torch.ones(1)), reason="oneDNN is unavailable")
def test_prompts_of_all_lengths_leave_memory_bounded() -> None:
    """The cache of oneDNN kernels for each number of rows is bounded."""
    environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    command = [sys.executable, "-c", ROW_COUNTS]
    output = subprocess.check_output(command, env=environment, cwd=ROOT, text=True, timeout=120)
    bounded, unbounded = map(int, output.split())
    assert 2 * bounded < unbounded
