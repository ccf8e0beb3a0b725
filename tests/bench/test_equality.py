"""The proof on the machine at hand: it finds equality where there is some, and a difference where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from benchmarks import layer_search as layers
from specdemo.bench import equality as prove
from specdemo.cli.main import main
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe

PROMPTS = [Prompt("code", f"code {i}", text) for i, text in enumerate(("def a", "x = [1, 1, 1,", "class B:"))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer(), num_hidden_layers=4)
    return {"target": str(folder), "drafter": str(folder)}  # its own best drafter


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "rejection"), (0.7, "coupled"), (1.3, "coupled")])
def test_exact_recipes_write_the_text_of_plain_decoding(pair: dict[str, str], temperature: float, rule: str) -> None:
    common = {**pair, "device": "cpu", "temperature": temperature, "rule": rule, "top_p": 1.0, "max_tokens": 24}
    findings = [prove.Finding(Recipe(method=method, gamma=3, **common)) for method in ("draft", "nasd", "self")]
    assert len(list(prove.prove(findings, PROMPTS, ModelPool()))) == len(PROMPTS)
    for finding in findings:
        assert finding.texts == 3 and not finding.parted and finding.tokens > 20
    assert findings[0].accepted > 20


def test_a_text_of_its_own_is_found_out(pair: dict[str, str]) -> None:
    """Plain rejection keeps the law and draws its own text: the proof must say where it parts."""
    recipe = Recipe(**pair, method="draft", temperature=1.0, top_p=1.0, max_tokens=24, device="cpu")
    finding = prove.Finding(recipe)
    list(prove.prove([finding], PROMPTS, ModelPool()))
    assert finding.parted and all(0 <= token < 24 for _, token in finding.parted)
    assert f"{3 - len(finding.parted)} of 3" in prove.markdown([finding])


def test_prompts_are_cut_to_make_more_of_them() -> None:
    whole = load_prompts()
    cut = prove.more(whole, 2 * len(whole) + 3)
    assert len(cut) == 2 * len(whole) + 3 and len({prompt.name for prompt in cut}) == len(cut)
    assert [prompt.text for prompt in cut[: len(whole)]] == [prompt.text for prompt in whole]
    assert all(prompt.text and whole[i % len(whole)].text.startswith(prompt.text) for i, prompt in enumerate(cut))


def test_the_terminal_proves_and_says_so(pair: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--target", pair["target"], "--drafter", pair["drafter"], "--device", "cpu"]
    assert main(["prove", *models, "--gamma", "2", "--prompts", "2", "--max-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert out.count("2 of 2") == 6 and "coupled" in out  # two methods at three temperatures


def test_layers_are_left_out_one_by_one(pair: dict[str, str]) -> None:
    loaded = ModelPool().take(ModelSpec(pair["target"], device="cpu"))
    found = list(layers.search(loaded, [prompt.text for prompt in PROMPTS]))
    assert [len(one.skipped) for one in found] == [1, 2, 3]
    for less, more in zip(found, found[1:], strict=False):
        assert set(less.skipped) < set(more.skipped)
    assert all(0 < one.alpha <= 1 and one.c > 0 and one.speedup >= 1 for one in found)


def test_a_layer_that_does_nothing_is_left_out_first(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = str(save_model(tmp_path / "idle", byte_level_tokenizer(), num_hidden_layers=4))
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        model.model.layers[2].get_submodule(name).weight.data.zero_()
    model.save_pretrained(folder)
    first = next(layers.search(ModelPool().take(ModelSpec(folder, device="cpu")), ["def f(x):\n    return x"]))
    assert first.skipped == (2,) and first.alpha == pytest.approx(1.0, abs=1e-5)
    assert layers.main(["--target", folder, "--device", "cpu", "--prompts", "1"]) == 0


def test_nothing_to_measure_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shallow = str(save_model(tmp_path / "shallow", byte_level_tokenizer(), num_hidden_layers=1))
    for command, words in (
        (["prove", "--prompts", "0"], "prompts must be at least 1"),
        (["prove", "--method", "beam"], "does not sample from the target's distribution"),
    ):
        assert main(command) == 2
        assert words in capsys.readouterr().err
    assert layers.main(["--target", shallow, "--device", "cpu"]) == 2
    assert "no layer to spare" in capsys.readouterr().err
