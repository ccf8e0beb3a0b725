"""Loading: real checkpoints, real quantization, a message for each error, catalogue, digests, planned memory."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fakes.properties import refusal
from fakes.tiny_models import byte_level_tokenizer, save_model, sentencepiece_tokenizer
from fakes.traces import trace_lines as generate
from transformers import (
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.engines.generic import auto_class, has_encoder, refuse_recurrent
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.hub import Hub, file_digest
from specdemo.models.kv_cache import CachedModel
from specdemo.models.llama_checkpoint import read_checkpoint
from specdemo.models.load import LoadedModel, ModelIdentity, identify, load, load_with_transformers
from specdemo.models.memory import free_bytes
from specdemo.models.memory_plan import check_memory, missing_bytes, plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.quantization import skeleton
from specdemo.models.spec import HeadSpec, ModelSpec, find_device
from specdemo.models.untrusted import check_config
from specdemo.models.zoo import MODELS, PAIRS, REVISIONS, check_pair, fingerprint
from specdemo.recipe import Recipe, plan_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("dtype", "tied"), [("float32", True), ("float16", False)])
def test_llama_checkpoints_give_the_bits_of_transformers(tmp_path: Path, dtype: str, tied: bool) -> None:
    folder = save_model(tmp_path, byte_level_tokenizer(), tie_word_embeddings=tied)
    spec = ModelSpec(str(folder), dtype, device="cpu")
    model, tokenizer = read_checkpoint(spec, Hub())
    other, known = load_with_transformers(spec)
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


def test_damaged_weights(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", byte_level_tokenizer())
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    assert "damaged" in refusal(load, ModelSpec(str(folder)))
    weights.write_bytes(b"\xff" * 100)
    assert "damaged" in refusal(load, ModelSpec(str(folder)))
    weights.unlink()
    assert "no safetensors weights" in refusal(load, ModelSpec(str(folder)))


def test_unsupported_4_bit_dimensions_raise_before_loading(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "odd", byte_level_tokenizer(), hidden_size=48)
    (folder / "model.safetensors").unlink()
    sentence = refusal(load, ModelSpec(str(folder), quantization="nf4", device="cpu"))
    assert "48 inputs, not a multiple of 64" in sentence and "int8 or none" in sentence


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_quantisation_without_its_package(target: str, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sentence = refusal(load, ModelSpec(target, quantization=quantization, device="cpu"))
    assert "needs bitsandbytes: run pip install" in sentence and "or choose quantization none" in sentence


def test_pairs_by_tokenizer_identity() -> None:
    ours = byte_level_tokenizer()
    check_pair(ours, byte_level_tokenizer())
    with pytest.raises(UserError, match=r"differ in [\d,]+ ids \(id 0 is '<\|end\|>' .*'<unk>'"):
        check_pair(ours, sentencepiece_tokenizer())
    longer = byte_level_tokenizer()
    longer.add_tokens(["<extra>"])
    with pytest.raises(UserError, match=r"differ in 1 .*no token for the target and '<extra>' for the drafter"):
        check_pair(ours, longer)
    other_end = byte_level_tokenizer()
    other_end.eos_token = "a"
    with pytest.raises(UserError, match="eos_token_id"):
        check_pair(ours, other_end)


def test_nan_weights_end_the_run_with_an_error(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "nan", byte_level_tokenizer())
    pool = ModelPool()
    recipe = Recipe(target=str(folder), method="ar", max_tokens=8, device="cpu")
    pool.get(plan_run(recipe).target).model.embedding.fill_(float("nan"))
    lines = list(generate(recipe, "def", pool))
    assert lines[-1]["end"] == "error" and "NaN" in lines[-1]["error"] and lines[-1]["metrics"]["tokens"] == 0


# --- catalogue, verified without weights ---


def sizes(layers: int, width: int, heads: tuple[int, int], inner: int, vocab: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": inner,
        "vocab_size": vocab,
    }


TIED = {"tie_word_embeddings": True}
T5 = {"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "tie_word_embeddings": False}
PUBLISHED: dict[str, PretrainedConfig] = {  # configuration of a model of each family
    "HuggingFaceTB/SmolLM2-1.7B": LlamaConfig(**sizes(24, 2048, (32, 32), 8192, 49152), **TIED),
    "Qwen/Qwen2.5-0.5B-Instruct": Qwen2Config(**sizes(24, 896, (14, 2), 4864, 151936), **TIED),
    "Qwen/Qwen3-0.6B": Qwen3Config(**sizes(28, 1024, (16, 8), 3072, 151936), **TIED),
    "meta-llama/Llama-3.1-8B": LlamaConfig(**sizes(32, 4096, (32, 8), 14336, 128256)),
    "google/gemma-2-9b": Gemma2Config(**sizes(42, 3584, (16, 8), 14336, 256000)),
    "google/flan-t5-small": T5Config(**T5, num_decoder_layers=8, feed_forward_proj="gated-gelu"),
    "EleutherAI/pythia-160m": GPTNeoXConfig(**sizes(12, 768, (12, 12), 3072, 50304)),
    "openai-community/gpt2-xl": GPT2Config(n_embd=1600, n_layer=48, n_head=25),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_of_the_catalogue_are_accepted_with_their_published_sizes(name: str) -> None:
    known, config = MODELS[name], PUBLISHED[name]
    check_config(name, json.loads(config.to_json_string(use_diff=False)))
    refuse_recurrent(auto_class(config)._model_mapping[type(config)], config)
    assert has_encoder(config) == known.encoder
    assert sum(weight.numel() for weight in skeleton(config).parameters()) == known.parameters
    assert all(re.fullmatch("[0-9a-f]{40}", model.revision) for model in MODELS.values())


def test_models_of_pairs_are_pinned() -> None:
    for name, pair in PAIRS.items():
        if pair.drafter is not None and name != "bundled":
            recipe = Recipe(pair=name)
            revisions = [spec.revision for spec in (plan_run(recipe).target, plan_run(recipe).drafter)]
            assert revisions == [REVISIONS[pair.target], REVISIONS[pair.drafter]]
            assert pair.gated == (MODELS[pair.target].gated or MODELS[pair.drafter].gated)


# --- digests: equal for copies, different for every change of distribution or rounding ---


def loaded(path: Path, **options: Any) -> LoadedModel:
    return load(ModelSpec(str(path), device="cpu", **options), warm=False)


def identity_of(target: LoadedModel) -> ModelIdentity:
    return identify(target, fingerprint(target.tokenizer), Hub())


def test_the_digest_changes_with_the_model(tmp_path: Path) -> None:
    first = save_model(tmp_path / "first", byte_level_tokenizer())
    config = json.loads((first / "config.json").read_text())
    weights = (first / "model.safetensors").read_bytes()
    original = identity_of(loaded(first))
    assert identity_of(loaded(shutil.copytree(first, tmp_path / "copy"))) == original
    for name, content in {
        "config.json": json.dumps({**config, "rms_norm_eps": 1e-4}).encode(),
        "model.safetensors": weights[:-1] + bytes([weights[-1] ^ 1]),
        "generation_config.json": b'{"eos_token_id": [3, 5]}',
    }.items():
        folder = shutil.copytree(first, tmp_path / f"other {name}")
        (folder / name).write_bytes(content)
        other = identity_of(loaded(folder))
        assert other.model != original.model and other.numerics == original.numerics, name
    target = loaded(first)
    target.model.kv_dtype = "another"
    assert identity_of(target).model != original.model


def test_digests_of_files(tmp_path: Path) -> None:
    """A file in the cache of the hub has its digest as its name; a changed file is read again."""
    blob, link = tmp_path / "blobs" / ("0123456789abcdef" * 4), tmp_path / "model.safetensors"
    blob.parent.mkdir()
    blob.write_bytes(b"never read")
    link.symlink_to(blob)
    assert file_digest(link) == blob.name
    file = tmp_path / "weights"
    file.write_bytes(b"first")
    first, status = file_digest(file), file.stat()
    file.write_bytes(b"later")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert file_digest(file) != first


# --- estimated against actual memory ----------------------------------------------------------------------------------

BUNDLED = PAIRS["bundled"].drafter


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "bf16", "fp16", "int8", "nf4"])
def test_weights_and_cache_are_as_planned(quantization: str) -> None:
    spec = ModelSpec(BUNDLED, quantization=quantization, device="cpu").resolved()
    planned = plan_spec(spec, 700)
    loaded = load(spec)
    assert planned.weights == pytest.approx(loaded.weight_bytes, rel=0.15)
    cached = CachedModel(loaded.model)
    cached.score([1] * 699, Draft.chain((1,)))
    assert cached.kv_bytes <= planned.kv <= 2 * cached.kv_bytes


def test_too_little_memory_raises_with_numbers_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(PAIRS["bundled"].target, device="cpu").resolved()
    monkeypatch.setattr("specdemo.models.memory_plan.free_bytes", lambda device: 1_000_000)
    with pytest.raises(UserError, match=r"target needs [\d.]+ MB on cpu \(weights .*1\.0 MB are free: choose a"):
        ModelPool().get(spec)
    assert not missing_bytes([]) and check_memory([]) is None


@pytest.mark.parametrize("listed", [None, [1, 2]])
def test_hidden_states_for_a_head_count_before_the_target_is_loaded(
    listed: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head lists the states that it receives; EAGLE-3 has three by default."""
    config: dict[str, object] = {"architectures": ["LlamaForCausalLMEagle3"]}
    config |= {} if listed is None else {"eagle_aux_hidden_state_layer_ids": listed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = ModelSpec(PAIRS["bundled"].target, device="cpu")
    plain, tapped = plan_spec(target.resolved(), 64), plan_spec(target.resolved(), 64, taps=len(listed or "abc"))
    monkeypatch.setattr("specdemo.models.memory_plan.free_bytes", lambda device: tapped.total - 1)
    assert not missing_bytes([plain])
    with pytest.raises(UserError, match="target needs"):
        list(ModelPool().ensure_loaded([target], 64, HeadSpec(str(tmp_path), target)))


@pytest.mark.parametrize("left", [[], [7], [1 << 60, 5]])
def test_free_memory_respects_every_limit(monkeypatch: pytest.MonkeyPatch, left: list[int]) -> None:
    monkeypatch.setattr("specdemo.models.memory._cgroup_free_bytes", lambda: left)
    free = free_bytes(find_device("cpu"))
    assert free == min(left) if left else 0 < free <= psutil.virtual_memory().total
