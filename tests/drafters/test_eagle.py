"""EAGLE-3 on small models: exact by enumeration for random heads, and limited by context and hidden states."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.enumeration import PROMPT, ROUNDING, VOCAB, distance, reference_probs
from fakes.heads import head_config, head_for, head_tensors, save_head
from fakes.tiny_models import TEMPLATE, Explorer, byte_level_tokenizer, committed, run, save_model, up_to
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.core.errors import UserError
from specdemo.core.events import Header, StepEvent
from specdemo.core.policies import POLICIES, CostModel, DraftLengths
from specdemo.core.rules import RULES
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.heads.chain import HeadDrafter
from specdemo.generate import generate
from specdemo.models.cached_head import CachedHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.torch_head import TorchEagle3
from specdemo.models.heads import read_head
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import HeadSpec, ModelSpec
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TARGET = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5)
SAMPLING = {
    "plain": SamplingParams(),
    "processed": SamplingParams(top_k=3, repetition_penalty=1.5),
    "top-p": SamplingParams(temperature=1.5, top_p=0.9),
    "greedy": SamplingParams(temperature=0),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[CachedModel, CachedHead]:
    """A random target of four tokens, and a random head that drafts two tokens and the tokens of the text."""
    torch.manual_seed(4)
    weights, spec = NativeWeights(LlamaForCausalLM(TARGET).eval()), ModelSpec("small/target")
    name = save_head(tmp_path_factory.mktemp("head"), head_tensors(TARGET, [0, 3], seed=2), head_config(TARGET, 2))
    head = TorchEagle3(read_head(HeadSpec(name, spec), LoadedModel(spec, weights, None, 0, "native")), weights)
    target = CachedModel(weights, taps=head.taps)
    return target, CachedHead(head, target)


def truth(target: CachedModel, sampling: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Distribution of autoregressive sampling, by multiplication."""
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, weight in texts.items():
            logits = target.score([*PROMPT, *text], Draft())[0].tolist()
            for token, chance in enumerate(reference_probs(logits, sampling, (*PROMPT, *text))):
                longer[(*text, token)] = weight * chance
        texts = longer
    return texts


@pytest.mark.parametrize("policy", ["fixed", "path", "egag"])
@pytest.mark.parametrize("rule", ["rejection", "match"])
@pytest.mark.parametrize("name", SAMPLING)
def test_text_of_random_heads_has_the_distribution_of_the_target(
    name: str, rule: str, policy: str, models: tuple[CachedModel, CachedHead]
) -> None:
    (target, head), sampling = models, SAMPLING[name]
    explorer, counts = Explorer(), [0, 0]

    def once() -> tuple[int, ...]:
        verifier = ModelVerifier(target.score, sampling, RULES[rule].apply, explorer, explorer)
        drafter = HeadDrafter(head, sampling, explorer, VOCAB)
        steps = run(PROMPT, verifier, drafter, POLICIES[policy].make(DraftLengths(2, 1, 2), CostModel()), 3)
        counts[0] += sum(len(step.draft) for step in steps)
        counts[1] += sum(len(step.verdict.accepted) for step in steps)
        return tuple(committed(steps))

    assert distance(explorer.distribution(once), truth(target, sampling, 3)) < 10 * ROUNDING
    assert counts[0] > 0 and (counts[1] > 0 or name == "greedy")


def test_drafts_end_with_the_context_of_the_head(models: tuple[CachedModel, CachedHead]) -> None:
    target, head = models
    inner: Any = head.head
    inner.layer, before = replace(inner.layer, context=8), inner.layer
    try:
        for length in range(4, 12):
            text = [0, 1] * (length // 2) + [3] * (length % 2)
            target.score(text, Draft())
            draft = HeadDrafter(head, SAMPLING["plain"], Noise(0, "draft"), VOCAB).propose(text, up_to(4))
            last = length - 2 + len(draft) - 1  # position of the row of the last draft token
            assert len(draft) == 4 or (last == 7 or not draft.tokens)
            assert bool(draft.tokens) == (length <= 9)
    finally:
        inner.layer = before


# --- recipes, pool and page -------------------------------------------------------------------------------------


@cache
def folders(where: Path) -> tuple[str, str]:
    """A saved target and a head."""
    target = str(save_model(where / "target", byte_level_tokenizer(), num_hidden_layers=4))
    return target, head_for(target, where / "head")


@pytest.fixture
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target, head = folders(tmp_path_factory.getbasetemp())
    return {"target": target, "head": head}


def test_a_run_loads_the_head_and_names_it(saved: dict[str, str]) -> None:
    recipe = Recipe(method="eagle", max_tokens=12, temperature=0.0, device="cpu", **saved)
    pool = ModelPool()
    events = list(generate(recipe, "class Point:\n    def", pool))
    (header,) = [event for event in events if isinstance(event, Header)]
    assert header.recipe["head"] == saved["head"] and header.environment["drafter_bytes"] > 1000
    steps = [event.step for event in events if isinstance(event, StepEvent)]
    assert not steps[0].draft.tokens and all(step.draft.tokens for step in steps[1:-1])
    assert pool.heads and pool.weight_bytes > pool.take(recipe.target_spec).weight_bytes
    pool.drop(recipe.target_spec)
    assert not pool.heads


def test_chat_turns_reuse_the_rows_of_the_head(saved: dict[str, str]) -> None:
    target = ModelPool()
    for chat in (False, True):
        recipe = Recipe(method="eagle", max_tokens=6, temperature=0.0, device="cpu", chat=chat, **saved)
        if chat:
            target.take(recipe.target_spec).tokenizer.chat_template = TEMPLATE
        stores: dict[Any, Any] = {}
        for prompt in ("abcd", "abcdefgh"):
            list(generate(recipe, prompt, target, stores))
    assert target.chats.reserved_bytes > 0


REFUSED = {
    "no head": ({"method": "eagle"}, "method eagle needs a head"),
    "remote": (
        {"method": "eagle", "target": "a/b", "head": "a/head", "cloud": CloudConfig(remote="http://127.0.0.1:1")},
        "heads need a local target: choose method nasd or draft, or mode off",
    ),
    "hybrid and remote": (
        {"method": "hybrid", "target": "a/b", "head": "a/head", "cloud": CloudConfig(remote="http://127.0.0.1:1")},
        "heads need a local target",
    ),
    "encoder": (
        {"method": "eagle", "pair": "flan-t5-large", "head": "a/head"},
        "the target has an encoder, and method eagle is for decoders",
    ),
    "hybrid with encoder": (
        {"method": "hybrid", "pair": "flan-t5-large", "head": "a/head"},
        "the target has an encoder, and heads are for decoders",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_recipes_without_use_for_a_head_are_refused(case: str) -> None:
    values, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        Recipe(**values)


def test_a_head_replaces_the_draft_model_of_the_hybrid() -> None:
    assert Recipe(method="hybrid", target="a/b", drafter="a/c").drafter_spec is not None
    recipe = Recipe(method="hybrid", target="a/b", drafter="a/c", head="a/head")
    assert recipe.drafter_spec is None and recipe.head_spec == HeadSpec("a/head", recipe.target_spec)
    assert "drafter" not in recipe.specs
