"""Native engine: identical bits for any number of rows and threads; logits of transformers; values of bitsandbytes."""

import os
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from fakes.native_models import (
    CONFIGS,
    CONTEXT,
    DTYPES,
    FAMILIES,
    MIXED,
    NARROW,
    QUANTIZED,
    SMALL,
    VOCAB,
    Passes,
    config_of,
    dequantized,
    quantized,
    random_model,
    stored,
    text,
    weights,
)
from torch import Tensor, nn
from transformers import LlamaConfig

from specdemo.core.errors import UserError
from specdemo.core.sampling import ChainSampler, Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.models.engines.engine import FIRST_CAPACITY, Entry, FusedWeights, torch_threads
from specdemo.models.engines.llama_weights import LlamaWeights, with_dropout, with_layers
from specdemo.models.engines.native import CHAIN_ROWS, NATIVE_CHUNK
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.select import engine_of
from specdemo.models.kv_cache import CachedModel
from specdemo.native.interface import QUANTISED_GGUF

FORMS = [
    *((name, "float32") for name in CONFIGS),
    *((name, dtype) for name in ("odd widths", "tied", "gpt neox odd") for dtype in ("bfloat16", "float16")),
    *((name, "bfloat16") for name in ("gpt2 odd", "gemma2 odd")),
    *(("llama", form) for form in QUANTIZED),
    *((name, form) for name in FAMILIES for form in ("int8", "nf4")),
    ("odd widths", "int8"),
    *((name, form) for name in ("llama", "tied") for form in QUANTISED_GGUF),
    ("llama", MIXED),
    *(("llama", form) for form in NARROW),
]
SAMPLED = ("float32", "bfloat16", "int8", "nf4", "Q4_K")  # a form of each kind


def marked(cases: Iterable[tuple[str, ...]]) -> list[Any]:
    """Mark cases whose last value is another form; test_native_passes.py draws from all forms and thread numbers."""
    return [pytest.param(*case, marks=() if case[-1] in SAMPLED else pytest.mark.exhaustive) for case in cases]


def single_rows(model: NativeWeights, tokens: list[int], start: int) -> Tensor:
    """Return the logits after tokens[start:], fed in turn on a single thread."""
    with torch_threads(1):
        engine = Passes(engine_of(model))
    if start:
        engine.run(tokens[:start], 0, Draft())
    return torch.cat([engine.run([token], start + i, Draft()) for i, token in enumerate(tokens[start:])])


def error(model: FusedWeights, oracle: Any, tokens: list[int]) -> float:
    """Return the largest difference from the logits of a `transformers` model, relative to the largest logit."""
    expected = oracle(torch.tensor([tokens])).logits[0]
    return ((CachedModel(model).read(tokens) - expected).abs().max() / expected.abs().max()).item()


def error_of_floats(model: Any, tokens: list[int]) -> float:
    """Return the error of a quantised model whose keys and values are not rounded."""
    native = NativeWeights(model)
    native.kv_dtype = torch.float32
    return error(native, dequantized(model), tokens)


@pytest.fixture
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("name", "form"), marked(FORMS))
def test_rows_of_chains_have_the_bits_of_single_rows(name: str, form: str) -> None:
    model = weights(name, form)
    counts = {0: (2, 7), 3: (*range(2, CHAIN_ROWS + 1), CHAIN_ROWS + 3), 250: (2, 7, CHAIN_ROWS, CHAIN_ROWS + 3)}
    for start in counts:  # the cache grows at 256
        tokens = text(start + CHAIN_ROWS + 3, seed=start)
        expected = single_rows(model, tokens, start)
        engine = Passes(engine_of(model))
        if start:
            engine.run(tokens[:start], 0, Draft())
        for rows in counts[start]:
            engine.keep(start, [])
            chain = tokens[start : start + rows]
            assert torch.equal(engine.run(chain, start, Draft.chain(tuple(chain[1:]))), expected[:rows]), (start, rows)


@pytest.mark.slow
@pytest.mark.parametrize("form", marked((form,) for form in (*DTYPES, *QUANTIZED, *QUANTISED_GGUF, *NARROW)))
def test_long_contexts_and_prompt_chunks_keep_the_bits(form: str) -> None:
    model, tokens = weights("llama", form), text(2050)
    expected = single_rows(model, tokens, 2040)
    for start in (2040, 1900, 5):
        engine = Passes(engine_of(model))
        engine.run(tokens[:start], 0, Draft())
        assert 2040 - start < NATIVE_CHUNK or start == 5
        assert torch.equal(engine.run(tokens[start:2041], start, Draft())[-1], expected[0])
    rows = engine.run(tokens[2041:], 2041, Draft.chain(tuple(tokens[2042:])))
    assert torch.equal(rows, expected[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("name", "form"), marked(FORMS))
def test_nodes_of_forests_have_the_bits_of_single_rows(name: str, form: str) -> None:
    model, rng = weights(name, form), random.Random(name + form)
    for start in (1, 40):
        tokens, count = text(start, seed=2), rng.randrange(6, 14)
        draft = Draft(tuple(text(count, rng.random())), tuple(rng.randrange(-1, i) for i in range(count)))
        engine = Passes(engine_of(model))
        if start > 1:
            engine.run(tokens[:-1], 0, Draft())
        rows = engine.run([tokens[-1], *draft.tokens], start - 1, draft)
        for node in range(-1, count):
            path = draft.path(node) if node >= 0 else ()
            branch = tokens + [draft.tokens[i] for i in path]
            assert torch.equal(rows[node + 1], single_rows(model, branch, len(branch) - 1)[0]), (draft, node)
        kept = draft.path(count - 1)
        engine.keep(start, [start + node for node in kept])
        branch = [*tokens, *(draft.tokens[i] for i in kept), 7]
        after = engine.run([7], start + len(kept), Draft())
        assert torch.equal(after[0], single_rows(model, branch, len(branch) - 1)[0])


def test_forests_may_have_more_rows_than_positions_are_left() -> None:
    model, tokens = weights("gpt2", "float32"), text(CONTEXT - 2)
    draft = Draft((1, 2, 3, 4), (-1, -1, 0, 1))
    engine = Passes(engine_of(model))
    engine.run(tokens[:-1], 0, Draft())
    rows = engine.run([tokens[-1], *draft.tokens], len(tokens) - 1, draft)
    for node in range(-1, len(draft)):
        branch = [*tokens, *(draft.tokens[i] for i in draft.path(node))]
        assert torch.equal(rows[node + 1], single_rows(model, branch, len(branch) - 1)[0])
    with pytest.raises(ValueError, match="the model has 2100 positions"):
        engine.run([tokens[-1], *draft.tokens], len(tokens) - 1, Draft(draft.tokens, (-1, -1, 0, 2)))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    oracle = random_model(CONFIGS[name])
    assert error(NativeWeights(oracle), oracle, text(300)) <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_errors_are_below_those_of_transformers(name: str, dtype: str) -> None:
    """Compare both with the same weights in float32: activations stay in float32."""
    model, tokens = random_model(CONFIGS[name], dtype), text(100)
    found, theirs = CachedModel(NativeWeights(model)).read(tokens), model(torch.tensor([tokens])).logits[0].float()
    exact = model.float()(torch.tensor([tokens])).logits[0]
    assert (found - exact).abs().mean() < (theirs - exact).abs().mean()


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(0.8, top_k=20, top_p=0.9)])
@pytest.mark.parametrize("vocab", [VOCAB, VOCAB - 3])
def test_chains_of_one_call_equal_those_of_separate_passes(sampling: SamplingParams, vocab: int) -> None:
    model, tokens = weights("llama", "float32"), text(30)
    together, separate = CachedModel(model), CachedModel(model)
    noises = [Noise(1, "draft"), Noise(1, "draft")]
    for turn in range(5):
        fast, slow = (ChainSampler(sampling, noise, 0, vocab) for noise in noises)
        new = together.extend(tokens, 4, fast)
        assert new == separate.extend(tokens, 4, slow.__call__)
        draft = Draft.chain(tuple(new))
        assert torch.equal(together.score(tokens, draft), separate.score(tokens, draft))
        found, expected = fast.chain(new), slow.chain(new)
        assert found.tokens == expected.tokens and found.token_probs == expected.token_probs
        if sampling.temperature:
            rows = found.probs.dense()
            assert torch.equal(rows, expected.probs.dense()) and rows.shape == (4, vocab)
        tokens = [*tokens, *new[: turn % 4], 7]


def test_broken_logits_of_a_chain_raise() -> None:
    broken = random_model(CONFIGS["llama"], "float32")
    broken.lm_head.weight[3] = torch.nan
    sampler = ChainSampler(SamplingParams(), Noise(1, "draft"), 0, broken.config.vocab_size)
    new = CachedModel(NativeWeights(broken)).extend(text(5), 3, sampler)
    with pytest.raises(UserError, match="NaN"):
        sampler.chain(new)


@pytest.mark.parametrize("name", ["llama", *FAMILIES])
def test_4_bit_weights_are_those_of_bitsandbytes(name: str) -> None:
    """Rounding activations to 12 bits costs less than bfloat16, the usual compute type of bitsandbytes."""
    model, tokens = quantized("nf4", random_model(CONFIGS[name])), text(40)
    found = CachedModel(NativeWeights(model)).read(tokens)
    plain = dequantized(model)
    expected = plain(torch.tensor([tokens])).logits[0]
    theirs = plain.bfloat16()(torch.tensor([tokens])).logits[0].float()
    assert (found - expected).abs().mean() < (theirs - expected).abs().mean() / 4


@pytest.mark.parametrize("name", ["llama", "tied"])
@pytest.mark.parametrize("kind", [*QUANTISED_GGUF, MIXED])
def test_weights_of_gguf_files_are_used_without_rounding(name: str, kind: str) -> None:
    model = stored(kind, random_model(config_of(name, kind)))
    assert error_of_floats(model, text(40)) <= (1e-3 if kind.endswith("_K") else 5e-4)


def test_heads_whose_width_is_no_multiple_of_a_vector_are_quantised_completely() -> None:
    """48 inputs, in groups of 16, of the product after attention."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16}
    model = stored("Q6_K", random_model(LlamaConfig(**{**CONFIGS["llama"].to_dict(), **sizes, "head_dim": 48})))
    assert error_of_floats(model, text(9)) <= 1e-3


def test_extreme_integers_of_gguf_files_are_exact() -> None:
    """-128, which llama.cpp never writes, and the largest sums."""
    model = random_model(CONFIGS["tied"])
    for layer in (model.lm_head, model.model.layers[0].mlp.down_proj):
        layer.weight.fill_(1.0)
    model = stored("Q8_0", model)
    lowest = np.frombuffer(np.float16(1 / 128).tobytes() + bytes([128] * 32), np.uint8)
    down = model.model.layers[0].mlp.down_proj
    down.weight[:] = torch.from_numpy(np.tile(lowest, down.in_features // 32))
    assert error(NativeWeights(model), dequantized(model), text(5)) <= 5e-4


@pytest.mark.parametrize("name", ["llama", "odd widths", "gpt2 odd", *FAMILIES])
def test_int8_equals_bitsandbytes_up_to_the_rounding_of_activations(name: str) -> None:
    model = quantized("int8", random_model(CONFIGS[name]))
    assert error(NativeWeights(model), dequantized(model), text(40)) <= 0.1


def test_int8_rows_do_not_depend_on_outliers_next_to_them() -> None:
    converted = quantized("int8", random_model(CONFIGS["llama"]))
    converted.model.embed_tokens.weight[5] *= 1000
    model = NativeWeights(converted)
    engine, other = Passes(engine_of(model)), Passes(engine_of(model))
    rows = engine.run([1, 2, 5], 0, Draft.chain((2, 5)))
    assert torch.equal(rows[:2], other.run([1, 2, 3], 0, Draft.chain((2, 3)))[:2])


@pytest.mark.parametrize("start", [FIRST_CAPACITY - 3, 2 * FIRST_CAPACITY - 1])
def test_chains_cross_the_end_of_the_first_buffers(start: int) -> None:
    model, tokens = weights("llama", "float32"), text(start)
    sampler, cached = ChainSampler(SamplingParams(0.0), Noise(0, "draft"), start, VOCAB), CachedModel(model)
    cached.score(tokens[:-1], Draft())
    chain = cached.extend(tokens, 6, sampler)
    rows = CachedModel(model).score(tokens, Draft.chain(tuple(chain)))
    assert rows.argmax(-1)[:-1].tolist() == chain


@pytest.mark.parametrize("name", ["llama", "gpt2 odd", "gpt neox odd", "gemma2 odd"])
def test_layers_and_dropout_change_only_the_derived_model(name: str) -> None:
    oracle, tokens = random_model(CONFIGS[name]), text(20)
    model = NativeWeights(oracle)
    before = CachedModel(model).read(tokens)
    thin, dropped = with_layers(model, [1]), with_dropout(model, 0)
    layers = next(part for part in oracle.base_model.children() if isinstance(part, nn.ModuleList))
    del layers[0]
    oracle.config.layer_types = ["full_attention"]
    oracle.config.use_cache = False
    assert error(thin, oracle, tokens) <= 2e-5
    assert not torch.equal(CachedModel(dropped).read(tokens), before)
    assert torch.equal(CachedModel(model).read(tokens), before)
    assert dropped.weight_bytes == model.weight_bytes and thin.weight_bytes == NativeWeights(oracle).weight_bytes


def test_threads_requests_and_forked_processes_keep_the_bits() -> None:
    """More threads than the engine has, then fewer, while threads of the last pass may be awake."""
    model, tokens = weights("llama", "float32"), text(60)
    expected = single_rows(model, tokens, 50)
    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(lambda _: single_rows(model, tokens, 50), range(8)))
    assert all(torch.equal(rows, expected) for rows in results)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(single_rows(model, tokens, 50), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    for count in (100, 1, 3, 2) * 5:
        with torch_threads(count):
            assert torch.equal(single_rows(model, tokens, 50), expected)


@pytest.mark.parametrize("vocab", [64 * 33, 64 * 33 + 70, 192 * 32 + 1])
def test_threads_compute_all_outputs_of_large_matrices(vocab: int) -> None:
    """Numbers of blocks that divide neither evenly into products nor threads."""
    oracle = random_model(LlamaConfig(**{**SMALL, "vocab_size": vocab}))
    model = NativeWeights(oracle)
    for count in (1, 2, 3, 5):
        with torch_threads(count):
            assert error(model, oracle, text(4)) <= 2e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_weights_from_16_bits_are_stored_in_16_bits(dtype: str) -> None:
    """Half the bytes, and the same logits as unrounded weights would give."""
    stored = random_model(CONFIGS["tied"], dtype).float()
    half = NativeWeights(stored)
    assert error(half, stored, text(30)) <= 2e-5
    assert half.weight_bytes < 0.6 * sum(parameter.nbytes for parameter in stored.parameters())
    stored.model.layers[0].self_attn.k_proj.weight[0, 0] = 1 / 3  # needs float32
    assert NativeWeights(stored).weight_bytes > half.weight_bytes


@pytest.mark.parametrize("wrong", [-1, VOCAB, VOCAB + 1000, 10_000_000, 1 << 40])
def test_tokens_outside_the_vocabulary_are_refused(wrong: int) -> None:
    """In texts and drafts; the cache of the text before stays usable."""
    cached, tokens = CachedModel(weights("llama", "float32")), text(5)
    expected = cached.score(tokens, Draft())
    for score in (
        lambda: cached.score([*tokens, wrong], Draft()),
        lambda: cached.score(tokens, Draft.chain((1, wrong))),
        lambda: cached.extend([*tokens, wrong], 2, lambda logits, i: 0),
    ):
        with pytest.raises(UserError, match=rf"token id {wrong:,} is outside the vocabulary of {VOCAB:,} tokens"):
            score()
    assert torch.equal(cached.score(tokens, Draft()), expected)


def test_a_closed_cached_model_is_refused() -> None:
    """Another text may use its cache."""
    cached = CachedModel(weights("llama", "float32"))
    cached.score(text(3), Draft())
    cached.close()
    cached.close()
    with pytest.raises(ValueError, match="is closed"):
        cached.score(text(3), Draft())


@pytest.mark.parametrize("biased", [["q_proj"], ["k_proj"], ["k_proj", "v_proj"], ["gate_proj"], ["up_proj"]])
@pytest.mark.parametrize("convert", [NativeWeights, LlamaWeights])
def test_joined_layers_may_have_a_bias_in_some_parts(convert: type[FusedWeights], biased: list[str]) -> None:
    oracle = random_model(CONFIGS["odd widths"])
    for layer in oracle.model.layers:
        for name in biased:
            linear = getattr(layer.mlp if name in ("gate_proj", "up_proj") else layer.self_attn, name)
            linear.bias = nn.Parameter(torch.randn(linear.out_features), requires_grad=False)
    assert error(convert(oracle), oracle, text(30)) <= 2e-5


# --- several texts in a single pass -----------------------------------------------------------------------------------

TEXT_FORMS = [
    *((name, "float32") for name in ("llama", *FAMILIES)),
    ("odd widths", "bfloat16"),
    *(("llama", form) for form in (*QUANTIZED, *QUANTISED_GGUF)),
]


def random_draft(rng: random.Random) -> Draft:
    count = rng.randrange(5)
    tokens = tuple(rng.randrange(20) for _ in range(count))
    if rng.random() < 0.5:
        return Draft.chain(tokens)
    return Draft(tokens, tuple(rng.randrange(-1, i) if i else -1 for i in range(count)))


@pytest.mark.parametrize(
    ("name", "form", "count"),
    [*((name, form, 2) for name, form in TEXT_FORMS), ("llama", "float32", 1), ("llama", "int8", 1)],
)
def test_rows_have_the_bits_of_passes_with_one_text(name: str, form: str, count: int) -> None:
    """Random lengths, drafts and numbers of texts; hidden states and caches as well."""
    rng, engine = random.Random(name + form), engine_of(weights(name, form))
    taps = (0, 1) if name in CONFIGS else ()
    with torch_threads(count):
        shared, alone = ([Passes(engine, taps) for _ in range(6)] for _ in range(2))
        lengths = [0] * 6
        for _ in range(4):
            chosen = rng.sample(range(6), rng.randrange(1, 7))
            drafts = [random_draft(rng) for _ in chosen]
            new = [text(rng.randrange(1, 30), seed=rng.randrange(99)) for _ in chosen]
            together = engine.run(
                [
                    Entry(shared[i].cache, [*tokens, *draft.tokens], lengths[i], draft)
                    for i, tokens, draft in zip(chosen, new, drafts, strict=True)
                ]
            )
            for logits, i, tokens, draft in zip(together, chosen, new, drafts, strict=True):
                expected = alone[i].run([*tokens, *draft.tokens], lengths[i], draft)
                assert torch.equal(logits, expected) and len(logits) == len(draft) + 1
                lengths[i] += len(tokens)
                slots = [lengths[i] + node for node in draft.path(len(draft) - 1)] if len(draft) else []
                shared[i].keep(lengths[i], slots), alone[i].keep(lengths[i], slots)
                lengths[i] += len(slots)
        for one, other, length in zip(shared, alone, lengths, strict=True):
            assert one.cache.length == other.cache.length == length
            assert torch.equal(one.cache.states[:length], other.cache.states[:length])


def test_prompts_longer_than_a_chunk_share_passes_with_other_texts() -> None:
    engine = engine_of(weights("llama", "float32"))
    prompts = [text(count, seed=count) for count in (3, NATIVE_CHUNK + 40, 250, 30, 2 * NATIVE_CHUNK)]
    together = engine.run([Entry(engine.open(), prompt, 0, Draft()) for prompt in prompts])
    for logits, prompt in zip(together, prompts, strict=True):
        assert torch.equal(logits, Passes(engine).run(prompt, 0, Draft()))
