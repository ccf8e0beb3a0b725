"""Choice of a quantised copy as drafter on the page, and its lane."""

import pytest
from fakes.trace_records import absorb, end, header, step

from specdemo.ui.frames import Run
from specdemo.ui.lane import LANES, PLAIN, SPEC
from specdemo.ui.page import _Handlers
from specdemo.ui.settings_form import SettingsForm
from specdemo.ui.text_comparison import compare_forms

USUAL = {"pair": "bundled", "target": "", "drafter": "", "drafter_quantization": "none", "quantization": "none"}
USUAL |= {"method": "draft", "temperature": 0, "prompt": "", "compare": False}


def test_the_quantised_model_is_kept_as_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = _Handlers(None, SettingsForm(USUAL, {}, None), "cpu", USUAL, ())
    for values, form in (({}, "int8"), ({"drafter": "same", "drafter_quantization": "nf4"}, "nf4")):
        kept = handlers.keep_copy({"settings": {**USUAL, **values}, "lanes": None})
        assert [(lane["method"], lane["quantization"], lane["drafter"]) for lane in kept["lanes"]] == [("ar", form, "")]
        assert f"large model alone, in {form}" in kept["text"]
    warnings: list[str] = []
    monkeypatch.setattr("gradio.Warning", warnings.append)
    again = handlers.keep_copy({"settings": {**USUAL, "quantization": "nf4"}, "lanes": kept["lanes"]})
    assert again == kept and "not smaller" in warnings[0]


def test_the_comparison_names_the_first_difference_of_the_quantised_text() -> None:
    """Token 2 of the third lane differs."""
    forms = {SPEC: "none", PLAIN: "none", LANES[2]: "nf4"}
    run = Run(tuple(forms))
    for lane, form in forms.items():
        made = header("ar")
        made["recipe"] = made["recipe"] | {"quantization": form}
        lines = [step(i, pieces=["x"], tokens=[7 if i == 1 and form == "nf4" else i]) for i in range(3)]
        absorb(run, lane, made, *lines, end())
    assert compare_forms(run.lanes[LANES[2]], run.lanes[PLAIN]) == ", text differs from token 2 on"
