"""Estimated against actual memory, and error messages with figures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from fakes.native_models import CONFIGS, random_model
from fakes.tiny_models import byte_level_tokenizer, save_model
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, GPT2Config, GPTNeoXConfig

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.core.theory import expected_tokens
from specdemo.models import zoo
from specdemo.models.engines.native_families import transformers_reason
from specdemo.models.hub import Hub
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import fuse, load, reference
from specdemo.models.memory import free_bytes
from specdemo.models.memory_plan import check_memory, missing_bytes, plan_config, plan_spec, smaller
from specdemo.models.model_pool import ModelPool
from specdemo.models.quantization import quantised_layers, skeleton
from specdemo.models.spec import HeadSpec, ModelSpec, find_device
from specdemo.models.zoo import MODELS, PAIRS, first_installed, offers

BUNDLED = PAIRS["bundled"].drafter


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "bf16", "fp16", "int8", "nf4"])
def test_weights_and_cache_are_as_planned(quantization: str) -> None:
    spec = ModelSpec(BUNDLED, quantization=quantization, device="cpu").resolved()
    planned = plan_spec(spec, 700)
    loaded = load(spec)
    assert planned.weights == pytest.approx(loaded.weight_bytes, rel=0.002)
    assert planned.parameters == sum(p.numel() for p in skeleton(loaded.model.config).parameters())
    cached = CachedModel(loaded.model)
    cached.score([1] * 699, Draft.chain((1,)))
    assert cached.kv_bytes <= planned.kv <= 2 * cached.kv_bytes


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("native", name) for name in ("llama", "odd widths", "gemma2 odd")),
        *(("torch", name) for name in ("llama", "odd widths")),
        *(("transformers", name) for name in ("gelu", "mistral windows")),
    ],
)
@pytest.mark.parametrize("taps", [(), (2, 0, 1)])
def test_planned_keys_values_and_states_are_those_of_the_cache(
    engine: str, name: str, taps: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    """Heads of any width; texts that grow from any length, here from a first pass of 260 rows."""
    if engine != "native":
        request.getfixturevalue("torch_engine")
    config = CONFIGS[name]
    model = random_model(config)
    assert (transformers_reason(model, model.device) is None) == (engine != "transformers")
    for context in (20, 256, 257, 545, 1090):
        planned = plan_config(ModelSpec("any", "float32", device="cpu"), config, context, taps=len(taps))
        cached = CachedModel(model if engine == "transformers" else fuse(model, consume=False)[0], taps=taps)
        if context > 260:
            cached.score([1] * 256, Draft.chain((1,) * 4))
        cached.score([1] * (context - 4), Draft.chain((1,) * 4))
        assert planned.kv == cached._cache.reserved_bytes, context


@pytest.mark.slow
def test_the_scales_of_quantised_weights_count() -> None:
    """Half a byte, and 4 bytes per 64 weights for the scales, instead of 2 bytes as in the checkpoint."""
    loaded = load(ModelSpec(BUNDLED, quantization="nf4", device="cpu"))
    weights = sum(layer.weight.numel() for layer in quantised_layers(skeleton(loaded.model.config)).values())
    plain = plan_spec(ModelSpec(BUNDLED, device="cpu").resolved(), 1).weights
    assert plain - loaded.weight_bytes == pytest.approx(weights * (2 - 1 / 2 - 4 / 64), rel=0.01)


@pytest.mark.parametrize("quantization", ["none", "int8", "nf4"])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [(GPTNeoXConfig, "transformers"), *((kind, "native") for kind in (GPT2Config, GPTNeoXConfig, Gemma2Config))],
)
def test_models_outside_the_llama_family(kind: type, engine: str, quantization: str, tmp_path: Path) -> None:
    spec = ModelSpec(str(_saved(kind, engine, tmp_path)), quantization=quantization, device="cpu").resolved()
    planned, loaded = plan_spec(spec, 64), load(spec)
    assert loaded.engine.partition(":")[0] == engine
    if engine == "native" and sys.platform == "linux":  # a mapped file would occupy memory
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert planned.weights == pytest.approx(loaded.weight_bytes, rel=0.02)


_INNER = {GPT2Config: "n_inner", GPTNeoXConfig: "intermediate_size", Gemma2Config: "intermediate_size"}


def _saved(kind: type, engine: str, folder: Path) -> Path:
    tokenizer = byte_level_tokenizer()
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = kind(**sizes, **{_INNER[kind]: 128, "head_dim": 16})
    if engine == "transformers":
        for name in ("activation_function", "hidden_act", "hidden_activation"):
            setattr(config, name, "relu")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_checkpoints_that_are_quantised_already(tmp_path: Path) -> None:
    spec = ModelSpec(BUNDLED, "bfloat16", "nf4", "cpu")
    model, tokenizer = reference(spec)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    as_it_is = ModelSpec(str(tmp_path), "bfloat16", device="cpu").resolved()
    planned, loaded = plan_spec(as_it_is, 64), load(as_it_is)
    assert planned.weights == pytest.approx(loaded.weight_bytes, rel=0.05)
    assert loaded.weight_bytes == pytest.approx(load(spec).weight_bytes, rel=0.02)
    with pytest.raises(UserError, match=r"quantised already \(bitsandbytes\): choose quantization none"):
        load(replace(as_it_is, quantization="int8"))


def test_too_little_memory_raises_with_numbers_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(PAIRS["bundled"].target, device="cpu").resolved()
    needed, four_bits = plan_spec(spec, 256), plan_spec(replace(spec, quantization="nf4"), 256)
    assert four_bits.peak < needed.peak
    monkeypatch.setattr("specdemo.models.memory_plan.free_bytes", lambda device: (needed.peak + four_bits.peak) // 2)
    with pytest.raises(
        UserError, match=r"target needs [\d.]+ MB on cpu \(weights .*are free: load it in .*which needs"
    ):
        ModelPool().take(spec)
    monkeypatch.setattr("specdemo.models.memory_plan.free_bytes", lambda device: 1_000_000)
    with pytest.raises(UserError, match=r"and 1\.0 MB are free: choose a smaller pair"):
        ModelPool().take(spec)
    assert not missing_bytes([]) and check_memory([]) is None


def test_models_together_must_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = (
        ModelSpec(getattr(PAIRS["bundled"], role), device="cpu").resolved() for role in ("target", "drafter")
    )
    one, other = plan_spec(target, 64), plan_spec(drafter, 64)
    monkeypatch.setattr("specdemo.models.memory_plan.free_bytes", lambda device: max(one.peak, other.peak) + 1000)
    assert not missing_bytes([one]) and not missing_bytes([other]) and "cpu" in missing_bytes([one, other])
    with pytest.raises(UserError, match="target and drafter need"):
        list(ModelPool().bring([target, drafter], 64))


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
    monkeypatch.setattr("specdemo.models.memory_plan.free_bytes", lambda device: tapped.peak - 1)
    assert not missing_bytes([plain])
    with pytest.raises(UserError, match="target needs"):
        list(ModelPool().bring([target], 64, HeadSpec(str(tmp_path), target)))


@pytest.mark.slow
def test_other_models_are_evicted_for_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ModelPool()
    first = ModelSpec(BUNDLED, device="cpu")
    pool.take(first)
    monkeypatch.setattr("specdemo.models.memory_plan.free_bytes", lambda device: 0 if first in pool else 1 << 40)
    pool.take(ModelSpec(PAIRS["bundled"].target, device="cpu"))
    assert first not in pool


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize(
    ("dtype", "tied", "quantization", "heads"),
    [
        ("float32", True, "none", 0),  # the head is the embedding
        ("float32", False, "none", 1),
        ("float32", True, "nf4", 0),
        ("bfloat16", False, "none", 1),
        ("bfloat16", True, "none", 0),
        ("float16", True, "int8", 0),
    ],
)
def test_memory_of_a_head_while_loading(dtype: str, tied: bool, quantization: str, heads: int) -> None:
    """The vocabulary is so large that the head dominates the memory."""
    shape = {"vocab_size": 60_000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = AutoConfig.for_model("llama", num_attention_heads=1, tie_word_embeddings=tied, **shape)
    planned = plan_config(ModelSpec("wide", device="cpu", dtype=dtype, quantization=quantization), config, 1)
    width = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    assert planned.loading // (60_000 * 64 * width) == heads


def test_smaller_ways_grow_smaller() -> None:
    known = MODELS["HuggingFaceTB/SmolLM2-1.7B"]
    config = AutoConfig.for_model(known.kind, **known.shape)
    spec = ModelSpec(known.name, device="cpu").resolved()
    sizes = [plan_config(one, config, 64).weights for one in (spec, *smaller(spec))]
    assert len(sizes) == 4 and sizes == sorted(sizes, reverse=True)
    assert [one.quantization for one in smaller(replace(spec, quantization="int8"))] == ["nf4"]


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M", "openai-community/gpt2", "Qwen/Qwen3-0.6B"])
def test_the_pickers_estimate_is_that_of_the_plan(name: str) -> None:
    known = MODELS[name]
    spec = ModelSpec(name, device="cpu").resolved()
    planned = plan_config(spec, AutoConfig.for_model(known.kind, **known.shape), 2048)
    assert zoo._required_bytes(name, True) == pytest.approx(planned.weights + planned.kv, rel=0.02)


def test_fitting_pairs_are_listed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdemo.models.memory.free_bytes", lambda device: 5_000_000_000)
    found = offers("cpu")
    assert {offer.name for offer in found} == set(PAIRS) and found[0].name == first_installed(tuple(PAIRS))
    fit = [offer.fits for offer in found]
    assert fit == sorted(fit, reverse=True) and any(fit) and not all(fit)
    big = next(offer for offer in found if offer.name == "qwen2.5-7b")
    assert "(needs " in big.label and "5.0 GB free" in big.label and not big.fits


def test_the_expected_gain_is_shown_where_passes_cost_their_kernel_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdemo.models.memory.free_bytes", lambda device: 100_000_000_000)
    monkeypatch.setattr(zoo, "find_device", lambda device: torch.device(device))
    monkeypatch.setattr(zoo, "is_downloaded", lambda name: True)
    on_gpu = {offer.name: offer.label for offer in offers("cuda")}
    gains = [max(expected_tokens(0.8, n) / (1 + n * c) for n in range(20)) for c in (6 / 32, 26 / 42)]
    assert on_gpu["pythia-2.8b-70m"] == f"Pythia 2.8B, 70M (no CUDA graphs: up to {gains[0]:.1f}× at α 0.8)"
    assert on_gpu["gemma-2-9b"].endswith(f"hub first; no CUDA graphs: up to {gains[1]:.1f}× at α 0.8)")
    assert on_gpu["qwen2.5-7b"] == PAIRS["qwen2.5-7b"].title
    assert not any("CUDA graphs" in offer.label for offer in offers("cpu"))


def test_pairs_that_are_not_downloaded_are_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    labels = {offer.name: offer.label for offer in offers("cpu")}
    assert "to download" in labels["qwen2.5-7b"] and "to download" not in labels["bundled"]
    assert zoo.is_downloaded(str(tmp_path)) and not zoo.is_downloaded("org/model")


def test_free_memory_is_positive_and_at_most_the_total() -> None:
    assert 0 < free_bytes(find_device("cpu")) <= psutil.virtual_memory().total


@pytest.mark.parametrize("left", [[], [7], [1 << 60, 5]])
def test_free_memory_respects_every_limit(monkeypatch: pytest.MonkeyPatch, left: list[int]) -> None:
    monkeypatch.setattr("specdemo.models.memory._cgroup_free_bytes", lambda: left)
    free = free_bytes(find_device("cpu"))
    assert free == min(left) if left else 0 < free <= psutil.virtual_memory().total


def test_shapes_come_from_headers_alone(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", byte_level_tokenizer())
    shapes = Hub().shapes(str(folder))
    whole = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    (folder / "model.safetensors").write_bytes(whole[:header] + b"\0" * (len(whole) - header))
    assert Hub().shapes(str(folder)) == shapes and shapes["model.embed_tokens.weight"][0] == "F32"
