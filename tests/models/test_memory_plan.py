"""Estimated against actual memory, and error messages with figures."""

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.hub import Hub
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load
from specdemo.models.memory import free_bytes
from specdemo.models.memory_plan import check_memory, missing_bytes, plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import HeadSpec, ModelSpec, find_device
from specdemo.models.zoo import PAIRS

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
    needed, four_bits = plan_spec(spec, 256), plan_spec(replace(spec, quantization="nf4"), 256)
    assert four_bits.total < needed.total
    monkeypatch.setattr("specdemo.models.memory_plan.free_bytes", lambda device: (needed.total + four_bits.total) // 2)
    with pytest.raises(
        UserError, match=r"target needs [\d.]+ MB on cpu \(weights .*are free: load it in .*which needs"
    ):
        ModelPool().get(spec)
    monkeypatch.setattr("specdemo.models.memory_plan.free_bytes", lambda device: 1_000_000)
    with pytest.raises(UserError, match=r"and 1\.0 MB are free: choose a smaller pair"):
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


def test_shapes_come_from_headers_alone(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", byte_level_tokenizer())
    shapes = Hub().shapes(str(folder))
    whole = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    (folder / "model.safetensors").write_bytes(whole[:header] + b"\0" * (len(whole) - header))
    assert Hub().shapes(str(folder)) == shapes and shapes["model.embed_tokens.weight"][0] == "F32"
