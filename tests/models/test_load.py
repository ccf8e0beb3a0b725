"""Loading: real checkpoints, real quantization, and a clear message for each error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fakes.tiny_models import byte_level_tokenizer, save_model, sentencepiece_tokenizer
from fakes.trace_lines import trace_lines as generate
from transformers import ViTConfig

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.hub import Hub
from specdemo.models.kv_cache import CachedModel
from specdemo.models.llama_checkpoint import read_checkpoint
from specdemo.models.load import load, reference
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import check_pair
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer())


def refusal(spec: ModelSpec) -> str:
    with pytest.raises(UserError) as caught:
        load(spec)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 400
    return sentence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(checkpoint: Path, dtype: str) -> None:
    loaded = load(ModelSpec(str(checkpoint), dtype, device="cpu"))
    assert loaded.model.dtype == getattr(torch, dtype)
    assert loaded.stop == {loaded.tokenizer.eos_token_id}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_llama_checkpoints_give_the_bits_of_transformers(tmp_path: Path, dtype: str, tied: bool) -> None:
    folder = save_model(tmp_path, byte_level_tokenizer(), tie_word_embeddings=tied)
    spec = ModelSpec(str(folder), dtype, device="cpu")
    model, tokenizer = read_checkpoint(spec, Hub())
    other, known = reference(spec)
    assert tokenizer.get_vocab() == known.get_vocab() and model.generation_config == other.generation_config
    assert {*dict(model.named_parameters())} == {*dict(other.named_parameters())}
    ours, theirs = (
        CachedModel(LlamaWeights(weights)).score([1, 2, 3], Draft.chain((4, 5))) for weights in (model, other)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"attention_bias": True}, {"rope_parameters": None}, {"intermediate_size": 40}]
)
def test_other_checkpoints_need_transformers(tmp_path: Path, change: dict[str, object]) -> None:
    folder = save_model(tmp_path, byte_level_tokenizer())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert read_checkpoint(ModelSpec(str(folder), "float32", device="cpu"), Hub()) is None


def test_quantised_weights_take_less_memory(tmp_path: Path) -> None:
    """All numbers of outputs are multiples of 32, the largest block of the native engine."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = str(save_model(tmp_path, byte_level_tokenizer(), **sizes))
    full, int8, nf4 = (load(ModelSpec(folder, "float16", q, "cpu")).weight_bytes for q in ("none", "int8", "nf4"))
    half, _ = reference(ModelSpec(folder, "float16", device="cpu"))
    linear = sum(p.numel() for name, p in half.named_parameters() if "proj" in name)
    rows = sum(p.shape[0] for name, p in half.named_parameters() if "proj" in name)
    tables = 96 * sum(name.endswith("proj.weight") for name, _ in half.named_parameters()) * 4 // 7  # joined matrices
    assert full - int8 == linear - 4 * rows  # from 2 bytes to 1, with a scale per row
    assert full - nf4 == linear * 3 // 2 - 4 * linear // 64 - tables


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
@pytest.mark.parametrize("method", ["draft", "nasd"])
def test_quantised_speculation_runs(checkpoint: Path, quantization: str, method: str) -> None:
    pool = ModelPool()
    settings = {"target": str(checkpoint), "drafter": str(checkpoint), "quantization": quantization, "device": "cpu"}
    recipe = Recipe(method=method, temperature=0, max_tokens=24, **settings)
    lines = [line for line in generate(recipe, "def add(a, b, a, b, a, b):", pool) if "phase" not in line]
    assert lines[-1]["end"] == "length" and lines[-1]["metrics"]["tokens"] == 24
    if method == "draft":
        assert lines[-1]["metrics"]["accepted"] > 0


def test_models_that_do_not_continue_text(tmp_path: Path) -> None:
    ViTConfig().save_pretrained(tmp_path / "vit")
    assert "not a causal language model" in refusal(ModelSpec(str(tmp_path / "vit")))


def test_damaged_weights(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", byte_level_tokenizer())
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    assert "damaged" in refusal(ModelSpec(str(folder)))
    weights.write_bytes(b"\xff" * 100)
    assert "damaged" in refusal(ModelSpec(str(folder)))
    weights.unlink()
    assert "no safetensors weights" in refusal(ModelSpec(str(folder)))


def test_unsupported_4_bit_dimensions_raise_before_loading(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "odd", byte_level_tokenizer(), hidden_size=48)
    (folder / "model.safetensors").unlink()
    sentence = refusal(ModelSpec(str(folder), quantization="nf4", device="cpu"))
    assert "48 inputs, not a multiple of 64" in sentence and "int8 or none" in sentence


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_quantisation_without_its_package(checkpoint: Path, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sentence = refusal(ModelSpec(str(checkpoint), quantization=quantization, device="cpu"))
    assert "needs bitsandbytes: run pip install" in sentence and "or choose quantization none" in sentence


def test_pairs_by_tokenizer_identity() -> None:
    ours = byte_level_tokenizer()
    check_pair(ours, byte_level_tokenizer())
    with pytest.raises(UserError, match=r"differ in [\d,]+ of [\d,]+ ids \(id 0 is '<\|end\|>' .*'<unk>'"):
        check_pair(ours, sentencepiece_tokenizer())
    longer = byte_level_tokenizer()
    longer.add_tokens(["<extra>"])
    with pytest.raises(UserError, match=r"differ in 1 of .*'<extra>' for the drafter"):
        check_pair(ours, longer)
    other_end = byte_level_tokenizer()
    other_end.eos_token = "a"
    with pytest.raises(UserError, match="eos_token_id"):
        check_pair(ours, other_end)


def test_nan_weights_end_the_run_with_an_error(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "nan", byte_level_tokenizer())
    pool = ModelPool()
    recipe = Recipe(target=str(folder), method="ar", max_tokens=8, device="cpu")
    pool.take(recipe.target_spec).model.embedding.fill_(float("nan"))
    lines = list(generate(recipe, "def", pool))
    assert lines[-1]["end"] == "error" and "NaN" in lines[-1]["error"] and lines[-1]["metrics"]["tokens"] == 0
