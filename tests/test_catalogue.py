"""The list of ready pairs: what it says about models can be checked without them."""

from __future__ import annotations

import re

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from specdemo.models.catalogue import MODELS, Known
from specdemo.models.pairs import PAIRS, REVISIONS
from specdemo.models.quantise import skeleton
from specdemo.models.slots import can_roll_back
from specdemo.recipe import Recipe

SMALL = [known for known in MODELS.values() if known.parameters < 2e9]


@pytest.mark.parametrize("known", SMALL, ids=lambda known: known.name)
def test_a_shape_has_as_many_weights_as_the_model(known: Known) -> None:
    config = AutoConfig.for_model(known.kind, **known.shape)
    assert sum(weight.numel() for weight in skeleton(config).parameters()) == known.parameters


@pytest.mark.parametrize("known", MODELS.values(), ids=lambda known: known.name)
def test_every_model_can_take_back_tokens(known: Known) -> None:
    config = AutoConfig.for_model(known.kind, **known.shape)
    assert can_roll_back(AutoModelForCausalLM._model_mapping[type(config)], config)
    assert re.fullmatch("[0-9a-f]{40}", known.revision) and known.licence


def test_the_targets_of_pairs_are_the_larger_and_revisions_are_pinned() -> None:
    for name, pair in PAIRS.items():
        recipe = Recipe(pair=name)
        specs = (recipe.target_spec, recipe.drafter_spec)
        if name == "bundled":
            assert [spec.revision for spec in specs] == [None, None]
            continue
        target, drafter = MODELS[pair.target], MODELS[pair.drafter]
        assert target.parameters > 2 * drafter.parameters and target.kind == drafter.kind
        assert [spec.revision for spec in specs] == [REVISIONS[pair.target], REVISIONS[pair.drafter]]
        assert pair.gated == (target.gated or drafter.gated) and pair.licences
        assert 1 <= pair.gamma <= 8
    assert PAIRS["qwen2.5-7b"].chat and not PAIRS["gpt2-xl"].chat and PAIRS["llama-3.1-8b"].gated
