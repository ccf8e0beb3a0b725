"""Pairs for the Python API: loading by name, and models in memory that remain unmodified."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes.tiny_models import byte_level_tokenizer, save_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specdemo.core.events import Loading
from specdemo.core.trace import to_json
from specdemo.generate import generate
from specdemo.loaded_pair import load_pair
from specdemo.models.in_memory import share_weights
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.worker import TaskProgress

pytestmark = pytest.mark.slow

PROMPT = "for i in range(10):"
TOKENIZER = byte_level_tokenizer()


def model_in_memory(seed: int = 0, **settings: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(TOKENIZER), max_position_embeddings=256, **sizes, **settings)
    return AutoModelForCausalLM.from_config(config)


def trace(recipe: Recipe, pair: Any) -> tuple[dict[str, Any], list[int], dict[str, Any]]:
    """Header, tokens and last line of a run, as in a trace."""
    head, *steps, end = (to_json(event) for event in generate(recipe, PROMPT, pair) if not isinstance(event, Loading))
    return head, [token for step in steps for token in step["tokens"]], end


def greedy_text(model: PreTrainedModel, length: int) -> list[int]:
    ids = torch.tensor([TOKENIZER.encode(PROMPT)])
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=length, pad_token_id=0)
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("method", ["ar", "draft", "tree", "nasd", "self", "beam"])
def test_models_in_memory_remain_unmodified(method: str) -> None:
    """Weights, gradients, modes, configuration and modules; `generate` and training work as before."""
    target, drafter = model_in_memory().train(), model_in_memory(1, num_key_value_heads=2).eval()
    target.lm_head.weight.requires_grad_(False)
    before = [copy.deepcopy(model.state_dict()) for model in (target, drafter)]
    requires_grad = [p.requires_grad for p in target.parameters()]
    modules = [list(map(id, model.modules())) for model in (target, drafter)]
    expected = greedy_text(copy.deepcopy(target).eval(), 12)

    pair = load_pair(target, drafter, TOKENIZER)
    head, tokens, end = trace(replace(Recipe(), method=method, temperature=0, max_tokens=12), pair)
    assert end["end"] in ("length", "stop")
    if method != "beam":
        assert tokens == expected
    if method == "draft":
        assert end["metrics"]["drafted"] > 0
    for model, state, ids in zip((target, drafter), before, modules, strict=True):
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert list(map(id, model.modules())) == ids
    assert requires_grad == [p.requires_grad for p in target.parameters()]
    assert target.training and all(module.training for module in target.modules()) and not drafter.training
    target(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert target.model.embed_tokens.weight.grad is not None
    assert greedy_text(target.eval(), 12) == expected


def test_models_in_memory_share_their_tensors() -> None:
    model = model_in_memory(tie_word_embeddings=True)
    shared = share_weights(model)
    pointers = [{t.data_ptr() for t in (*m.parameters(), *m.buffers())} for m in (model, shared)]
    assert pointers[0] == pointers[1] and shared.lm_head.weight is shared.model.embed_tokens.weight
    assert not {id(module) for module in model.modules()} & {id(module) for module in shared.modules()}


def test_named_pairs_are_loaded_once(tmp_path: Any) -> None:
    target = str(save_model(tmp_path / "target", TOKENIZER))
    drafter = str(save_model(tmp_path / "drafter", TOKENIZER, seed=1, num_hidden_layers=1))
    progress: list[TaskProgress] = []
    pair = load_pair(target, drafter, device="cpu", report=progress.append)
    assert any("reading target" in update.text for update in progress)
    recipe = Recipe(temperature=0, max_tokens=8)
    assert not any(isinstance(event, Loading) for event in generate(recipe, PROMPT, pair))
    head, tokens, _ = trace(recipe, pair)
    named = Recipe(target=target, drafter=drafter, device="cpu", temperature=0, max_tokens=8)
    expected_head, expected, _ = trace(named, ModelPool())
    assert tokens == expected and head["recipe"] == expected_head["recipe"]
    assert trace(named, pair)[1] == expected  # naming the same models is permitted
