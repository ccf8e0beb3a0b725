"""Models on several devices: assignment of layers, logits with device hooks; quantised layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tiny_models import byte_level_tokenizer, save_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from specdemo.core.distributions import DenseProbs
from specdemo.core.errors import UserError
from specdemo.core.rules import RULES
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.models.engines.llama_weights import unsupported_reason
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load, spread
from specdemo.models.quantization import load_options
from specdemo.models.spec import SPREAD, ModelSpec

LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "model"
    return save_model(made, byte_level_tokenizer(), num_hidden_layers=LAYERS)


def test_layers_fill_the_devices_in_order(folder: Path) -> None:
    spec, config = ModelSpec(str(folder), device=SPREAD).resolved(), AutoConfig.from_pretrained(folder)
    whole = load(ModelSpec(str(folder), device="cpu")).weight_bytes
    places = spread(spec, config, {0: int(0.6 * whole), "cpu": whole})
    where = [places[f"model.layers.{i}"] for i in range(LAYERS)]
    assert where[0] == 0 and where[-1] == "cpu" and where == sorted(where, key=str)
    assert set(spread(spec, config, {0: 10 * whole, "cpu": whole}).values()) == {0}
    with pytest.raises(UserError, match="does not fit all devices together"):
        spread(spec, config, {0: whole // 4, "cpu": whole // 4})


def test_a_model_that_moves_between_places_scores_as_ever(folder: Path, tmp_path: Path) -> None:
    """Layers on disk replace a second accelerator: the same hooks fetch tensors for a pass."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(LAYERS)}
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parted = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map={**places, **layers}, offload_folder=tmp_path
    ).eval()
    assert unsupported_reason(parted) == "it is spread over several devices" and unsupported_reason(whole) is None
    ours, theirs = CachedModel(parted), CachedModel(whole)
    for tokens, draft in (([1, 2, 3], ()), ([1, 2, 3, 4], (5, 6, 7)), ([1, 2, 3, 4, 5, 9], (8,))):
        a, b = (one.score(tokens, Draft.chain(draft)) for one in (ours, theirs))
        assert torch.allclose(a, b, atol=1e-4)


def test_draft_probs_are_moved_to_the_device_of_the_target() -> None:
    """`meta` replaces a second device for the draft distribution, since it cannot be read by mistake."""
    moved: list[torch.device] = []

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

        def to(self, device: torch.device) -> torch.Tensor:
            moved.append(device)
            return torch.full((1, 4), 0.25)

    probs = torch.full((1, 4), 0.25).as_subclass(Elsewhere)
    target = ModelVerifier(
        lambda tokens, draft: torch.zeros(len(draft) + 1, 4),
        SamplingParams(temperature=1.0),
        RULES["rejection"].apply,
        Noise(0, "accept"),
        Noise(0, "correct"),
    )
    verdict = target.verify([1], Draft((2,), (-1,), (0.25,), DenseProbs(probs)))
    assert moved == [torch.device("cpu")] and verdict.accepted == (0,)


def test_int8_rows_do_not_depend_on_outliers_in_other_rows(tmp_path: Path) -> None:
    """LLM.int8() with a threshold computes outlier columns of any row in 16 bits for all rows (2208.07339)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)

    def rows_differ(options: dict[str, Any]) -> bool:
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)
        layer = model.model.layers[0].mlp.up_proj
        rows = torch.randn(2, 64)
        alone = layer(rows[:1])
        rows[1, :40] = 50.0
        return not torch.equal(alone, layer(rows)[:1])

    assert not rows_differ(load_options(ModelSpec("any", "float32", "int8", "cpu")))
    assert rows_differ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)})  # the default threshold
