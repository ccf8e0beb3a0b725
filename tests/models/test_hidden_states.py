"""Hidden states in caches of all engines equal `transformers`; attention masks are aligned for CUDA."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fakes.native_models import CONFIGS, FAMILIES, VOCAB, Passes, random_model, text
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.core.sampling import ChainSampler, Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.models.engines import llama
from specdemo.models.engines.llama import PROMPT_CHUNK
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native import NATIVE_CHUNK
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.select import engine_of
from specdemo.models.kv_cache import CachedModel

pytestmark = pytest.mark.slow
ENGINES: dict[str, Callable[[Any], Any]] = {
    "native": NativeWeights,
    "torch": LlamaWeights,
    "transformers": lambda model: model,
}
TAPS = (2, 0, 1)


def opened(engine: str) -> CachedModel:
    return CachedModel(ENGINES[engine](random_model(CONFIGS["llama"])), taps=TAPS)


@cache
def oracle() -> Any:
    return random_model(CONFIGS["llama"])


def expected(tokens: Sequence[int]) -> Tensor:
    """Return the hidden states of `transformers` `[tokens, taps, width]`."""
    states = oracle().base_model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.stack([states[tap][0] for tap in TAPS], 1)


def check(cached: CachedModel, tokens: Sequence[int], start: int = 0) -> None:
    """Compare states with `transformers`, without a pass."""
    with patch.object(cached.engine, "run", side_effect=AssertionError("an extra pass")):
        states = cached.states(tokens, start)
    assert states is not None
    torch.testing.assert_close(states, expected(tokens)[start:], rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_states_of_a_text_follow_verification(engine: str) -> None:
    """After chains and trees, rejected, accepted in part or entirely, after further turns and after rollback.

    Accepted nodes count before the next pass, and logits remain known: the same call of `score` runs no pass.
    """
    cached, rng = opened(engine), random.Random(0)
    tokens = text(9)
    for turn in range(28):
        nodes = rng.randrange(6)
        chain = range(-1, nodes - 1)
        parents = tuple(chain if turn % 2 else [rng.randrange(-1, node) for node in range(nodes)])
        draft = Draft(tuple(rng.randrange(VOCAB) for _ in parents), parents)
        assert cached.states([*tokens, 1], 0) is None
        logits = cached.score(tokens, draft)
        path = draft.path(rng.randrange(-1, nodes))
        accepted = [*tokens, *(draft.tokens[node] for node in path)]
        check(cached, accepted, rng.randrange(len(accepted) + 1))
        check(cached, tokens[: rng.randrange(len(tokens)) + 1])
        assert cached.states([*accepted, VOCAB], 0) is None
        assert cached.states([VOCAB, *accepted[1:]], 1) is None
        with patch.object(cached.engine, "run", side_effect=AssertionError("an extra pass")):
            assert torch.equal(cached.score(tokens, draft), logits)
        removed = rng.randrange(1, 8) if turn % 9 == 8 else 0
        added = [rng.randrange(VOCAB) for _ in range(12 if turn % 9 == 4 else 1)]
        tokens = [*accepted[: len(accepted) - removed], *added]


@pytest.mark.parametrize("engine", ENGINES)
def test_states_of_prompts_and_generated_tokens(engine: str) -> None:
    """A prompt of several chunks; `extend` stores the states of all its tokens but the last, which no pass has read."""
    cached, tokens = opened(engine), text(PROMPT_CHUNK + NATIVE_CHUNK + 5)
    cached.score(tokens, Draft.chain((1, 2)))
    check(cached, [*tokens, 1])
    tokens = text(5)
    sampler = ChainSampler(SamplingParams(0.0), Noise(0, "draft"), len(tokens), VOCAB)
    for pick in (sampler, lambda logits, i: logits.argmax(-1)):
        cached = opened(engine)
        chain = cached.extend(tokens, 4, pick)
        check(cached, [*tokens, *chain[:-1]])
        assert cached.states([*tokens, *chain], 0) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_closed_and_failed_passes_leave_no_states(engine: str) -> None:
    cached = opened(engine)
    assert cached.states(text(1), 0) is None
    cached.score(text(5), Draft())
    with pytest.raises(UserError, match="vocabulary"):
        cached.score([*text(5), VOCAB], Draft())
    assert cached.states(text(1), 0) is None
    cached.score(text(5), Draft())
    stored = cached._cache.states
    assert stored.any()
    cached.close()
    assert cached.states(text(1), 0) is None and not stored.any()


@pytest.mark.parametrize("name", ["qwen3", *FAMILIES])
def test_taps_equal_the_hidden_states_of_transformers(name: str) -> None:
    oracle, tokens = random_model(CONFIGS[name]), text(9)
    states = oracle.base_model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    taps = tuple(range(len(states)))
    passes = Passes(engine_of(NativeWeights(oracle)), taps)
    passes.run(tokens[:4], 0, Draft())  # only the last row has logits
    passes.run(tokens[4:], 4, Draft.chain(tuple(tokens[6:])))
    for tap in taps:
        expected = states[tap][0]
        assert (passes.cache.states[:9, tap] - expected).abs().max() <= 2e-5 * expected.abs().max(), tap


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_that_grows_overwrites_its_former_memory(engine: str) -> None:
    cached = opened(engine)
    cached.read(text(30))
    former = memory_of(cached)
    assert all(tensor.any() for tensor in former)
    cached.read(text(300))
    assert not any(tensor.any() for tensor in former) and all(tensor.any() for tensor in memory_of(cached))


def memory_of(cached: CachedModel) -> list[Tensor]:
    cache: Any = cached._cache
    layers = getattr(cache, "_layers", None)
    return [cache.kv, cache.states] if layers is None else [x for layer in layers for x in layer.buffers if x.numel()]


def test_masks_are_aligned_for_all_row_counts_lengths_and_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA requires 16 bytes: `CHECK_ALIGNED_PTR(attn_bias_ptr)`."""
    masks: list[Tensor] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def recorded(*states: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        masks.append(attn_mask)
        return attention(*states, attn_mask=attn_mask, **options)

    monkeypatch.setattr(llama.F, "scaled_dot_product_attention", recorded)
    cached = CachedModel(LlamaWeights(random_model(CONFIGS["llama"], "bfloat16")))
    for length in (*range(3, 13), 511, 514, 1033):
        for rows in (1, 2, 3, 8, 17):
            cached.score([1] * length, Draft())
            cached.score([1] * (length + 1), Draft.chain((2,) * (rows - 1)))
        cached.score([1] * (length + 2), Draft((3, 4, 5), (-1, -1, 0)))
    assert len(masks) > 100
    for mask in masks:
        assert mask.data_ptr() % 16 == 0 and mask.stride(0) * mask.element_size() % 16 == 0
