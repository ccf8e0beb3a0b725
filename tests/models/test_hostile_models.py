"""Model directories are untrusted: each works or ends in a sentence, and no code in them runs."""

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.hub_server import serving
from fakes.properties import changed, holds_for
from fakes.refusals import refusal
from fakes.tiny_models import ENCODERS, byte_level_tokenizer, from_config, save_model
from fakes.trace_lines import trace_lines
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import MarianConfig, SwitchTransformersConfig

from specdemo.core.errors import UserError
from specdemo.models.hub import Hub
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load, read_tokenizer, reference
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

Change = Callable[[Path], object]  # of a copy of a valid directory
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("valid") / "model", byte_level_tokenizer(), tie_word_embeddings=False)


@pytest.fixture
def folder(valid: Path, tmp_path: Path) -> Path:
    return shutil.copytree(valid, tmp_path / "directory" / "model")


def edited(file: str, **values: Any) -> Change:
    """Set keys of a JSON file."""

    def change(folder: Path) -> None:
        stored = json.loads((folder / file).read_text()) | values
        (folder / file).write_text(json.dumps(stored))

    return change


def config(**values: Any) -> Change:
    return edited("config.json", **values)


def split_by(regex: str) -> Change:
    rule = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return edited("tokenizer.json", pre_tokenizer=rule)


def growing(count: int) -> Change:
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return edited("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [rule] * count})


def panicking(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    edited("tokenizer.json", model=model | {"continuing_subword_prefix": "x" * 100})(folder)


def without_layer(folder: Path) -> None:
    stored = load_file(folder / WEIGHTS)
    kept = {name: weight for name, weight in stored.items() if ".layers.1." not in name}
    save_file(kept, folder / WEIGHTS, {"format": "pt"})


def linked(folder: Path) -> None:
    """Replace the weights by a link to a copy outside of the directory."""
    (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
    (folder / WEIGHTS).symlink_to(folder.parent / WEIGHTS)


def index_outside(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {HEAD: "../../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def special(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def written(file: str, content: str) -> Change:
    return lambda folder: (folder / file).write_text(content)


def lengthened(file: str, size: int) -> Change:
    return lambda folder: os.truncate(folder / file, size)


EXPERTS = SwitchTransformersConfig(num_layers=1000, num_experts=4000)
POSITIONS = MarianConfig(max_position_embeddings=1 << 24)
HOSTILE: dict[str, tuple[Change, str]] = {  # with a part of the refusal by `load`
    "attention from the hub": (config(attn_implementation="evil/kernel"), "evil/kernel"),
    "deeply nested configuration": (written("config.json", "[" * 200_000 + "]" * 200_000), "nested too deeply"),
    "many experts": (EXPERTS.save_pretrained, "too much time or memory"),
    "table of positions": (POSITIONS.save_pretrained, "its configuration describes 34,"),
    "special configuration": (special, "not a regular file"),
    "panic of the tokenizer": (panicking, "tokenizer"),
    "growing text": (growing(30), "too much time or memory"),
    "missing layer": (without_layer, r"missing: (model\.layers\.1\.\S+, ){2}model\.layers\.1\.\S+ and 6 more"),
    "link to the weights": (linked, "link out of the directory"),
    "index outside": (index_outside, "secret.safetensors"),
}


SLOW = ("many experts", "growing text")  # until the limit of the trial


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in SLOW else name for name in HOSTILE]
)
def test_hostile_directories_end_in_one_sentence(name: str, folder: Path) -> None:
    change, part = HOSTILE[name]
    change(folder)
    spec = ModelSpec(str(folder), "float32", device="cpu").resolved()
    refusals = [refusal(plan_spec, spec, 64), refusal(load, spec), refusal(read_tokenizer, spec)]
    assert re.search(part, refusals[1])


def test_no_code_of_a_directory_is_executed(folder: Path) -> None:
    """Code in each place where a library might look for some."""
    marker = folder / "executed"
    source = f"open({str(marker)!r}, 'w').close()\nclass Own: pass\n"
    for name in ("modeling_own.py", "configuration_own.py", "tokenization_own.py", "__init__.py", "setup.py"):
        (folder / name).write_text(source)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(source)
    config(auto_map={"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"})(folder)
    edited("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_own.Own"]})(folder)
    spec = ModelSpec(str(folder), "float32", device="cpu").resolved()
    for function in (load, reference, read_tokenizer):
        refusal(function, spec)
    assert not marker.exists()


SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@cache
def valid_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as where:
        folder = save_model(Path(where) / "model", byte_level_tokenizer(), tie_word_embeddings=False)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


@holds_for(30, name=st.sampled_from((*SETTINGS, WEIGHTS)), data=st.data())
def test_changed_files_give_a_model_or_a_sentence(name: str, data: st.DataObject) -> None:
    """Values of a JSON file, or of the header of the weights, are replaced, removed, repeated or moved."""
    content = valid_files()[name]
    end = 8 + int.from_bytes(content[:8], "little")
    is_header = name == WEIGHTS
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
            refusal(function, spec)


def test_files_that_are_not_read_may_be_large(folder: Path) -> None:
    (folder / "corpus.json").touch()
    lengthened("corpus.json", 1 << 33)(folder)
    load(ModelSpec(str(folder), "float32", device="cpu"))


def test_transformers_path_names_wrong_tensors(folder: Path) -> None:
    without_layer(folder)
    extra = {"model.extra.weight": torch.zeros(2), HEAD: torch.zeros(7, 64)}
    save_file(load_file(folder / WEIGHTS) | extra, folder / WEIGHTS, {"format": "pt"})
    for function in (reference, load):
        sentence = refusal(function, ModelSpec(str(folder), device="cpu"))
        for problem in ("missing: model.layers.1.", "unexpected: model.extra.weight", f"of other shapes: {HEAD}"):
            assert problem in sentence


def test_computed_and_tied_tensors_are_accepted(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tied", byte_level_tokenizer(), tie_word_embeddings=True)
    spec = ModelSpec(str(folder), "float32", device="cpu")
    stored = load_file(folder / WEIGHTS)
    assert HEAD not in stored
    expected = CachedModel(load(spec).model).read([1, 2, 3])
    extra = {HEAD: stored[EMBEDDING].clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(stored | extra, folder / WEIGHTS, {"format": "pt"})
    assert torch.equal(CachedModel(load(spec).model).read([1, 2, 3]), expected)


@pytest.mark.parametrize("kind", ["marian", "t5gemma"])
def test_saved_encoder_decoders_have_all_tensors(kind: str, tmp_path: Path) -> None:
    from_config(ENCODERS[kind]).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    reference(ModelSpec(str(tmp_path), "float32", device="cpu"))


def test_other_files_of_weights_are_not_read(folder: Path) -> None:
    spec = ModelSpec(str(folder), "float32", device="cpu")
    expected = load(spec).model.embedding
    other = {name: torch.zeros_like(weight) for name, weight in load_file(folder / WEIGHTS).items()}
    for name in ("model-00001-of-00001.safetensors", "model_old.safetensors"):
        save_file(other, folder / name, {"format": "pt"})
    assert torch.equal(load(spec).model.embedding, expected)


@pytest.mark.parametrize("prompt", ["def", "0"])
def test_runs_with_wrong_token_ids_end_in_one_sentence(prompt: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, byte_level_tokenizer(), vocab_size=9)
    recipe = Recipe(target=str(folder), method="ar", max_tokens=4, device="cpu")
    with pytest.raises(UserError, match="token ids of the model: choose another"):
        list(trace_lines(recipe, prompt, ModelPool()))


def test_unusual_tokenizers_run_or_end_in_one_sentence(folder: Path) -> None:
    recipe = Recipe(target=str(folder), method="ar", max_tokens=4, device="cpu")

    def run(prompt: str = "def add") -> str:
        return refusal(lambda: list(trace_lines(recipe, prompt, ModelPool())))

    valid = (folder / "tokenizer.json").read_text()
    split_by(r"(a+)+$")(folder)
    assert run() == "" and "retry-limit" in run("a" * 40 + "b")
    (folder / "tokenizer.json").write_text(valid)

    edited("tokenizer_config.json", vocab_file="/etc/passwd")(folder)
    assert "no tokens" not in run()
    edited("tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[])(folder)
    assert "no tokens" in run()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lengthened("tokenizer.json", 1_000_001), r"tokenizer.json of evil/model has .* MB, more than 1.0 MB"),
        (config(head_dim=15), "rotates 15 values of a head"),
    ],
    ids=["size of a file", "sizes in the configuration"],
)
def test_refused_models_are_not_downloaded(
    change: Change, sentence: str, valid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdemo.models.untrusted.MAX_TOKENIZER_BYTES", 1_000_000)
    served = shutil.copytree(valid, tmp_path / "served/evil/model")
    change(served)
    with serving(tmp_path / "served") as server:
        with pytest.raises(UserError, match=sentence):
            load(ModelSpec("evil/model", device="cpu"), Hub(server.endpoint, tmp_path / "cache"))
        assert not server.gets(WEIGHTS)


def test_models_are_read_only_after_the_checks() -> None:
    program = Path(__file__).parents[2] / "specdemo"
    reading = {path.name for path in program.rglob("*.py") if ".from_pretrained(" in path.read_text("utf-8")}
    assert reading == {"load.py", "llama_checkpoint.py", "tokenizer_check.py", "architecture_trial.py"}
    assert "apply_chat_template(" not in "".join(path.read_text("utf-8") for path in program.rglob("*.py"))
