"""Estimates before anything is generated: right where the answer is known, plain where drafting does not pay."""

from __future__ import annotations

import pytest
from tiny import byte_level_tokenizer, save_model

from specdemo.__main__ import main
from specdemo.bench import Prompt
from specdemo.core.errors import Refused
from specdemo.core.theory import expected_tokens
from specdemo.models.shelf import Shelf
from specdemo.preflight import LONGEST, Estimate, Preflight, _expected, preflight
from specdemo.recipe import Recipe

TEXT = "def add(first, second):\n    return first + second\n\n\n" * 3
PROMPTS = [Prompt("code", f"code {i}", TEXT[i:]) for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "model", byte_level_tokenizer(), num_hidden_layers=4))


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8])
def test_constant_acceptance_gives_the_theorems_figures(alpha: float, gamma: int) -> None:
    rounds = [([alpha] * LONGEST, True)] * 400
    v = dict.fromkeys(range(1, LONGEST + 2), 1.0)
    tokens, speedup = _expected(rounds, gamma, 0.1, v)
    assert tokens == pytest.approx(expected_tokens(alpha, gamma))
    assert speedup == pytest.approx(expected_tokens(alpha, gamma) / (1 + 0.1 * gamma))


def test_rounds_start_where_rounds_end() -> None:
    """Right drafts alternate with wrong ones; a round of one draft starts at every other place, and always wins."""
    rounds = [([float(i % 2 == 0)], True) for i in range(101)]
    assert _expected(rounds, 1, 0.0, {1: 1.0, 2: 1.0})[0] == pytest.approx(2.0)


def test_a_target_that_drafts_for_itself_is_always_right_and_never_cheap(folder: str) -> None:
    recipe = Recipe(target=folder, drafter=folder, temperature=1.0, top_p=1.0, device="cpu")
    found = preflight(recipe, PROMPTS, Shelf())
    assert found.alpha == pytest.approx(1.0, abs=1e-4) and found.c > 0.3
    assert [one.tokens_per_pass for one in found.estimates] == pytest.approx([g + 1 for g in range(1, 9)], rel=1e-3)
    assert found.kv_bytes > 0 and found.weight_bytes > 0


@pytest.mark.parametrize("method", ["self", "nasd", "suffix", "lookup"])
def test_one_model_is_enough_for_the_others(folder: str, method: str) -> None:
    found = preflight(Recipe(target=folder, method=method, temperature=1.0, top_p=1.0, device="cpu"), PROMPTS, Shelf())
    assert 0 < found.alpha < 1 and (found.c > 0) == (method == "self")
    assert all(1 <= one.tokens_per_pass <= one.gamma + 1 and one.low <= one.high for one in found.estimates)


def test_advice_is_plain() -> None:
    def advice(speedup: float, low: float, c: float = 0.1) -> str:
        estimate = Estimate(3, 2.0, speedup, low, speedup + 0.1)
        return Preflight(Recipe(), 0.5, c, {1: 1.0}, (estimate,), 1, 1).advice

    assert advice(1.5, 1.4) == "gamma 3: about 1.50x the speed of plain decoding"
    assert "may make no difference" in advice(1.1, 0.9)
    assert advice(0.8, 0.7, c=0.9).startswith("don't") and "too dear" in advice(0.8, 0.7, c=0.9)
    assert "too little would be accepted" in advice(1.0, 0.9, c=0.0)


def test_what_cannot_be_told_is_refused_in_words(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused, match="would write none"):
        preflight(Recipe(target=folder, method="nasd", temperature=0, device="cpu"), PROMPTS[:1], Shelf())
    with pytest.raises(Refused, match="too short"):
        preflight(Recipe(target=folder, method="nasd", device="cpu"), [Prompt("code", "code 1", "x")], Shelf())
    assert main(["preflight", "--target", folder, "--method", "beam"]) == 2
    assert "preflight knows the methods draft" in capsys.readouterr().err
    warm = ["--temperature", "1", "--kind", "code", "--device", "cpu"]
    assert main(["preflight", "--target", folder, "--method", "nasd", *warm]) == 0
    assert "plain decoding" in capsys.readouterr().out
