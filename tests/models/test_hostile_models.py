"""Model directories are untrusted: each gives a model or a sentence, and no code in them runs.

Every number of config.json: refused with a sentence, or a run equal to the engine for torch.
"""

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.gguf_models import save_gguf
from fakes.hub_server import serving
from fakes.properties import changed, holds_for, refusal
from fakes.tiny_models import CONFIGS, CONTEXT, ENCODERS, LLAMA, byte_level_tokenizer, from_config, save_model
from fakes.traces import trace_lines
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, Gemma2Config, LlamaConfig, MarianConfig, PhiConfig, SwitchTransformersConfig

from specdemo.core.errors import UserError
from specdemo.models.hub import Hub
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load, load_with_transformers, read_tokenizer
from specdemo.models.memory_plan import check_memory, plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.native.build import SWITCH, native_library
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

Change = Callable[[Path], object]  # of a copy of a valid directory
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WEIGHTS = "model.safetensors"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("valid") / "model", byte_level_tokenizer(), tie_word_embeddings=False)


@pytest.fixture
def folder(valid: Path, tmp_path: Path) -> Path:
    return shutil.copytree(valid, tmp_path / "directory" / "model")


def spec_of(folder: Path) -> ModelSpec:
    return ModelSpec(str(folder), "float32", device="cpu").resolved()


def edited(file: str, **values: Any) -> Change:
    """Set keys of a JSON file."""

    def change(folder: Path) -> None:
        stored = json.loads((folder / file).read_text()) | values
        (folder / file).write_text(json.dumps(stored))

    return change


def config(**values: Any) -> Change:
    return edited("config.json", **values)


def growing(folder: Path) -> None:
    """Double the text thirty times."""
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    edited("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [rule] * 30})(folder)


def panicking(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    edited("tokenizer.json", model=model | {"continuing_subword_prefix": "x" * 100})(folder)


def without_layer(folder: Path) -> None:
    stored = load_file(folder / WEIGHTS)
    others = {name: weight for name, weight in stored.items() if ".layers.1." not in name}
    save_file(others, folder / WEIGHTS, {"format": "pt"})


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


def nested(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200_000 + "]" * 200_000)


EXPERTS = SwitchTransformersConfig(num_layers=1000, num_experts=4000)
POSITIONS = MarianConfig(max_position_embeddings=1 << 24)
UNTIL_THE_LIMIT = pytest.mark.exhaustive  # of the trial


@pytest.mark.parametrize(
    ("change", "part"),
    [
        pytest.param(config(attn_implementation="evil/kernel"), "evil/kernel", id="attention from the hub"),
        pytest.param(nested, "nested too deeply", id="deeply nested configuration"),
        pytest.param(EXPERTS.save_pretrained, "too much time or memory", id="many experts", marks=UNTIL_THE_LIMIT),
        pytest.param(POSITIONS.save_pretrained, "its configuration describes 34,", id="table of positions"),
        pytest.param(special, "not a regular file", id="special configuration"),
        pytest.param(panicking, "tokenizer", id="panic of the tokenizer"),
        pytest.param(growing, "too much time or memory", id="growing text", marks=UNTIL_THE_LIMIT),
        pytest.param(linked, "link out of the directory", id="link to the weights"),
        pytest.param(index_outside, "secret.safetensors", id="index outside"),
    ],
)
def test_hostile_directories_end_in_one_sentence(change: Change, part: str, folder: Path) -> None:
    change(folder)
    spec = spec_of(folder)
    refusals = [refusal(plan_spec, spec, 64), refusal(load, spec), refusal(read_tokenizer, spec)]
    assert re.search(part, refusals[1])


def test_no_code_of_a_directory_is_executed(folder: Path) -> None:
    """Code in each place where a library might look for some."""
    marker = folder / "executed"
    source = f"open({str(marker)!r}, 'w').close()\nclass Own: pass\n"
    (folder / "custom_generate").mkdir()
    names = ("modeling_own", "configuration_own", "tokenization_own", "__init__", "setup", "custom_generate/generate")
    for name in names:
        (folder / f"{name}.py").write_text(source)
    config(auto_map={"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"})(folder)
    edited("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_own.Own"]})(folder)
    for function in (load, load_with_transformers, read_tokenizer):
        refusal(function, spec_of(folder))
    assert not marker.exists()


FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)


@holds_for(30, name=st.sampled_from(FILES), data=st.data())
def test_changed_files_give_a_model_or_a_sentence(valid: Path, name: str, data: st.DataObject) -> None:
    """Values of a JSON file, or of the header of the weights, are replaced, removed, repeated or moved."""
    content = (valid / name).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    is_header = name == WEIGHTS
    value = data.draw(changed(json.loads(content[8:end] if is_header else content)))
    text = json.dumps(value, default=str).encode()
    with tempfile.TemporaryDirectory() as where:
        folder = shutil.copytree(valid, Path(where) / "model")
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + content[end:] if is_header else text)
        for function in (load, read_tokenizer):
            refusal(function, spec_of(folder))


def test_other_files_are_not_read(folder: Path) -> None:
    expected = load(spec_of(folder)).model.embedding
    zeros = {name: torch.zeros_like(weight) for name, weight in load_file(folder / WEIGHTS).items()}
    for name in ("model-00001-of-00001.safetensors", "model_old.safetensors"):
        save_file(zeros, folder / name, {"format": "pt"})
    (folder / "corpus.json").touch()
    os.truncate(folder / "corpus.json", 1 << 33)
    assert torch.equal(load(spec_of(folder)).model.embedding, expected)


def test_wrong_tensors_are_named(folder: Path) -> None:
    without_layer(folder)
    extra = {"model.extra.weight": torch.zeros(2), HEAD: torch.zeros(7, 64)}
    save_file(load_file(folder / WEIGHTS) | extra, folder / WEIGHTS, {"format": "pt"})
    for function in (load_with_transformers, load):
        sentence = refusal(function, spec_of(folder))
        assert re.search(r"missing: (model\.layers\.1\.\S+, ){2}model\.layers\.1\.\S+ and 6 more", sentence)
        assert "unexpected: model.extra.weight" in sentence and f"of other shapes: {HEAD}" in sentence


def test_computed_and_tied_tensors_are_accepted(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tied", byte_level_tokenizer(), tie_word_embeddings=True)
    stored = load_file(folder / WEIGHTS)
    assert HEAD not in stored
    expected = CachedModel(load(spec_of(folder)).model).read([1, 2, 3])
    extra = {HEAD: stored[EMBEDDING].clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(stored | extra, folder / WEIGHTS, {"format": "pt"})
    assert torch.equal(CachedModel(load(spec_of(folder)).model).read([1, 2, 3]), expected)


@pytest.mark.parametrize("kind", ["marian", "t5gemma"])
def test_saved_encoder_decoders_have_all_tensors(kind: str, tmp_path: Path) -> None:
    from_config(ENCODERS[kind]).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    load_with_transformers(spec_of(tmp_path))


def run(folder: Path, prompt: str) -> str:
    """Return the refusal of a run, or an empty text."""
    recipe = Recipe(target=str(folder), method="ar", max_tokens=4, device="cpu")
    return refusal(lambda: list(trace_lines(recipe, prompt, ModelPool())))


def test_runs_with_wrong_token_ids_end_in_one_sentence(tmp_path: Path) -> None:
    folder = save_model(tmp_path, byte_level_tokenizer(), vocab_size=9)
    for prompt in ("def", "0"):
        assert "token ids of the model: choose another" in run(folder, prompt)


def test_unusual_tokenizers_run_or_end_in_one_sentence(folder: Path) -> None:
    valid = (folder / "tokenizer.json").read_text()
    slow_rule = {"type": "Split", "pattern": {"Regex": r"(a+)+$"}, "behavior": "Isolated", "invert": False}
    edited("tokenizer.json", pre_tokenizer=slow_rule)(folder)
    assert run(folder, "def add") == "" and "retry-limit" in run(folder, "a" * 40 + "b")
    (folder / "tokenizer.json").write_text(valid)
    edited("tokenizer_config.json", vocab_file="/etc/passwd")(folder)
    assert "no tokens" not in run(folder, "def add")
    edited("tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[])(folder)
    assert "no tokens" in run(folder, "def add")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder: os.truncate(folder / "tokenizer.json", 1_000_001), r"evil/model has .* MB, more than 1.0 MB"),
        (config(head_dim=15), "rotates 15 values of a head"),
    ],
    ids=["size of a file", "sizes in the configuration"],
)
def test_refused_models_are_not_downloaded(
    change: Change, sentence: str, valid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdemo.models.untrusted.MAX_TOKENIZER_BYTES", 1_000_000)
    change(shutil.copytree(valid, tmp_path / "served/evil/model"))
    with serving(tmp_path / "served") as server:
        with pytest.raises(UserError, match=sentence):
            load(ModelSpec("evil/model", device="cpu"), Hub(server.endpoint, tmp_path / "cache"))
        assert not server.gets(WEIGHTS)


def test_models_are_read_only_after_the_checks() -> None:
    sources = {path.name: path.read_text("utf-8") for path in (ROOT / "specdemo").rglob("*.py")}
    reading = {name for name, source in sources.items() if ".from_pretrained(" in source}
    assert reading == {"load.py", "llama_checkpoint.py", "tokenizer.py", "limited_process.py"}
    assert "apply_chat_template(" not in "".join(sources.values())


# --- numbers of config.json ---

VALUES = (0, -1, 1, 3, 1000, 65_536, 1 << 31, float("nan"), float("inf"))
MOST_WEIGHTS = 40_000_000
COMMON = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "dtype": "float32"}
SCALED = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0}
ROTATIONS = {
    "linear": {**SCALED, "rope_type": "linear"},
    "llama3": {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {**SCALED, "rope_type": "yarn", "attention_factor": 1.1, "beta_fast": 32.0, "beta_slow": 1.0},
}
FAMILIES: dict[str, dict[str, Any]] = {  # content of config.json
    name: {**config.to_dict(), **COMMON}
    for name, config in {
        **CONFIGS,
        **{kind: LlamaConfig(**LLAMA, rope_parameters=rotation) for kind, rotation in ROTATIONS.items()},
        "gemma2": Gemma2Config(**LLAMA, head_dim=8, query_pre_attn_scalar=8, sliding_window=8),
        "phi": PhiConfig(**LLAMA),
        "t5": ENCODERS["t5"],
    }.items()
}
FAMILIES["llama"]["architectures"] = ["LlamaForCausalLM"]  # read without transformers
FAMILIES["old names"] = {**FAMILIES["llama"], "rope_theta": 1e4, "partial_rotary_factor": 1.0}
FAMILIES["old names"] |= {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}

Numbers = tuple[str, dict[str, Any]]  # family and other numbers; keys of inner objects have a dot
ROPE = "rope_parameters.partial_rotary_factor"
# Many large heads with matrices of two rows or columns, which need little memory
MANY_HEADS = {"hidden_size": 2, "num_attention_heads": 4096, "num_key_value_heads": 1}

REFUSED: list[Numbers] = [
    ("linear", {ROPE: 4.0}),
    ("llama3", {ROPE: 0.5}),
    ("yarn", {ROPE: 0.5}),
    ("old names", {"partial_rotary_factor": 1000.0}),
    ("gpt-neox", {ROPE: 0.1}),
    ("gpt-neox", {ROPE: 2.0}),
    ("llama", {"head_dim": 15}),
    ("mistral-sliding", {"sliding_window": 0}),
    ("mistral-sliding", {**MANY_HEADS, "head_dim": 1024}),
    ("llama", {"hidden_size": 1 << 31}),
    ("llama", {"rms_norm_eps": float("nan")}),
]
RUNNING: list[Numbers] = [
    ("mistral-sliding", {**MANY_HEADS, "head_dim": 64}),
    ("mistral-sliding", {"head_dim": 4096}),
    ("mistral-sliding", {"sliding_window": (1 << 31) - 1}),
    ("llama", {"max_position_embeddings": 1 << 24}),
    ("gpt2", {"n_embd": 60, "n_head": 4}),
    ("qwen3", {"head_dim": 2}),
]


def changed_settings(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(FAMILIES[family]))
    for key, value in changes.items():
        outer, _, name = key.rpartition(".")
        inner = copied[outer] if outer else copied
        inner[name] = float(value) if isinstance(inner.get(name), float) else value
    return copied


def save(change: Numbers, folder: Path, matching: bool = True) -> ModelSpec:
    """Write a model with random weights. `matching`: of its sizes, if such a model exists and is small."""
    family, changes = change
    settings = changed_settings(family, changes)
    byte_level_tokenizer().save_pretrained(folder)
    for described in (FAMILIES[family], settings) if matching else (FAMILIES[family],):
        with suppress(Exception), torch.device("meta"):  # any exception of `transformers`
            model = from_config(AutoConfig.for_model(**json.loads(json.dumps(described))))
            if sum(weight.numel() for weight in model.parameters()) <= MOST_WEIGHTS:
                shapes = {name: weight.shape for name, weight in model.named_parameters()}
    source = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=source) * (0.1 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))
    return spec_of(folder)


def logits(spec: ModelSpec) -> Tensor:
    check_memory([plan_spec(spec, CONTEXT)])
    loaded = load(spec)
    if loaded.encoder:
        return torch.zeros(0)
    return CachedModel(loaded.model).read([i % loaded.vocab_size for i in (1, 2, 3)])


def check_numbers(change: Numbers, folder: Path, matching: bool = True) -> str:
    """Check that a model is refused with a sentence, which is returned, or has the logits of torch alone."""
    spec = save(change, folder, matching)
    results: list[Tensor] = []
    native = refusal(lambda: results.append(logits(spec)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        native_library.cache_clear()
        torch_alone = "" if native else refusal(lambda: results.append(logits(spec)))
    native_library.cache_clear()
    if torch_alone:  # too small for the check of architectures in transformers
        assert [*change[1].values()][0] in (1, 3), (change, torch_alone)
    elif not native:
        assert torch.allclose(*results, rtol=1e-4, atol=1e-4, equal_nan=True), change
    return native


def number_keys(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of all numbers; of inner objects with a dot."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from number_keys(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}"


def test_contradictions_are_refused_with_the_documented_sentences(tmp_path: Path) -> None:
    specs = [save(change, tmp_path / str(i), matching=False) for i, change in enumerate(REFUSED)]
    lengths = {f"{{arch}}.attention.{name}_length": 65_536 for name in ("key", "value")}
    specs.append(ModelSpec(str(save_gguf(tmp_path / "model.gguf", metadata=lengths)), device="cpu"))
    refusals = [refusal(load, spec) for spec in specs]
    assert all(refusals)
    table = (ROOT / "SECURITY.md").read_text("utf-8").partition("| file | refusal |")[2]
    documented = [row.split(" | ")[1].removesuffix(" |") for row in table.partition("\n\n")[0].splitlines()[2:]]
    assert len(documented) > 5 and not [text for text in documented if text not in " ".join(refusals)]


@pytest.mark.parametrize("change", RUNNING, ids=str)
def test_unusual_sizes_run_as_with_torch(change: Numbers, tmp_path: Path) -> None:
    assert not check_numbers(change, tmp_path)


EVERY = [(name, key, value) for name in FAMILIES for key in number_keys(FAMILIES[name]) for value in VALUES]


@holds_for(number=st.sampled_from(EVERY))
def test_changed_numbers_are_refused_or_run_as_with_torch(number: tuple[str, str, Any]) -> None:
    family, key, value = number
    with tempfile.TemporaryDirectory() as folder:
        check_numbers((family, {key: value}), Path(folder), matching=value in (1, 3))
