"""Comparison of texts with AR decoding: detects both equality and differences."""

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.bench.equality import EqualityResult, equality_table, prove
from specdemo.cli import main
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

PROMPTS = [Prompt("code", f"code {i}", text) for i, text in enumerate(("def a", "x = [1, 1, 1,", "class B:"))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer(), num_hidden_layers=4)
    return {"target": str(folder), "drafter": str(folder)}  # always agrees


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "rejection"), (0.7, "coupled"), (1.3, "coupled")])
def test_exact_recipes_reproduce_ar_decoding(pair: dict[str, str], temperature: float, rule: str) -> None:
    common = {**pair, "device": "cpu", "temperature": temperature, "rule": rule, "top_p": 1.0, "max_tokens": 24}
    results = [EqualityResult(Recipe(method=method, gamma=3, **common)) for method in ("draft", "nasd", "self")]
    assert len(list(prove(results, PROMPTS, ModelPool()))) == len(PROMPTS)
    for result in results:
        assert result.texts == 3 and not result.differences and result.tokens > 20
    assert results[0].accepted > 20


def test_different_texts_are_reported(pair: dict[str, str]) -> None:
    """Rejection above temperature 0 preserves the distribution but not the text."""
    recipe = Recipe(**pair, method="draft", temperature=1.0, top_p=1.0, max_tokens=24, device="cpu")
    result = EqualityResult(recipe)
    list(prove([result], PROMPTS, ModelPool()))
    assert result.differences and all(0 <= token < 24 for _, token in result.differences)
    assert f"{3 - len(result.differences)} of 3" in equality_table([result])


def test_the_command_prints_a_table(pair: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--target", pair["target"], "--drafter", pair["drafter"], "--device", "cpu"]
    assert main(["prove", *models, "--gamma", "2", "--prompts", "2", "--max-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert out.count("2 of 2") == 6 and "coupled" in out  # two methods at three temperatures
    greedy = ["--rule", "block", "--temperature", "0", "--method", "draft"]
    assert main(["prove", *models, "--gamma", "3", "--prompts", "2", "--max-tokens", "8", *greedy]) == 0
    assert "| block | 2     |" in capsys.readouterr().out
