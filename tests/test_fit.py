"""Drafters for a target: the verdict and the reason of every kind of candidate, the prediction and the advice."""

import json
import shlex
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes.gguf_models import add, vocabulary, write_gguf
from fakes.heads import random_head
from fakes.tiny_models import byte_level_tokenizer, save_model
from gguf import GGUFWriter, TokenType
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.fit import FitRow, FitTarget, advice, candidates, compare, fit, ranked
from specdemo.models.hub import Hub
from specdemo.models.load import read_tokenizer
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import ASSETS, PAIRS, REVISIONS
from specdemo.preflight import KNOWN_SHARE, Estimate, HeldOut, Preflight, PreflightProgress
from specdemo.recipe import Recipe
from specdemo.ui.limits import HostLimits
from specdemo.ui.service import fit_job

pytestmark = pytest.mark.slow

HUB = Hub(offline=True)
BUNDLED = PAIRS["bundled"]
YES, UNIVERSAL, NO = "yes", "with --universal, exact", "no"
CPU = {"device": "cpu"}
PADDED, OTHER_TOKEN = 4160, 4095  # the last token is the result of the last merge


def bundled_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    folder = ASSETS / "pair" / name
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_gguf(path, *bundled_model("target"), "F16")
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, target_file: str) -> Path:
    """A directory with candidates of different kinds for `target_file`."""
    folder = tmp_path_factory.mktemp("candidates")
    model, tokenizer = bundled_model("drafter")
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    write_gguf(folder / "match.gguf", model, tokenizer, "F16")
    merges = vocabulary(tokenizer, "gpt-2")["tokenizer.ggml.merges"][:-1]
    other = {"tokenizer.ggml.tokens": [*tokens[:OTHER_TOKEN], "<another>"], "tokenizer.ggml.merges": merges}
    write_gguf(folder / "one-token.gguf", model, tokenizer, "F16", other)
    write_gguf(folder / "padded.gguf", model, tokenizer, "F16", *padded(model, tokens))
    (folder / "broken.gguf").write_bytes((folder / "match.gguf").read_bytes()[:50_000])
    writer = GGUFWriter(folder / "projector.gguf", "clip")
    add(writer, "general.type", "mmproj")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_model(folder / "other-size", byte_level_tokenizer())
    damaged = save_model(folder / "damaged", byte_level_tokenizer()) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:2000])
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=16)).save_pretrained(folder / "masked")
    t5 = T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(t5).save_pretrained(folder / "encoder")
    for name in ("masked", "encoder"):
        byte_level_tokenizer().save_pretrained(folder / name)
    config = FitTarget.read(target_file, CPU, HUB).plan.config
    random_head(folder / "own-head", config, list(range(0, 4096, 2)))
    small = BertConfig(vocab_size=300, hidden_size=64)
    random_head(folder / "other-head", small, list(range(0, 300, 2)))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    return folder


def padded(model: PreTrainedModel, tokens: list[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Values and tensors of a file whose vocabulary has unused tokens at its end."""
    added = range(len(tokens), PADDED)
    kinds = [
        int(TokenType.CONTROL),
        *[int(TokenType.NORMAL)] * (len(tokens) - 1),
        *[int(TokenType.UNUSED)] * len(added),
    ]
    values = {"tokens": [*tokens, *(f"[PAD{i}]" for i in added)], "token_type": kinds}
    rows = model.get_input_embeddings().weight.detach()
    weights = torch.cat([rows, torch.zeros(len(added), rows.shape[1])]).numpy()
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}, {"token_embd.weight": weights}


@pytest.fixture(scope="module")
def rows(models: Path, target_file: str) -> dict[str, FitRow]:
    """Rows of `models` by file name."""
    results = fit(target_file, [str(models)], CPU, ModelPool(hub=HUB), quick=True)
    return {Path(row.candidate).name: row for row in results if isinstance(row, FitRow)}


@pytest.mark.parametrize(
    ("name", "verdict", "reason"),
    [
        ("match.gguf", YES, ()),
        ("padded.gguf", YES, ()),
        ("one-token.gguf", UNIVERSAL, ("differ in 1 ids", f"id {OTHER_TOKEN} is", "'<another>' for the drafter")),
        ("other-size", UNIVERSAL, ("of 4,096 and 300 tokens", "id 0 is", "'<|end|>'")),
        ("broken.gguf", NO, ("not a usable GGUF file", "truncated")),
        ("damaged", NO, ("weights", "damaged")),
        ("projector.gguf", NO, ("'mmproj'",)),
        ("masked", NO, ("not a causal language model (bert)",)),
        ("encoder", NO, ("drafter has an encoder",)),
        ("own-head", YES, ()),
        ("other-head", NO, ("shape", "choose a head for this target")),
        ("adapter", NO, ("adapter", "merge it into the weights")),
        ("nasd", YES, ()),
        ("suffix", YES, ()),
        ("lookahead", YES, ()),
    ],
)
def test_every_candidate_has_a_verdict_with_its_cause(
    rows: dict[str, FitRow], name: str, verdict: str, reason: Iterable[str]
) -> None:
    row = rows[name]
    assert row.can_draft == verdict
    assert all(words in row.reason for words in reason)
    assert bool(row.reason) == bool(reason)
    assert bool(row.command) == (row.memory is not None) == (verdict != NO)


def test_rows_contain_all_candidates_with_the_memory_of_the_pair(
    rows: dict[str, FitRow], models: Path, target_file: str
) -> None:
    assert rows.keys() - {"nasd", "suffix", "lookahead"} == {path.name for path in models.iterdir()}
    assert rows["padded.gguf"].memory > rows["match.gguf"].memory > rows["nasd"].memory > 0
    assert rows["own-head"].memory > rows["nasd"].memory
    known = read_tokenizer(ModelSpec(target_file)).convert_ids_to_tokens(OTHER_TOKEN)
    assert f"id {OTHER_TOKEN} is {known!r} for the target" in rows["one-token.gguf"].reason


def predicted(name: str, speedup: float, low: float, method: str = "nasd") -> FitRow:
    recipe = replace(Recipe(), method=method)
    estimates = (Estimate(2, 1.5, speedup - 0.1, low, speedup), Estimate(5, 2.0, speedup, low, speedup + 0.1))
    prediction = Preflight(recipe, 0.5, 0.1, {1: 1.0, 3: 1.2, 6: 1.5}, estimates, 1000, 10)
    return FitRow(name, recipe, memory=1000, prediction=prediction)


def test_the_advice_names_the_fastest_candidate_or_advises_against_speculation() -> None:
    fast, slow, unfit = predicted("fast", 1.4, 1.2), predicted("slow", 0.9, 0.8), FitRow("unfit", None, "broken")
    assert ranked([unfit, slow, fast]) == [fast, slow, unfit]
    assert advice([slow, unfit, fast]).startswith("choose fast with gamma 5: about 1.40x")
    assert advice([slow, unfit, fast]).endswith("at least 1.20x")
    assert "possibly no difference" in advice([predicted("close", 1.1, 0.95)])
    for rows in ([slow, unfit], [predicted("close", 1.01, 0.9)]):
        assert advice(rows).startswith("do not speculate")
    assert advice([unfit, replace(fast, prediction=None)]) == "1 of 2 candidates can draft; their speed is not measured"


def test_a_noisy_measurement_does_not_win() -> None:
    """Wide intervals, and predictions that the held-out prompts contradict, rank behind a steady candidate."""
    steady, noisy, wrong = predicted("steady", 1.4, 1.3), predicted("noisy", 1.6, 0.8), predicted("wrong", 1.5, 1.4)
    held_out = HeldOut("gamma 4", 3, predicted=1.5, measured=Estimate(4, 1.5, 1.2, 1.1, 1.3))
    wrong = replace(wrong, prediction=replace(wrong.prediction, held_out=held_out))
    assert ranked([noisy, wrong, steady]) == [steady, wrong, noisy]
    assert advice([noisy, wrong, steady]).startswith("choose steady")
    assert advice([noisy, wrong, steady]).endswith("possibly as fast: noisy")
    assert advice([wrong]).startswith("choose wrong with gamma 5: about 1.20x") and "1.20 [1.12, 1.28]" in wrong.cells


def test_candidates_are_measured_in_turn_and_again_in_the_opposite_order(
    target_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []

    def predict(recipe: Recipe, *_: Any) -> Iterator[PreflightProgress | Preflight]:
        decoded.append(recipe.method)
        yield PreflightProgress(KNOWN_SHARE, "known prompts")
        decoded.append(recipe.method)
        if recipe.method == "suffix":
            raise UserError("it is broken")
        yield predicted(recipe.method, 1.2, 1.1).prediction

    monkeypatch.setattr("specdemo.fit.predict", predict)
    results = fit(target_file, ["/nowhere/x.gguf"], CPU, ModelPool(hub=HUB))
    rows = [row for row in results if isinstance(row, FitRow)]
    assert decoded == ["nasd", "suffix", "lookahead", "lookahead", "suffix", "nasd"]
    assert [row.candidate for row in rows] == ["/nowhere/x.gguf", "lookahead", "suffix", "nasd"]
    assert rows[2].reason == "not measured: it is broken" and rows[3].prediction is not None


def test_without_memory_for_both_models_no_candidate_can_draft(
    models: Path, target_file: str, rows: dict[str, FitRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    available = rows["match.gguf"].memory - 1
    monkeypatch.setattr("specdemo.fit.free_on", lambda device: available)
    results = fit(target_file, [str(models / "match.gguf")], CPU, ModelPool(hub=HUB), quick=True)
    match, *others = (row for row in results if isinstance(row, FitRow))
    assert match.can_draft == NO and "are free: choose a smaller one" in match.reason and match.command == ""
    assert all(row.can_draft == YES for row in others)


@pytest.fixture(scope="module")
def measured(models: Path, target_file: str) -> dict[str, FitRow]:
    """Rows of a measurement with drafters of the same and of another vocabulary and a head, on few prompts."""
    names = [str(models / name) for name in ("match.gguf", "one-token.gguf", "own-head", "broken.gguf")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdemo.fit.TEXTS", 1)
        results = [*fit(target_file, names, CPU, ModelPool(hub=HUB), ["code"])]
    return {Path(row.candidate).name: row for row in results if isinstance(row, FitRow)}


def test_all_that_can_draft_are_measured(measured: dict[str, FitRow]) -> None:
    predictions = {name: row.prediction for name, row in measured.items() if row.prediction is not None}
    assert predictions.keys() == {"match.gguf", "one-token.gguf", "own-head", "nasd", "suffix", "lookahead"}
    lengths = {name: [row.gamma for row in prediction.estimates] for name, prediction in predictions.items()}
    assert lengths["match.gguf"] == lengths["one-token.gguf"] == [*range(1, 9)]
    assert all(prediction.tokens <= 48 and "(code)" in prediction.texts for prediction in predictions.values())
    assert predictions["match.gguf"].alpha > 0.4  # trained with the target
    assert all("1 decoded" in predictions[name].texts for name in ("match.gguf", "nasd", "suffix"))
    assert "on 1 prompt: predicted" in measured["match.gguf"].reason
    assert measured["broken.gguf"].cells[-1] == "–"
    *_, rows_cost, speedup, gamma = measured["match.gguf"].cells
    assert rows_cost.startswith("v(") and float(speedup.split()[0]) > 0 and int(gamma) in range(1, 9)


def test_a_measured_command_runs_with_the_same_text_as_the_target_alone(
    measured: dict[str, FitRow], target_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*flags: str) -> str:
        assert main(["run", "def add(a, b):", *flags, "--max-tokens", "24", "--color", "never"]) == 0
        return capsys.readouterr().out.splitlines()[0]

    plain = text("--target", target_file, "--method", "ar", "--temperature", "0")
    for name in ("match.gguf", "one-token.gguf", "own-head", "nasd"):
        gamma = measured[name].prediction.best.gamma
        assert f"--gamma {gamma}" in measured[name].command or gamma == Recipe.gamma
        program, command, _, *flags = shlex.split(measured[name].command)
        assert (program, command) == ("specdemo", "run") and text(*flags) == plain


def test_the_terminal_prints_the_rows_and_the_advice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["fit", "bundled", str(BUNDLED.drafter), str(tmp_path / "missing.gguf"), "--quick", "--device", "cpu"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:]
    assert {*names} > {"pair/drafter", "nasd", "suffix", "lookahead"} and len(names) == 5
    assert sum(line.startswith("  specdemo run PROMPT --target") for line in lines) == 4
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    missing = next(row for row in result["candidates"] if row["candidate"].endswith("missing.gguf"))
    assert missing["can_draft"] == NO and "is not a file" in missing["reason"] and missing["command"] == ""
    assert "4 of 5 candidates" in result["advice"]


def test_a_target_that_cannot_be_read_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "/nowhere/x.gguf"]) == 2 and "not a file" in capsys.readouterr().err


def cached_snapshot(cache: Path, name: str, revision: str, main: str | None) -> Path:
    """Copy the bundled drafter into a cache of the hub; `main`: revision of the main branch, if known."""
    repository = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(ASSETS / "pair" / "drafter", repository / "snapshots" / revision)
    if main is not None:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(main)
    return repository / "snapshots" / revision


def test_models_of_this_machine_are_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, studio = tmp_path / "hub", tmp_path / ".lmstudio" / "models" / "owner" / "name"
    pinned, revision = "Qwen/Qwen2.5-0.5B-Instruct", REVISIONS["Qwen/Qwen2.5-0.5B-Instruct"]
    cached_snapshot(cache, pinned, revision, None)
    cached_snapshot(cache, "owner/checkpoint", "abc", "abc")
    older = cached_snapshot(cache, "owner/older", "abc", "def")
    (cached_snapshot(cache, "owner/quantised", "abc", "abc") / "model.safetensors").unlink()
    (cache / "models--owner--quantised" / "snapshots" / "abc" / "q4.gguf").write_bytes(b"")
    studio.mkdir(parents=True)
    (studio / "match.gguf").symlink_to(models / "match.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LLAMA_CACHE", raising=False)
    monkeypatch.setattr("specdemo.models.hub.constants.HF_HUB_CACHE", str(cache))
    target, hub = FitTarget.read("bundled", CPU, HUB), Hub(offline=True, cache=cache)
    names = candidates(target, [], HUB)
    of_cache = [pinned, "owner/checkpoint", str(older), "owner/quantised/q4.gguf"]
    assert names == [BUNDLED.drafter, *of_cache, str(studio / "match.gguf")]
    assert [compare(target, name, hub).can_draft for name in of_cache] == [YES, YES, YES, NO]
    assert main(["fit", "--directories"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"LM Studio: {studio.parents[1]}" in lines and f"llama.cpp: {tmp_path}/.cache/llama.cpp (missing)" in lines


def test_the_target_and_other_names_of_a_file_are_no_candidates(target_file: str, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(target_file)
    target = FitTarget.read(target_file, CPU, HUB)
    drafter = str(BUNDLED.drafter)
    assert candidates(target, [str(Path(target_file).parent), str(tmp_path), drafter, f"{drafter}/"], HUB) == [drafter]


def test_a_target_with_an_encoder_takes_drafters_of_its_kind_only(models: Path) -> None:
    files = [str(models / "match.gguf"), str(models / "own-head")]
    rows = fit(str(models / "encoder"), files, CPU, ModelPool(hub=HUB), quick=True)
    reasons = {Path(row.candidate).name: row.reason for row in rows if isinstance(row, FitRow)}
    assert "target has an encoder" in reasons["match.gguf"] and "head for this target" in reasons["own-head"]
    assert "lookahead" in reasons["lookahead"] and not reasons["nasd"]


def test_a_public_page_lists_no_files() -> None:
    service: Any = SimpleNamespace(limits=HostLimits(public=True), permanent=True)
    with pytest.raises(UserError, match="not shown to visitors"):
        fit_job(service, Recipe())


def test_an_included_head_is_a_candidate_of_its_target_only(target_file: str) -> None:
    head = str(ASSETS / "heads" / "smollm2-135m-instruct")
    target = FitTarget.read(target_file, CPU, HUB)
    assert head not in candidates(target, [], HUB)
    assert "choose a head for this target" in compare(target, head, HUB).reason
    sizes = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
    plan = replace(target.plan, config=LlamaConfig(**sizes))
    assert head in candidates(replace(target, plan=plan), [], HUB)
