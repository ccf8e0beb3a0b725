"""Self-speculation: the same weights through fewer layers, and the same text in the end."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.heads import head_for
from fakes.tiny_models import byte_level_tokenizer, committed, run, save_model, tiny_model
from fakes.trace_lines import run_of
from transformers import AutoModelForCausalLM

from specdemo.core.decode import EmptyDrafter
from specdemo.core.errors import UserError
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ModelDrafter
from specdemo.models.engines.llama_weights import LlamaWeights, with_layers
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import METHODS, POLICIES, Recipe, plan_run

pytestmark = pytest.mark.slow

GREEDY, NOISE = SamplingParams(temperature=0), Noise(0, "unused when greedy")
TOKENS = [5, 9, 5, 7, 1]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gpt-neox", "mistral-sliding"])
def test_a_model_with_layers_left_out(kind: str) -> None:
    """Equal to a model built from the remaining layers only; its drafts leave the text unchanged."""
    model = tiny_model(kind)
    early = with_layers(model, [0])
    assert {p.data_ptr() for p in early.parameters()} < {p.data_ptr() for p in model.parameters()}
    rows = CachedModel(early).score(TOKENS[:2], Draft.chain(tuple(TOKENS[2:])))
    config = type(model.config).from_dict(model.config.to_dict())
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    alone = AutoModelForCausalLM.from_config(config).eval()
    alone.load_state_dict(model.state_dict(), strict=False)
    assert torch.allclose(rows, alone(torch.tensor([TOKENS])).logits[0, 1:], atol=1e-4)

    def text(drafter: object) -> list[int]:
        verifier = ModelVerifier(CachedModel(model).score, GREEDY, rejection, NOISE, NOISE)
        return committed(run(TOKENS, verifier, drafter, Fixed(3), 20))  # type: ignore[arg-type]

    assert text(ModelDrafter(CachedModel(early).score, GREEDY, NOISE, 61)) == text(EmptyDrafter())
    whole = CachedModel(model).score(TOKENS, Draft())
    assert torch.allclose(whole, model(torch.tensor([TOKENS])).logits[0, -1:], atol=1e-4)  # the full model is unchanged


@pytest.mark.parametrize("kept", [[0], [1]])
def test_lean_models_skip_any_layer(kept: list[int]) -> None:
    model = tiny_model("llama")
    alone = copy.deepcopy(model)  # because all tiny models share one configuration
    alone.model.layers = torch.nn.ModuleList([alone.model.layers[i] for i in kept])
    alone.config.num_hidden_layers = 1
    alone.model.layers[0].self_attn.layer_idx = 0
    early = CachedModel(with_layers(LlamaWeights(model), kept))
    assert torch.allclose(early.score(TOKENS, Draft()), alone(torch.tensor([TOKENS])).logits[0, -1:], atol=1e-4)


@pytest.mark.parametrize("kept", [[], [0, 1], [2]])
def test_invalid_layers_are_refused(kept: list[int]) -> None:
    for model in (tiny_model("llama"), LlamaWeights(tiny_model("llama"))):
        with pytest.raises(UserError, match="layers 0 to 1"):
            with_layers(model, kept)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.drafts])
def test_methods_give_ar_text_under_every_policy(method: str, tmp_path: Path) -> None:
    """Self-speculation stores no weights except the target's."""
    folder = str(save_model(tmp_path / "model", byte_level_tokenizer()))
    pool, drafted, prompt = ModelPool(), 0, "def add(a, b):\n    add(a, b)\n"
    head = head_for(folder, tmp_path / "head", method) if METHODS[method].drafter == "head" else None
    common = {"target": folder, "drafter": folder, "temperature": 0, "max_tokens": 32, "device": "cpu"}
    plain, _ = run_of(Recipe(method="ar", **common), prompt, pool)
    policies = POLICIES if method in ("draft", "eagle") else ("fixed", "path", "auto")
    for policy, rule in [*((policy, "rejection") for policy in policies), ("fixed", "match"), ("fixed", "coupled")]:
        recipe = replace(Recipe(), method=method, policy=policy, rule=rule, head=head, **common)
        text, metrics = run_of(recipe, prompt, pool)
        assert text == plain and len(text) == 32, (policy, rule)
        drafted += metrics["drafted"]
    assert drafted > 0
    if METHODS[method].drafter is None:
        assert pool.weight_bytes == pool.get(plan_run(recipe).target).weight_bytes
