"""Every number of config.json: refused with a sentence, or a run equal to the engine for torch."""

import faulthandler
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.gguf_models import save_gguf
from fakes.properties import holds_for
from fakes.refusals import refusal
from fakes.tiny_models import CONFIGS, CONTEXT, ENCODERS, LLAMA, byte_level_tokenizer, from_config
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, Gemma2Config, LlamaConfig, PhiConfig

from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load
from specdemo.models.memory_plan import check_memory, plan_spec
from specdemo.models.spec import ModelSpec
from specdemo.native.build import SWITCH, native_library

pytestmark = pytest.mark.slow

SECONDS = 120  # until the tests are ended because a model does not load
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

Change = tuple[str, dict[str, Any]]  # family and other numbers; keys of inner objects have a dot
ROPE = "rope_parameters.partial_rotary_factor"


def heads(count: int, head_dim: int) -> Change:
    """Model with matrices of two rows or columns, so that many large heads need little memory."""
    sizes = {"hidden_size": 2, "num_attention_heads": count, "num_key_value_heads": 1, "head_dim": head_dim}
    return "mistral-sliding", sizes


REFUSED: list[Change] = [
    *[(rotation, {ROPE: factor}) for rotation, factor in (("linear", 4.0), ("llama3", 0.5), ("yarn", 0.5))],
    ("old names", {"partial_rotary_factor": 1000.0}),
    *[("gpt-neox", {ROPE: share}) for share in (0.1, 2.0)],
    ("llama", {"head_dim": 15}),
    ("mistral-sliding", {"sliding_window": 0}),
    heads(4096, 1024),
    *[("llama", change) for change in ({"hidden_size": 1 << 31}, {"rms_norm_eps": float("nan")})],
]
RUNNING: list[Change] = [
    heads(4096, 64),
    ("mistral-sliding", {"head_dim": 4096}),
    ("mistral-sliding", {"sliding_window": (1 << 31) - 1}),
    ("llama", {"max_position_embeddings": 1 << 24}),
    ("gpt2", {"n_embd": 60, "n_head": 4}),
    ("qwen3", {"head_dim": 2}),
]


def changed_settings(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(FAMILIES[family]))
    for key, value in changes.items():
        *parents, name = key.split(".")
        inner = copied
        for parent in parents:
            inner = inner[parent]
        inner[name] = float(value) if isinstance(inner.get(name), float) else value
    return copied


def save(change: Change, folder: Path, matching: bool = True) -> ModelSpec:
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
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))
    return ModelSpec(str(folder), "float32", device="cpu").resolved()


def logits(spec: ModelSpec) -> Tensor:
    check_memory([plan_spec(spec, CONTEXT)])
    loaded = load(spec)
    if loaded.encoder:
        return torch.zeros(0)
    return CachedModel(loaded.model).read([i % loaded.vocab_size for i in (1, 2, 3)])


def runs(change: Change, folder: Path, matching: bool = True) -> bool:
    """Check that a model is refused with a sentence, or has the logits of torch alone."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    spec = save(change, folder, matching)
    found: list[Tensor] = []
    native = refusal(lambda: found.append(logits(spec)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        native_library.cache_clear()
        torch_alone = "" if native else refusal(lambda: found.append(logits(spec)))
    native_library.cache_clear()
    faulthandler.cancel_dump_traceback_later()
    if torch_alone:  # too small for the check of architectures in transformers
        assert [*change[1].values()][0] in (1, 3), (change, torch_alone)
    elif not native:
        assert torch.allclose(*found, rtol=1e-4, atol=1e-4, equal_nan=True), change
    return not native


def number_keys(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of all numbers; of inner objects with a dot."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from number_keys(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}"


def test_contradictions_are_refused_with_the_documented_sentences(tmp_path: Path) -> None:
    specs = []
    for i, change in enumerate(REFUSED):
        (tmp_path / str(i)).mkdir()
        specs.append(save(change, tmp_path / str(i), matching=False))
    lengths = {f"{{arch}}.attention.{name}_length": 65_536 for name in ("key", "value")}
    specs.append(ModelSpec(str(save_gguf(tmp_path / "model.gguf", metadata=lengths)), device="cpu"))
    refusals = [refusal(load, spec) for spec in specs]
    assert all(refusals)
    table = (Path(__file__).parents[2] / "SECURITY.md").read_text("utf-8").partition("| file | refusal |")[2]
    documented = [row.split(" | ")[1].removesuffix(" |") for row in table.partition("\n\n")[0].splitlines()[2:]]
    assert len(documented) > 5 and not [text for text in documented if text not in " ".join(refusals)]


@pytest.mark.parametrize("change", RUNNING, ids=str)
def test_unusual_sizes_run_as_with_torch(change: Change, tmp_path: Path) -> None:
    assert runs(change, tmp_path)


EVERY = [(name, key, value) for name in FAMILIES for key in number_keys(FAMILIES[name]) for value in VALUES]


@holds_for(number=st.sampled_from(EVERY))
def test_changed_numbers_are_refused_or_run_as_with_torch(number: tuple[str, str, Any]) -> None:
    family, key, value = number
    with tempfile.TemporaryDirectory() as folder:
        runs((family, {key: value}), Path(folder), matching=value in (1, 3))
