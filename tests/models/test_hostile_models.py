"""Model directories are untrusted: each ends in one sentence or works, and no code in them runs."""

from __future__ import annotations

import json
import re
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from fakes.hostile_models import EMBEDDING, HEAD, HOSTILE, MARKER, config, tensors
from fakes.hub_server import serving
from fakes.properties import changed, holds_for
from fakes.tiny_models import ENCODERS, byte_level_tokenizer, from_config, save_model
from fakes.trace_lines import trace_lines
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.models.hub import Hub
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load, read_tokenizer, reference
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.untrusted import check_config
from specdemo.models.zoo import MODELS
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("valid") / "model", byte_level_tokenizer(), tie_word_embeddings=False)


@pytest.fixture
def folder(valid: Path, tmp_path: Path) -> Path:
    return shutil.copytree(valid, tmp_path / "directory" / "model")


def sentence(function: object, *arguments: object) -> str:
    """Return the refusal, or an empty text if the model works."""
    try:
        function(*arguments)
    except UserError as error:
        text = str(error)
        assert text.isprintable() and len(text) < 450 and ": " in text
        return text
    return ""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_directories_end_in_one_sentence(name: str, folder: Path) -> None:
    HOSTILE[name].change(folder)
    spec = ModelSpec(str(folder), "float32", device="cpu").resolved()
    refusals = [sentence(plan_spec, spec, 64), sentence(load, spec), sentence(read_tokenizer, spec)]
    if part := HOSTILE[name].part:
        assert re.search(part, refusals[1])
    assert not (folder / MARKER).exists()


@cache
def valid_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as where:
        folder = save_model(Path(where) / "model", byte_level_tokenizer(), tie_word_embeddings=False)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@holds_for(60, name=st.sampled_from((*SETTINGS, "model.safetensors")), data=st.data())
def test_changed_files_give_a_model_or_a_sentence(name: str, data: st.DataObject) -> None:
    """Values of a JSON file, or of the header of the weights, are replaced, removed, repeated or moved."""
    content = valid_files()[name]
    end = 8 + int.from_bytes(content[:8], "little")
    is_header = name == "model.safetensors"
    value = data.draw(changed(json.loads(content[8:end] if is_header else content)))
    text = json.dumps(value, default=str).encode()
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        folder.mkdir()
        for other, unchanged in valid_files().items():
            (folder / other).write_bytes(unchanged)
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + content[end:] if is_header else text)
        spec = ModelSpec(str(folder), "float32", device="cpu").resolved()
        for function in (load, read_tokenizer):
            sentence(function, spec)


@pytest.mark.parametrize("name", ["size as NaN", "panic", "missing head", "link to the weights"])
def test_terminal_exits_with_2(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    HOSTILE[name].change(folder)
    assert main(["run", "def", "--target", str(folder), "--method", "ar", "--device", "cpu"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("specdemo: ") and "Traceback" not in "".join(errors)


@pytest.mark.parametrize("name", ["missing head", "missing layer", "unexpected tensor", "other shape"])
def test_transformers_path_names_wrong_tensors(name: str, folder: Path) -> None:
    HOSTILE[name].change(folder)
    assert re.search(HOSTILE[name].part, sentence(reference, ModelSpec(str(folder), device="cpu")))


def test_computed_and_tied_tensors_are_accepted(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tied", byte_level_tokenizer(), tie_word_embeddings=True)
    spec = ModelSpec(str(folder), "float32", device="cpu")
    assert HEAD not in load_file(folder / "model.safetensors")
    expected = CachedModel(load(spec).model).read([1, 2, 3])
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    tensors(lambda stored: stored.update({HEAD: stored[EMBEDDING].clone()} | extra))(folder)
    assert torch.equal(CachedModel(load(spec).model).read([1, 2, 3]), expected)


@pytest.mark.parametrize("kind", ENCODERS)
def test_saved_encoder_decoders_have_all_tensors(kind: str, tmp_path: Path) -> None:
    from_config(ENCODERS[kind]).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    reference(ModelSpec(str(tmp_path), "float32", device="cpu"))


def test_shards_with_an_index_are_accepted(tmp_path: Path) -> None:
    folder = save_model(tmp_path, byte_level_tokenizer(), shards="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    spec = ModelSpec(str(folder), "float32", device="cpu")
    assert load(spec).weight_bytes and sentence(reference, spec) == ""


def test_other_files_of_weights_are_not_read(folder: Path) -> None:
    spec = ModelSpec(str(folder), "float32", device="cpu")
    expected = load(spec).model.embedding
    other = {name: torch.zeros_like(weight) for name, weight in load_file(folder / "model.safetensors").items()}
    for name in ("model-00001-of-00001.safetensors", "model_old.safetensors"):
        save_file(other, folder / name, {"format": "pt"})
    assert torch.equal(load(spec).model.embedding, expected)


@pytest.mark.parametrize("prompt", ["def", "0"])
def test_runs_with_wrong_token_ids_end_in_one_sentence(prompt: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, byte_level_tokenizer(), vocab_size=9)
    recipe = Recipe(target=str(folder), method="ar", max_tokens=4, device="cpu")
    with pytest.raises(UserError, match="token ids of the model: choose another"):
        list(trace_lines(recipe, prompt, ModelPool()))


@pytest.mark.parametrize("name", ["no vocabulary", "padding", "file of the system"])
def test_unusual_models_run_or_end_in_one_sentence(name: str, folder: Path) -> None:
    HOSTILE[name].change(folder)
    recipe = Recipe(target=str(folder), method="ar", max_tokens=4, device="cpu")
    refusal = sentence(lambda: list(trace_lines(recipe, "def add", ModelPool())))
    assert ("no tokens" in refusal) == (name == "no vocabulary")


def test_huge_settings_are_not_downloaded(valid: Path, tmp_path: Path) -> None:
    served = shutil.copytree(valid, tmp_path / "served/evil/model")
    HOSTILE["huge tokenizer"].change(served)
    (served / "tokenizer.json").open("r+").truncate(65_000_000)
    with serving(tmp_path / "served") as server:
        hub = Hub(server.endpoint, tmp_path / "cache")
        with pytest.raises(UserError, match=r"tokenizer.json of evil/model has 65.0 MB, more than 64.0 MB"):
            load(ModelSpec("evil/model", device="cpu"), hub)
        assert not server.gets("tokenizer.json")


def test_weights_of_contradictory_sizes_are_not_downloaded(valid: Path, tmp_path: Path) -> None:
    served = shutil.copytree(valid, tmp_path / "served/evil/model")
    config(head_dim=15)(served)
    with serving(tmp_path / "served") as server:
        with pytest.raises(UserError, match="rotates 15 values of a head"):
            load(ModelSpec("evil/model", device="cpu"), Hub(server.endpoint, tmp_path / "cache"))
        assert server.gets("config.json") and not server.gets("model.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_listed_models_are_accepted(name: str) -> None:
    check_config(name, {"model_type": MODELS[name].kind, **MODELS[name].shape})


def test_models_are_read_only_after_the_checks() -> None:
    program = Path(__file__).parents[2] / "specdemo"
    reading = {path.name for path in program.rglob("*.py") if ".from_pretrained(" in path.read_text("utf-8")}
    assert reading == {"load.py", "llama_checkpoint.py", "tokenizer_check.py"}
    assert "apply_chat_template(" not in "".join(path.read_text("utf-8") for path in program.rglob("*.py"))
