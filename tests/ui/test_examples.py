"""Example prompts: each is a valid recipe, and only those of available pairs are shown."""

import json
from typing import Any

import pytest

from specdemo.models.zoo import ASSETS, PAIRS
from specdemo.recipe import Recipe
from specdemo.ui.examples import available_examples

EXAMPLES = json.loads((ASSETS / "examples.json").read_text("utf-8"))
CHAT_PAIR = "smollm2-135m"  # available if its model is installed


@pytest.mark.parametrize("example", EXAMPLES["ready"], ids=lambda example: example["title"])
def test_an_example_is_a_valid_recipe_with_a_short_effect(example: dict[str, Any]) -> None:
    names = ("method", "chat", "temperature")
    models = {"pair": example["pair"]} if example["pair"] in PAIRS else {"target": "org/model"}
    recipe = Recipe(**models, **{name: example[name] for name in names})
    assert example.keys() == {"title", "pair", "prompt", "effect", *names}
    assert example["pair"] in (CHAT_PAIR, "bundled") and recipe.chat == (example["pair"] == CHAT_PAIR)
    assert example["effect"].endswith(".") and len(example["effect"].split()) <= 12


def test_only_examples_of_available_pairs_are_shown() -> None:
    both = available_examples(EXAMPLES, {CHAT_PAIR, "bundled"})
    assert [example.items() >= own.items() for example, own in zip(both["ready"], EXAMPLES["ready"], strict=True)]
    bundled = available_examples(EXAMPLES, {"bundled"})
    assert {example["pair"] for example in bundled["ready"]} == {"bundled"}
    best = bundled["best"]["draft"]
    assert (best["pair"], best["method"], best["chat"]) == ("bundled", "draft", False)
    assert best["prompt"] == EXAMPLES["methods"]["draft"]["best"]["prompt"]
    chat = available_examples(EXAMPLES, {CHAT_PAIR})
    assert len(chat["ready"]) == 6 and not chat["best"] and not chat["worst"]
    assert available_examples({"ready": [], "methods": {}}, PAIRS) == {"ready": [], "best": {}, "worst": {}}
