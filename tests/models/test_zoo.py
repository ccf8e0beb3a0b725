"""Catalogue of ready pairs, verified without weights."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.tiny_models import byte_level_tokenizer
from fakes.trace_lines import trace_lines as generate
from transformers import AutoConfig, AutoModelForCausalLM

from specdemo.models.engines.generic import auto_class, has_encoder, refuse_recurrent
from specdemo.models.model_pool import ModelPool
from specdemo.models.quantization import skeleton
from specdemo.models.zoo import CHAT_PAIR, MODELS, PAIRS, REVISIONS, HubModel
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

SMALL = [known for known in MODELS.values() if known.parameters < 2e9]


@pytest.mark.parametrize("known", SMALL, ids=lambda known: known.name)
def test_a_shape_has_as_many_weights_as_the_model(known: HubModel) -> None:
    config = AutoConfig.for_model(known.kind, **known.shape)
    apart = known.shape.get("tie_word_embeddings") is False
    assert sum(weight.numel() for weight in skeleton(config, apart).parameters()) == known.parameters
    assert has_encoder(config) == known.encoder


@pytest.mark.parametrize("known", MODELS.values(), ids=lambda known: known.name)
def test_every_model_can_take_back_tokens(known: HubModel) -> None:
    config = AutoConfig.for_model(known.kind, **known.shape)
    refuse_recurrent(auto_class(config)._model_mapping[type(config)], config)
    assert re.fullmatch("[0-9a-f]{40}", known.revision) and known.licence


def test_the_targets_of_pairs_are_the_larger_and_revisions_are_pinned() -> None:
    for name, pair in PAIRS.items():
        if name == CHAT_PAIR:
            assert pair.drafter is None and pair.chat
            continue
        recipe = Recipe(pair=name)
        specs = (recipe.target_spec, recipe.drafter_spec)
        if name == "bundled":
            assert [spec.revision for spec in specs] == [None, None]
            continue
        target, drafter = MODELS[pair.target], MODELS[pair.drafter]
        assert target.parameters > 2 * drafter.parameters and target.kind == drafter.kind
        assert [spec.revision for spec in specs] == [REVISIONS[pair.target], REVISIONS[pair.drafter]]
        assert pair.gated == (target.gated or drafter.gated)
        assert 1 <= pair.gamma <= 8
    assert PAIRS["qwen2.5-7b"].chat and not PAIRS["gpt2-xl"].chat and PAIRS["llama-3.1-8b"].gated


@pytest.mark.parametrize("method", ["draft", "nasd"])
def test_gemmas_alternating_windows_roll_back(method: str, tmp_path: Path) -> None:
    """Random Gemma 2 with a window shorter than the text: speculative greedy text equals AR text."""
    tokenizer = byte_level_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "gemma2",
        **sizes,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.5,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    models = {"target": str(tmp_path), "drafter": str(tmp_path), "drafter_quantization": "bf16"}
    pool = ModelPool()

    def run(method: str) -> tuple[list[int], int]:
        recipe = replace(Recipe(), **models, method=method, temperature=0, max_tokens=48, gamma=4, device="cpu")
        lines = [line for line in generate(recipe, "def add(a, b):\n    return", pool) if "phase" not in line]
        drafted = lines[-1]["metrics"]
        return [token for line in lines if "i" in line for token in line["tokens"]], drafted["drafted"]

    plain, _ = run("ar")
    text, drafted = run(method)
    assert text == plain and drafted > 0 and len(set(plain)) > 2
