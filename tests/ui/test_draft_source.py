"""Choice of a quantised copy as drafter on the page, and its lane."""

from __future__ import annotations

import pytest

from specdemo.core.trace import to_json
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.lane import LANES, PLAIN, SPEC
from specdemo.ui.page import _Handlers
from specdemo.ui.settings_form import SettingsForm
from specdemo.ui.summary import verdict

USUAL = {"pair": "bundled", "target": "", "drafter": "", "drafter_quantization": "none", "quantization": "none"}
USUAL |= {"method": "draft", "temperature": 0, "prompt": "", "compare": False}


def test_the_quantised_model_is_kept_as_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = _Handlers(None, SettingsForm(USUAL, {}, None), "cpu", USUAL, ())
    for values, form in (({}, "int8"), ({"drafter": "same", "drafter_quantization": "nf4"}, "nf4")):
        kept = handlers.keep_copy({"settings": {**USUAL, **values}, "lanes": None})
        assert [(lane["method"], lane["quantization"], lane["drafter"]) for lane in kept["lanes"]] == [("ar", form, "")]
        assert f"target only, in {form}" in kept["text"]
    warnings: list[str] = []
    monkeypatch.setattr("gradio.Warning", warnings.append)
    again = handlers.keep_copy({"settings": {**USUAL, "quantization": "nf4"}, "lanes": kept["lanes"]})
    assert again == kept and "not smaller" in warnings[0]


@pytest.mark.slow
def test_the_comparison_names_the_first_difference_of_the_quantised_text() -> None:
    pool, third = ModelPool(), LANES[2]
    common = {"temperature": 0, "max_tokens": 24, "device": "cpu"}
    recipes = {
        SPEC: Recipe(drafter="same", drafter_quantization="nf4", **common),
        PLAIN: Recipe(method="ar", **common),
        third: Recipe(method="ar", quantization="nf4", **common),
    }
    run, texts = Run(tuple(recipes)), {}
    for lane, recipe in recipes.items():
        texts[lane] = []
        for event in generate(recipe, "import os\n\ndef walk(path):\n", pool):
            run.absorb(lane, event)
            texts[lane] += to_json(event).get("tokens", ())
    assert texts[SPEC] == texts[PLAIN] != texts[third]
    first = next(i for i, (a, b) in enumerate(zip(texts[PLAIN], texts[third], strict=False), 1) if a != b)
    assert f"; its text differs from token {first} on." in verdict(run.lanes, {})
