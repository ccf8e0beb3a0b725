"""The GPU check on a machine without a GPU: its message, and its comparisons on the fake of `torch.cuda`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.cuda import FakeCuda, FakeGraph
from fakes.tiny_models import byte_level_tokenizer, save_model

from benchmarks import gpu_check
from specdemo.bench.table import table
from specdemo.models.zoo import CHAT_PAIR
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    folder = str(save_model(tmp_path / "model", byte_level_tokenizer(), max_position_embeddings=400))
    return Recipe(target=folder, drafter=folder, device="cpu", dtype="bfloat16", temperature=0.0, max_tokens=4)


def test_without_a_gpu_nothing_is_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    assert gpu_check.main() == 0
    assert capsys.readouterr().out == "No GPU is present: nothing was checked.\n"


@pytest.mark.usefixtures("torch_engine")
def test_checks_compare_replayed_graphs_with_eager_passes(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda().install(monkeypatch)
    error = gpu_check.replay_error(gpu_check.target(recipe))
    assert 0 <= error < gpu_check.TOLERANCE
    monkeypatch.setattr(FakeGraph, "replay", lambda graph: None)  # as an empty graph on the wrong device
    assert gpu_check.replay_error(gpu_check.target(recipe)) > gpu_check.TOLERANCE


@pytest.mark.usefixtures("torch_engine")
def test_independent_checks_run(recipe: Recipe) -> None:
    assert gpu_check.run_check("loading", recipe).startswith("passed")
    assert gpu_check.run_check("float16_range", recipe).startswith("passed")
    assert gpu_check.run_check("verification", recipe).startswith("measured")


def test_models_are_checked_by_their_own_methods() -> None:
    assert gpu_check.recipe_of("bundled", None).method == "draft"
    chat = gpu_check.recipe_of(CHAT_PAIR, None)
    assert (chat.method, chat.chat) == ("eagle", True)
    assert gpu_check.recipe_of("bundled", "folder").models == ("folder", None)


def test_the_outcome_of_a_check_is_the_last_line_of_its_process() -> None:
    assert gpu_check.outcome_of([sys.executable, "-c", "print('warning'); print('passed: x')"]) == "passed: x"
    failed = gpu_check.outcome_of([sys.executable, "-c", "print('passed: x'); raise SystemExit('broken')"])
    assert failed == "failed: passed: x"
    assert gpu_check.outcome_of([sys.executable, "-c", "raise SystemExit('broken')"]) == "failed: broken"


def test_the_speed_check_compares_greedy_texts(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [Prompt("code", "code 1", "def f"), Prompt("prose", "prose 1", "x")]
    monkeypatch.setattr(gpu_check, "load_prompts", lambda chat: prompts)
    outcome = gpu_check.run_check("speed", replace(recipe, method="nasd"))
    assert outcome.startswith("passed: 1 prompts, AR ") and "nasd gamma=3 T=0 " in outcome
    monkeypatch.setattr(gpu_check, "table", lambda *given: [replace(row, same_text=0) for row in table(*given)])
    assert gpu_check.run_check("speed", replace(recipe, method="nasd")).startswith("failed: 1 prompts, AR ")
