"""Calibration on the page: settings of the measured recipe, words, and thresholds remembered by pair."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from specdemo.bench.calibration import PERCENTILES, Calibration
from specdemo.core.errors import UserError
from specdemo.models.zoo import PAIRS, Pair
from specdemo.ui.settings import OPTIONS, setting_of
from specdemo.ui.tabs import calibration

SETTINGS = {name: setting_of(option, option.default) for name, option in OPTIONS.items()}
RESULT = Calibration({"nll": 1.5, "entropy": 3.0, "margin": 0.1}, 90, 3, "dropout needs a *Llama*")


def test_drafts_are_verified_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = calibration.calibration_recipe(
        {**SETTINGS, "pair": "bundled", "mode": "speculative", "method": "ar"}, "cpu"
    )
    assert recipe.cloud is None and recipe.method == "draft" and recipe.models[1]
    with pytest.raises(UserError, match="temperature"):
        calibration.calibration_recipe({**SETTINGS, "temperature": -1}, "cpu")
    monkeypatch.setitem(PAIRS, "alone", Pair("target without drafter", "target", None, 2, method="nasd"))
    with pytest.raises(UserError, match="pair alone has none"):
        calibration.calibration_recipe({**SETTINGS, "pair": "alone", "method": "nasd"}, "cpu")


def test_thresholds_are_shown_beside_the_guide() -> None:
    words = calibration.describe_calibration(RESULT)
    assert "90 draft tokens of 3 texts. There is no variance: dropout needs a \\*Llama\\*." in words
    assert "| entropy, bits | 80 | 3 | 2.5 |" in re.sub(" +", " ", words)
    assert "`--gate nll entropy margin --gate-nll 1.5" in words


def restored(stored: object, pair: str, current: list[float]) -> list[float]:
    call = f"console.log(JSON.stringify(({calibration._REMEMBERED_JS})(...JSON.parse(process.argv[1]))))"
    values = json.dumps([stored, pair, None, "", *current])
    return json.loads(subprocess.run(["node", "-e", call, values], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not shutil.which("node"), reason="runs the script in Node.js")
def test_thresholds_return_with_their_pair() -> None:
    """The browser's script finds the entry of the server by its key."""
    current = [SETTINGS[f"gate_{name}"] for name in PERCENTILES]
    bundled = {**SETTINGS, "pair": "bundled"}
    stored = calibration.remembered(None, bundled, RESULT.thresholds)
    stored = calibration.remembered(stored, {**SETTINGS, "pair": "öther"}, {"nll": 9.0})
    assert restored(stored, "bundled", current) == [1.5, 3.0, 0.1, SETTINGS["gate_variance"]]
    assert restored(stored, "öther", current)[0] == 9 and restored(None, "bundled", current) == current
    assert restored(stored, "gpt2-xl", current) == current
    assert calibration.remembered("broken", bundled, RESULT.thresholds) == {
        '["bundled","",""]': [1.5, 3.0, 0.1, SETTINGS["gate_variance"]]
    }
