"""Passes of unusual architectures equal passes without a KV cache, or are refused with the reason."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tiny_models import CONTEXT, LLAMA, SIZES, byte_level_tokenizer, from_config, tiny_model
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    FSMTConfig,
    Gemma4TextConfig,
    GPT2LMHeadModel,
    GPTNeoConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    MiniCPM3Config,
    MptConfig,
    OpenAIGPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMConfig,
)

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models import cache_check
from specdemo.models.cache_check import cache_support
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load, reference
from specdemo.models.memory_plan import plan_spec
from specdemo.models.spec import ModelSpec

pytestmark = pytest.mark.slow

VOCAB = 61
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
    "gpt-neo": GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=CONTEXT,
    ),
    "bloom": BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "bart decoder": BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        is_encoder_decoder=False,
    ),
    "gemma-4": Gemma4TextConfig(**GEMMA4, num_kv_shared_layers=0, sliding_window=8),
}
NO_CACHE = {
    "openai-gpt": OpenAIGPTConfig(**GPT, n_positions=CONTEXT),
    "fsmt": FSMTConfig(
        src_vocab_size=VOCAB,
        tgt_vocab_size=VOCAB,
        langs=["en", "de"],
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        decoder_start_token_id=2,
    ),
}
WIDE_KEYS = {
    "deepseek-v2": DeepseekV2Config(**{**LATENT, **EXPERTS}, topk_method="greedy"),
    "deepseek-v3": DeepseekV3Config(**{**LATENT, **EXPERTS}),
    "minicpm3": MiniCPM3Config(**LATENT),
}
EVERYTHING = {
    **WIDE_KEYS,
    "falcon alibi": FalconConfig(**SIZES, alibi=False, max_position_embeddings=CONTEXT),
    "bert decoder": BertConfig(**BERT, is_decoder=True),
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


def assert_exact(model: PreTrainedModel, forests: bool, source: tuple[int, ...] = ()) -> CachedModel:
    """Compare rows of random drafts, after rollbacks, with `transformers` without a cache."""
    cached, rng, tokens = CachedModel(model, source=source), random.Random(0), [5, 9, 5, 12, 30, 4, 7, 44, 3]
    for _ in range(4):
        size = rng.randrange(1, 6)
        parents = tuple(rng.randrange(-1, i) if forests else i - 1 for i in range(size))
        draft = Draft(tuple(rng.randrange(3, VOCAB) for _ in range(size)), parents)
        rows = cached.score(tokens, draft)
        paths = [[*tokens, *(draft.tokens[i] for i in draft.path(node))] for node in range(-1, size)]
        for row, path in zip(rows, paths, strict=True):
            inputs = {"input_ids": torch.tensor([path])}
            if source:
                inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": inputs["input_ids"]}
            expected = model(**inputs, use_cache=False).logits[0, -1]
            assert (row - expected).abs().max() < 1e-3 * expected.std()
        tokens = [*paths[rng.randrange(size + 1)], rng.randrange(3, VOCAB)]
    return cached


@pytest.mark.parametrize("name", EVERYTHING)
def test_chains_and_forests_are_exact(name: str) -> None:
    model = random_model(EVERYTHING[name])
    support = cache_support(model)
    assert (support.uncached, support.forests) == ("", "")
    assert_exact(model, forests=True)


@pytest.mark.parametrize("name", NO_FORESTS)
def test_wrong_forests_are_refused_and_chains_are_exact(name: str) -> None:
    model = random_model(NO_FORESTS[name])
    cached = assert_exact(model, forests=False)
    with pytest.raises(UserError, match="supports chains only, because it .*: choose a method that drafts a chain"):
        cached.score([1, 2], FOREST)


@pytest.mark.parametrize("name", NO_CACHE)
def test_models_with_wrong_cached_passes_run_without_a_cache(name: str) -> None:
    model = random_model(NO_CACHE[name])
    cached = assert_exact(model, forests=False, source=(4, 5, 6) if name == "fsmt" else ())
    assert cached.kv_bytes == 0 and "no KV cache" in cache_support(model).note
    with pytest.raises(UserError, match="chains only"):
        cached.score([1, 2], FOREST)


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**BERT),
        RobertaConfig(**BERT),
        XLMConfig(vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=CONTEXT),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_are_not_causal_are_refused(config: PretrainedConfig) -> None:
    with pytest.raises(UserError, match="is not a causal language model: choose a text generation model"):
        CachedModel(random_model(config))


def test_chunked_attention_is_exact() -> None:
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8, "pad_token_id": 0}
    assert_exact(random_model(Llama4TextConfig(**LLAMA, **experts, attention_chunk_size=6)), forests=False)


class PositionsIgnored(GPT2LMHeadModel):
    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class CacheIgnored(GPT2LMHeadModel):
    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class MaskIgnored(GPT2LMHeadModel):
    def forward(self, *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, position_ids=position_ids, **kwargs)


class HeadRead(GPT2LMHeadModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.to(self.lm_head.weight.dtype)
        return output


class LastTokenLeaks(GPT2LMHeadModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 0.05 * output.logits[:, -1:]
        return output


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (GPT2LMHeadModel, ""),
        (PositionsIgnored, "forests"),
        (MaskIgnored, "forests"),
        (CacheIgnored, "uncached"),
        (HeadRead, "packing"),
        (LastTokenLeaks, "refusal"),
    ],
)
@pytest.mark.parametrize("twin", [True, False])
def test_faults_are_found_without_the_name_of_the_class(
    kind: type[GPT2LMHeadModel], limit: str, twin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small model, and with the model itself where none can be built."""
    monkeypatch.setattr(cache_check, "_RESULTS", {})
    if not twin:
        monkeypatch.setattr(cache_check, "small_twin", lambda *args: 1 / 0)
    model = kind(tiny_model("gpt2").config).eval()
    if limit == "refusal":
        with pytest.raises(UserError, match="not a causal"):
            cache_support(model)
    else:
        support = cache_support(model)
        assert bool(support.uncached) == (limit == "uncached")
        assert bool(support.forests) == (limit in ("forests", "uncached"))
        assert support.packs == (twin and limit != "packing")


def checkpoint(folder: Path, config: PretrainedConfig) -> ModelSpec:
    tokenizer = byte_level_tokenizer()
    config.vocab_size = len(tokenizer)
    random_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelSpec(str(folder), "float32", device="cpu").resolved()


def test_linear_layers_whose_weights_are_read_are_not_packed(tmp_path: Path) -> None:
    spec, draft = checkpoint(tmp_path, EVERYTHING["longcat"]), Draft.chain((4, 5))
    expected = CachedModel(reference(spec)[0]).score([1, 2], draft)
    assert torch.allclose(CachedModel(load(spec).model).score([1, 2], draft), expected, atol=1e-5)


def test_checkpoints_name_the_engine_or_are_refused_before_their_weights_are_read(tmp_path: Path) -> None:
    loaded = load(checkpoint(tmp_path / "gpt", OpenAIGPTConfig(**GPT, n_positions=CONTEXT)))
    assert loaded.engine.startswith("transformers: ") and "no KV cache, because its logits differ" in loaded.engine
    spec = checkpoint(tmp_path / "bert", BertConfig(**BERT))
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="not a causal"):
        plan_spec(spec, 16)
