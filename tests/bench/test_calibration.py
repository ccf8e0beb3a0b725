"""Calibration of gates: a fifth of the measured tokens is hard, and the flags and controls carry the thresholds."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from contracts.models import save_pair

from specdemo.bench import calibration
from specdemo.bench.calibration import PERCENTILES, Calibration, calibrate
from specdemo.bench.measure import BenchProgress
from specdemo.cli import main
from specdemo.cli.arguments import parser
from specdemo.cli.run import recipe_of_flags
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import PAIRS, Pair
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.gates import hard_tokens

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return dict(zip(("target", "drafter"), save_pair(tmp_path_factory.mktemp("models")), strict=True))


def test_a_fifth_of_the_draft_tokens_is_hard(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked against all recorded values, by the gate itself."""
    recorded: dict[str, list[float]] = {}
    measured = Calibration.of

    def record(values: dict[str, list[float]], *more: Any) -> Calibration:
        recorded.update(values)
        return measured(values, *more)

    monkeypatch.setattr(calibration.Calibration, "of", record)
    recipe, prompts = Recipe(**models, temperature=1.0, max_tokens=40, device="cpu"), load_prompts(["code"])[:2]
    *progress, result = calibrate(recipe, prompts, ModelPool())
    assert [(item.number, item.total) for item in progress if isinstance(item, BenchProgress)] == [(1, 2), (2, 2)]
    assert isinstance(result, Calibration) and result.thresholds.keys() == PERCENTILES.keys() and result.texts == 2
    count = result.tokens
    assert count > 50 and {len(values) for values in recorded.values()} == {count}
    for name, threshold in result.thresholds.items():
        share = sum(hard_tokens({name: recorded[name]}, {name: threshold})) / count
        assert share == pytest.approx(0.2, abs=2 / count + 1e-3), name


def test_texts_end_at_the_stop_tokens_of_the_recipe(models: dict[str, str]) -> None:
    pool, prompts = ModelPool(), load_prompts(["code"])[:1]
    recipe = Recipe(**models, temperature=0.0, max_tokens=40, device="cpu")
    steps = [event.step for event in generate(recipe, prompts[0].text, pool) if isinstance(event, StepEvent)]
    *_, whole = calibrate(recipe, prompts, pool)
    *_, stopped = calibrate(replace(recipe, stop_tokens=steps[1].tokens[:1]), prompts, pool)
    assert isinstance(whole, Calibration) and isinstance(stopped, Calibration) and stopped.tokens < whole.tokens


def test_the_terminal_prints_flags_of_run(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--target", models["target"], "--drafter", models["drafter"], "--device", "cpu"]
    assert main(["calibrate", *names, "--prompts", "1", "--max-tokens", "12", "--kind", "code"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| nll, nats +\| 80 +\| [\d.]+ +\| 80th percentile \|", shown)
    assert re.search(r"\| margin +\| 20 +\| [\d.]+ +\| 0.2 +\|", shown)
    (flags,) = re.findall(r"flags: (.*)", shown)
    chosen = recipe_of_flags(parser().parse_args(["run", "x", *names, "--remote", "http://a:1", *shlex.split(flags)]))
    assert chosen.cloud.gates == tuple(PERCENTILES) and f"--gate-nll {chosen.cloud.gate_nll:g}" in flags


def test_pairs_without_draft_model_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PAIRS, "alone", Pair("target without drafter", "target", None, 2, method="nasd"))
    assert main(["calibrate", "--pair", "alone"]) == 2
    assert "pair alone has none: a head needs the hidden states" in capsys.readouterr().err


def test_methods_without_distributions_are_refused() -> None:
    with pytest.raises(UserError, match="choose method draft"):
        next(calibrate(Recipe(pair="bundled", method="nasd"), load_prompts()[:1], ModelPool()))
    with pytest.raises(UserError, match="ended before a draft"):
        Calibration.of({"nll": [], "margin": []}, 1)


def test_a_drafter_without_dropout_has_no_variance() -> None:
    result = Calibration.of({"nll": [1.0] * 9 + [3.0], "entropy": [2.0], "margin": [0.5]}, 1, "dropout needs a Llama")
    assert result.thresholds == {"nll": 1.0, "entropy": 2.0, "margin": 0.5}
    assert result.rows()[-1] == ("variance", "80", "–", "–") and "variance" not in result.flags
    assert json.dumps(result.rows())
