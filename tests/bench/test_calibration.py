"""Calibration of gates: a fifth of the measured tokens is hard, and the flags and controls carry the thresholds."""

import re
import shlex
from typing import Any

import pytest
from contracts.models import save_pair

from specdemo.bench import calibration
from specdemo.bench.calibration import PERCENTILES, Calibration, calibrate
from specdemo.bench.measure import BenchProgress
from specdemo.cli import main
from specdemo.cli.arguments import parser
from specdemo.cli.run import recipe_of_flags
from specdemo.models.model_pool import ModelPool
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


def test_the_terminal_prints_flags_of_run(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--target", models["target"], "--drafter", models["drafter"], "--device", "cpu"]
    assert main(["calibrate", *names, "--prompts", "1", "--max-tokens", "12", "--kind", "code"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| nll, nats +\| 80 +\| [\d.]+ +\| 80th percentile \|", shown)
    assert re.search(r"\| margin +\| 20 +\| [\d.]+ +\| 0.2 +\|", shown)
    (flags,) = re.findall(r"flags: (.*)", shown)
    chosen = recipe_of_flags(parser().parse_args(["run", "x", *names, "--remote", "http://a:1", *shlex.split(flags)]))
    assert chosen.cloud.gates == tuple(PERCENTILES) and f"--gate-nll {chosen.cloud.gate_nll:g}" in flags
