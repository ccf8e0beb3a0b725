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
from specdemo.drafters.chain import ModelDrafter
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


CHAINS = [  # texts, drafts, and the number of rows that the model is fed
    ([1, 2, 3], Draft(), 3),
    ([1, 2, 3, 4], Draft.chain((5, 6)), 3),
    ([1, 2, 3, 4, 5, 6, 7], Draft(), 1),  # both accepted; 7 is the bonus
    ([1, 2, 3, 4, 5, 8], Draft(), 1),  # 6 removed
    ([1, 2, 3, 4, 5, 8], Draft(), 0),  # the same again
    ([9], Draft(), 1),  # another text
]
FORESTS = [
    ([1, 2, 3], Draft((4, 5), (-1, -1)), 5),
    ([1, 2, 3], Draft((4, 5, 6, 7, 6), (-1, -1, 0, 0, 1)), 3),  # three leaves more
    ([1, 2, 3], Draft((5, 4, 6, 7, 8), (-1, -1, 0, 1, 3)), 1),  # thinned, in another order, and grown
    ([1, 2, 3, 4], Draft((7, 8, 9), (-1, 0, -1)), 1),  # its root committed
    ([1, 2, 3, 4, 7, 8], Draft(), 0),
    ([1, 2, 3, 4, 7], Draft((8, 1), (-1, -1)), 3),  # shorter than the cache: the forest is fed again
    ([1, 2, 3, 4, 7], Draft((2, 8), (-1, -1)), 2),  # a new node with a known child
]


@pytest.mark.parametrize("kind", ["llama", "mistral-sliding", "gpt2"])
def test_a_model_is_fed_new_tokens_and_nodes_only(kind: str) -> None:
    model = tiny_model(kind)
    cached = CachedModel(model)  # after the check of the model
    count = Counting(model)
    for tokens, draft, rows in CHAINS if "sliding" in kind else CHAINS + FORESTS:
        count.rows.clear()
        logits = cached.score(tokens, draft)
        assert sum(count.rows) == rows and cached.kv_bytes > 0
        assert torch.allclose(logits, CachedModel(model).score(tokens, draft), atol=1e-5)


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

GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}
BERT = {**SIZES, "intermediate_size": 64}
LATENT = {**LLAMA, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 1}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "moe_intermediate_size": 32}
LATENT |= {"n_routed_experts": 4}
LONGCAT = {"num_layers": 1, "head_dim": 4, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "moe_topk": 2}
WIDTHS = {**LLAMA, "head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": VOCAB}
GEMMA4 = {**WIDTHS, "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8}
LLAMA4 = {**LLAMA, "num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8, "pad_token_id": 0}


class MaskIgnored(GPT2LMHeadModel):
    def forward(self, *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, position_ids=position_ids, **kwargs)


EXACT: dict[str, PretrainedConfig] = {
    **{kind: config for kind, config in CONFIGS.items() if "sliding" not in kind},
    "deepseek-v3": DeepseekV3Config(**LATENT, num_experts_per_tok=2, n_group=1, topk_group=1),
    "longcat": LongcatFlashConfig(**{**LATENT, **LONGCAT}),
}
CHAINS_ONLY: dict[str, tuple[PretrainedConfig, str]] = {
    "mpt": (MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=CONTEXT), "follow the mask"),
    "gemma-4": (Gemma4TextConfig(**GEMMA4, num_kv_shared_layers=0, sliding_window=8), "has a sliding window"),
    "llama-4": (Llama4TextConfig(**LLAMA4, attention_chunk_size=6), "follow the mask"),
    "wrong cached passes": (OpenAIGPTConfig(**GPT, n_positions=CONTEXT), "runs without a KV cache"),
    "mask ignored": (CONFIGS["gpt2"], "follow the mask"),
}
REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "bert": (BertConfig(**BERT), "is not a causal language model: choose a text generation model"),
    "xlm": (XLMConfig(vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=4), "is not a causal language model"),
    "mamba": (MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4), "cannot take back"),
}


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return with_random_matrices(from_config(config))


def with_random_matrices(model: PreTrainedModel) -> PreTrainedModel:
    for parameter in model.eval().requires_grad_(False).parameters():
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


@pytest.mark.parametrize("name", EXACT)
def test_chains_and_forests_are_exact(name: str) -> None:
    model = tiny_model(name) if name in CONFIGS else random_model(EXACT[name])
    support = cache_support(model)
    assert (support.uncached, support.forests) == ("", "")
    assert_exact(model, forests=True)


@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_wrong_forests_are_refused_and_chains_are_exact(name: str) -> None:
    config, reason = CHAINS_ONLY[name]
    model = with_random_matrices(MaskIgnored(config)) if name == "mask ignored" else random_model(config)
    cached = assert_exact(model, forests=False)
    assert (cached.kv_bytes == 0) == ("no KV cache" in cache_support(model).note) == (name == "wrong cached passes")
    with pytest.raises(UserError, match=f"supports chains only, because it .*{reason}.*: choose a method that drafts"):
        cached.score([1, 2], Draft((5, 6, 7, 8), (-1, -1, 0, 1)))


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_continue_a_text_are_refused(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason):
        CachedModel(random_model(config))


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


def test_checkpoints_name_the_engine_or_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    vocab = {"vocab_size": len(tokenizer)}
    configs = {"gpt": OpenAIGPTConfig(**{**GPT, **vocab}, n_positions=CONTEXT), "bert": BertConfig(**{**BERT, **vocab})}
    for name, config in configs.items():
        random_model(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    loaded = load(ModelSpec(str(tmp_path / "gpt"), "float32", device="cpu").resolved())
    assert loaded.engine.startswith("transformers: ") and "no KV cache, because its logits differ" in loaded.engine
    with pytest.raises(UserError, match="not a causal"):
        load(ModelSpec(str(tmp_path / "bert"), "float32", device="cpu").resolved())
