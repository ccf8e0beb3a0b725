"""Architectures: greedy text and logits equal those of transformers without a cache, or are refused with the reason."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tiny_models import (
    CONFIGS,
    CONTEXT,
    LLAMA,
    SIZES,
    Counting,
    ForestDrafter,
    blurred,
    byte_level_tokenizer,
    committed,
    from_config,
    run,
    tiny_model,
)
from transformers import (
    BertConfig,
    DeepseekV3Config,
    Gemma4TextConfig,
    GPT2LMHeadModel,
    Llama4TextConfig,
    LongcatFlashConfig,
    MambaConfig,
    MambaForCausalLM,
    MptConfig,
    OpenAIGPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    XLMConfig,
)

from specdemo.core import sampling as core_sampling
from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.errors import UserError
from specdemo.core.metrics import Metrics
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection, top1
from specdemo.core.sampling import Noise, SamplingParams, SharedNoise
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.model import ModelDrafter
from specdemo.drafters.ngram import NGramDrafter
from specdemo.models.cache_check import cache_support, pack_if_exact
from specdemo.models.engines.llama_weights import LlamaWeights, PackedLinear
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load
from specdemo.models.spec import ModelSpec
from specdemo.native import sampling as native_sampling

pytestmark = [pytest.mark.slow, pytest.mark.long]

GREEDY = SamplingParams(temperature=0)
NOISE = Noise(0, "unused when greedy")
VOCAB = 61


def prompts(kind: str) -> Iterator[tuple[list[int], int]]:
    """Yield 12 prompts with output lengths: single tokens, repetitive, up to the context limit, random."""
    rng = random.Random(kind)
    for i in range(12):
        if i < 2:
            yield [rng.randrange(VOCAB)], 12
        elif i < 5:
            length = rng.choice((CONTEXT - 1, CONTEXT - 2, CONTEXT - 9))
            yield [rng.randrange(VOCAB) for _ in range(length)], CONTEXT - length
        elif i < 8:
            yield [rng.randrange(VOCAB) for _ in range(3)] * rng.randrange(2, 6), 16
        else:
            yield [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 24))], rng.randrange(1, 20)


def generated(model: PreTrainedModel, prompt: list[int], length: int) -> list[int]:
    """Oracle: greedy search of transformers."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@cache
def generated_texts(kind: str) -> list[list[int]]:
    """Texts of transformers for `prompts(kind)`, computed once for both engines."""
    model = tiny_model(kind)
    return [generated(model, prompt, length) for prompt, length in prompts(kind)]


@pytest.mark.parametrize("kind", [*CONFIGS, "llama lean", "qwen2 lean", "qwen3 lean"])
def test_greedy_text_equals_transformers(kind: str) -> None:
    """Draft with a model and one other drafter or rule per prompt; gammas and the others alternate."""
    kind, _, lean = kind.partition(" ")
    model = tiny_model(kind)
    small = blurred(model, kind)
    engines = (LlamaWeights(model), LlamaWeights(small)) if lean else (model, small)
    names = ("model", "n-grams", "top1", "forest")[: 3 if "sliding" in kind else 4]
    totals = {name: Metrics() for name in names}

    def drafts() -> ModelDrafter:
        return ModelDrafter(CachedModel(engines[1]).score, GREEDY, NOISE, VOCAB)

    for i, ((prompt, length), expected) in enumerate(zip(prompts(kind), generated_texts(kind), strict=True)):
        drafters: dict[str, Drafter] = {"model": drafts(), "n-grams": NGramDrafter(4, "multi", 3), "top1": drafts()}
        drafters["forest"] = ForestDrafter(drafts(), VOCAB, seed=i)
        other = names[1 + i % (len(names) - 1)]
        gamma = (1, 2, 4, 8)[i // 3 % 4]
        for name in ("model", other):
            rule = top1 if name == "top1" else rejection
            verifier = ModelVerifier(CachedModel(engines[0]).score, GREEDY, rule, NOISE, NOISE, candidates=3)
            steps = run(prompt, verifier, drafters[name], Fixed(gamma), length)
            assert committed(steps) == expected, (name, gamma, prompt)
            for step in steps:
                totals[name] = totals[name].plus(step)
    for name, metrics in totals.items():
        assert metrics.drafted > metrics.accepted > 0, name


def test_recurrent_models_raise() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(UserError, match="cannot take back"):
        CachedModel(model)


@pytest.mark.parametrize("kind", ["llama", "mistral-sliding", "gpt2"])
def test_cache_feeds_only_new_tokens(kind: str) -> None:
    model = tiny_model(kind)
    cached = CachedModel(model)  # after the check of the model
    count = Counting(model)
    cached.score([1, 2, 3], Draft())
    cached.score([1, 2, 3, 4], Draft.chain((5, 6)))  # drafts 5, 6
    cached.score([1, 2, 3, 4, 5, 6, 7], Draft())  # all accepted, 7 is the bonus
    cached.score([1, 2, 3, 4, 5, 8], Draft())  # 6 removed
    cached.score([1, 2, 3, 4, 5, 8], Draft())  # the same again: known
    cached.score([9], Draft())  # another text
    assert count.rows == [3, 3, 1, 1, 1]
    assert cached.kv_bytes > 0


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_forest_that_grows_or_is_thinned_is_fed_node_by_node(kind: str) -> None:
    """Nodes scored before are not scored again, at any index in the new forest."""
    model = tiny_model(kind)
    cached = CachedModel(model)  # after the check of the model
    count = Counting(model)
    forests = [
        ([1, 2, 3], Draft((4, 5), (-1, -1)), 5),
        ([1, 2, 3], Draft((4, 5, 6, 7, 6), (-1, -1, 0, 0, 1)), 3),  # three leaves more
        ([1, 2, 3], Draft((5, 4, 6, 7, 8), (-1, -1, 0, 1, 3)), 1),  # thinned, in another order, and grown
        ([1, 2, 3, 4], Draft((7, 8, 9), (-1, 0, -1)), 1),  # its root committed
        ([1, 2, 3, 4, 7, 8], Draft(), 0),
        ([1, 2, 3, 4, 7], Draft((8, 1), (-1, -1)), 3),  # shorter than the cache: the forest is fed again
        ([1, 2, 3, 4, 7], Draft((2, 8), (-1, -1)), 2),  # a new node with a known child
    ]
    for tokens, draft, rows in forests:
        count.rows.clear()
        found = cached.score(tokens, draft)
        assert sum(count.rows) == rows
        expected = CachedModel(model).score(tokens, draft)
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "temperature"), [("llama lean", 0.0), ("llama lean", 0.8), ("gpt2", 0.8)])
def test_chains_equal_those_of_separate_passes(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled as on an accelerator, without the native code."""
    kind, _, lean = kind.partition(" ")
    monkeypatch.setattr(core_sampling, "is_on_host", lambda x: False)
    monkeypatch.setattr(native_sampling, "supports", lambda *tensors: False)
    model: Any = LlamaWeights(tiny_model(kind)) if lean else tiny_model(kind)
    sampling, budget = SamplingParams(temperature=temperature), DraftBudget(5, Fixed(5))
    by_one, at_once = CachedModel(model), CachedModel(model)
    slow = ModelDrafter(by_one.score, sampling, SharedNoise(3), VOCAB)
    fast = ModelDrafter(at_once.score, sampling, SharedNoise(3), VOCAB, extend=at_once.extend)
    tokens = [5, 9, 5]
    for bonus in (1, 2, 3):  # accept the draft, add a bonus token
        expected, draft = slow.propose(tokens, budget), fast.propose(tokens, budget)
        assert draft.tokens == expected.tokens and len(draft) == 5
        if temperature:
            assert draft.token_probs == pytest.approx(expected.token_probs, rel=1e-4)
            assert torch.allclose(draft.probs.dense(), expected.probs.dense(), atol=1e-5)
        tokens = [*tokens, *draft.tokens, bonus]


def test_a_pass_that_broke_leaves_a_usable_cache() -> None:
    model = tiny_model("llama")
    cached = CachedModel(model)
    expected = cached.score([1, 2, 3, 4], Draft())
    hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cached.score([1, 2, 3, 4, 5, 6], Draft())
    hook.remove()
    assert torch.allclose(cached.score([1, 2, 3, 4], Draft()), expected, atol=1e-5)


# --- architectures with limits ---

FOREST = Draft((5, 6, 7, 8), (-1, -1, 0, 1))
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}
BERT = {**SIZES, "intermediate_size": 64}
LATENT = {**LLAMA, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 1}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "moe_intermediate_size": 32}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
WIDTHS = {**LLAMA, "head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": VOCAB}
GEMMA4 = {**WIDTHS, "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8}
NO_FORESTS = {
    "mpt": MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=CONTEXT),
    "gemma-4": Gemma4TextConfig(**GEMMA4, num_kv_shared_layers=0, sliding_window=8),
}
EXACT = {
    "deepseek-v3": DeepseekV3Config(**{**LATENT, **EXPERTS}),
    "longcat": LongcatFlashConfig(
        **{**LATENT, "num_layers": 1, "head_dim": 4},
        ffn_hidden_size=32,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        moe_topk=2,
    ),
}


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.2)
    return model


def assert_exact(model: PreTrainedModel, forests: bool) -> CachedModel:
    """Compare rows of random drafts, after rollbacks, with `transformers` without a cache."""
    cached, rng, tokens = CachedModel(model), random.Random(0), [5, 9, 5, 12, 30, 4, 7, 44, 3]
    for _ in range(4):
        size = rng.randrange(1, 6)
        parents = tuple(rng.randrange(-1, i) if forests else i - 1 for i in range(size))
        draft = Draft(tuple(rng.randrange(3, VOCAB) for _ in range(size)), parents)
        rows = cached.score(tokens, draft)
        paths = [[*tokens, *(draft.tokens[i] for i in draft.path(node))] for node in range(-1, size)]
        for row, path in zip(rows, paths, strict=True):
            expected = model(torch.tensor([path]), use_cache=False).logits[0, -1]
            assert (row - expected).abs().max() < 1e-3 * expected.std()
        tokens = [*paths[rng.randrange(size + 1)], rng.randrange(3, VOCAB)]
    return cached


@pytest.mark.parametrize("name", [*EXACT, *(kind for kind in CONFIGS if "sliding" not in kind)])
def test_chains_and_forests_are_exact(name: str) -> None:
    model = random_model(EXACT[name]) if name in EXACT else tiny_model(name)
    support = cache_support(model)
    assert (support.uncached, support.forests) == ("", "")
    assert_exact(model, forests=True)


@pytest.mark.parametrize("name", NO_FORESTS)
def test_wrong_forests_are_refused_and_chains_are_exact(name: str) -> None:
    model = random_model(NO_FORESTS[name])
    cached = assert_exact(model, forests=False)
    with pytest.raises(UserError, match="supports chains only, because it .*: choose a method that drafts a chain"):
        cached.score([1, 2], FOREST)


def test_models_with_wrong_cached_passes_run_without_a_cache() -> None:
    model = random_model(OpenAIGPTConfig(**GPT, n_positions=CONTEXT))
    cached = assert_exact(model, forests=False)
    assert cached.kv_bytes == 0 and "no KV cache" in cache_support(model).note
    with pytest.raises(UserError, match="chains only"):
        cached.score([1, 2], FOREST)


@pytest.mark.parametrize(
    "config",
    [BertConfig(**BERT), XLMConfig(vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=4)],
    ids=lambda config: config.model_type,
)
def test_models_that_are_not_causal_are_refused(config: PretrainedConfig) -> None:
    with pytest.raises(UserError, match="is not a causal language model: choose a text generation model"):
        CachedModel(random_model(config))


def test_chunked_attention_is_exact() -> None:
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8, "pad_token_id": 0}
    assert_exact(random_model(Llama4TextConfig(**LLAMA, **experts, attention_chunk_size=6)), forests=False)


class MaskIgnored(GPT2LMHeadModel):
    def forward(self, *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, position_ids=position_ids, **kwargs)


def test_a_model_that_ignores_the_mask_supports_chains_only() -> None:
    cached = assert_exact(MaskIgnored(tiny_model("gpt2").config).eval().requires_grad_(False), forests=False)
    with pytest.raises(UserError, match="does not follow the mask"):
        cached.score([1, 2], FOREST)


class HeadRead(GPT2LMHeadModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.to(self.lm_head.weight.dtype)
        return output


@pytest.mark.parametrize(("kind", "packed"), [(GPT2LMHeadModel, True), (HeadRead, False)])
def test_layers_whose_weights_are_read_are_unpacked(kind: type[GPT2LMHeadModel], packed: bool) -> None:
    model = kind(tiny_model("gpt2").config).eval().requires_grad_(False)
    weight = model.lm_head.weight.clone()
    pack_if_exact(model)
    assert isinstance(model.lm_head, PackedLinear) == packed
    assert packed or torch.equal(model.lm_head.weight, weight)


def checkpoint(folder: Path, config: PretrainedConfig) -> ModelSpec:
    tokenizer = byte_level_tokenizer()
    config.vocab_size = len(tokenizer)
    random_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelSpec(str(folder), "float32", device="cpu").resolved()


def test_checkpoints_name_the_engine_or_are_refused(tmp_path: Path) -> None:
    loaded = load(checkpoint(tmp_path / "gpt", OpenAIGPTConfig(**GPT, n_positions=CONTEXT)))
    assert loaded.engine.startswith("transformers: ") and "no KV cache, because its logits differ" in loaded.engine
    with pytest.raises(UserError, match="not a causal"):
        load(checkpoint(tmp_path / "bert", BertConfig(**BERT)))
