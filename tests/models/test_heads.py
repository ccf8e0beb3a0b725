"""Loading of heads: published layouts give equal logits, and files that do not fit are refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.heads import (
    dflash_config,
    dflash_tensors,
    eagle_config,
    eagle_tensors,
    head_config,
    head_tensors,
    medusa_config,
    medusa_tensors,
    random_head,
    save_head,
)
from fakes.native_models import CONFIGS, config_of, dequantized, random_model, stored
from transformers import LlamaConfig

from specdemo.core.errors import UserError
from specdemo.models.convert_head import convert_head
from specdemo.models.engines.head import Head, HeadCache
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.target_rows import embedding_rows, output_rows
from specdemo.models.engines.torch_head import TorchEagle3
from specdemo.models.heads import load_head, read_head
from specdemo.models.load import LoadedModel
from specdemo.models.spec import HeadSpec, ModelSpec

TARGET = CONFIGS["llama"]
IDS = [*range(3, 40), 77, 300]


def target_of(model: Any, name: str = "small/target") -> LoadedModel:
    return LoadedModel(ModelSpec(name), model, None, 0, "native")


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return target_of(LlamaWeights(random_model(TARGET)))


def load(folder: str, target: LoadedModel) -> Head:
    return load_head(HeadSpec(folder, target.spec), target).head


def logits(head: Head, draft: int = 2) -> torch.Tensor:
    """Return the logits after seven committed rows and `draft` draft rows."""
    states = torch.randn(7, len(head.taps), TARGET.hidden_size, generator=torch.Generator().manual_seed(5))
    cache = head.open()
    rows = [head.start(cache, [5, 9, 2, 77, 3, 300, 8], states, 0)]
    rows += [head.step(cache, 7 + i) for i in range(draft)]
    return torch.stack(rows)


def test_layouts_of_both_publishers_are_the_same_head(tmp_path: Path, target: LoadedModel) -> None:
    tensors, config = head_tensors(TARGET, IDS, own=("lm_head",)), head_config(TARGET, len(IDS))
    published = load(save_head(tmp_path / "a", tensors, config), target)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    nested = {name: config[name] for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    nested |= {"speculators_model_type": "eagle3", "transformer_layer_config": config, "norm_before_residual": False}
    speculators = load(save_head(tmp_path / "b", renamed, nested), target)
    assert torch.equal(logits(published), logits(speculators))
    assert published.ids is not None and published.ids.tolist() == IDS
    other = load(save_head(tmp_path / "c", renamed, {**nested, "norm_before_residual": True}), target)
    assert not torch.allclose(logits(published), logits(other), atol=0.1)


@pytest.mark.parametrize("ids", [IDS, None], ids=["draft vocabulary", "all tokens"])
def test_missing_matrices_are_the_rows_of_the_target(
    tmp_path: Path, target: LoadedModel, ids: list[int] | None
) -> None:
    tensors, config = head_tensors(TARGET, ids), head_config(TARGET, len(ids or range(TARGET.vocab_size)))
    shared = load(save_head(tmp_path / "shared", tensors, config), target)
    every = torch.arange(TARGET.vocab_size)
    tensors["lm_head.weight"] = output_rows(target.model, every if ids is None else torch.tensor(ids))
    tensors["embed_tokens.weight"] = embedding_rows(target.model, every)
    own = load(save_head(tmp_path / "own", tensors, config), target)
    size = len(ids or every)
    torch.testing.assert_close(logits(shared)[:, :size], logits(own), rtol=1e-5, atol=1e-5)
    assert logits(shared).shape[1] == size + (ids is not None)  # token 2 of the text extends the draft vocabulary
    assert shared.weight_bytes < own.weight_bytes


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "Q6_K"])
def test_rows_of_stored_matrices_are_those_of_their_floats(form: str) -> None:
    ids, model = torch.tensor([300, 0, 17]), stored(form, random_model(config_of("tied", form)))
    weights = NativeWeights(model)
    expected = dequantized(model).lm_head.weight[ids]
    for rows in (weights.embedding_rows(ids), weights.output_rows(ids)):
        assert (rows - expected).abs().max() < 1e-6
    with pytest.raises(IndexError, match="no output 301"):
        weights.output_rows(torch.tensor([301]))


def test_rows_are_equal_in_all_engines() -> None:
    model = random_model(TARGET)
    ids = torch.tensor([4, 4, 250])
    for rows in (embedding_rows, output_rows):
        expected = rows(model, ids)
        assert torch.equal(rows(NativeWeights(model), ids), expected)
        assert torch.equal(rows(LlamaWeights(model), ids), expected)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dspark"])
def test_a_cache_that_grows_overwrites_its_former_memory(kind: str, tmp_path: Path, target: LoadedModel) -> None:
    tensors, config = {
        "eagle": lambda: (eagle_tensors(TARGET), eagle_config(TARGET)),
        "eagle3": lambda: (head_tensors(TARGET, IDS), head_config(TARGET, len(IDS))),
        "dspark": lambda: (dflash_tensors(TARGET, IDS, True), dflash_config(TARGET, len(IDS), True)),
    }[kind]()
    head = load(save_head(tmp_path, tensors, config), target)
    cache: Any = head.open()
    states = torch.randn(400, len(head.taps), TARGET.hidden_size)
    head.start(cache, [5] * 20, states[:20], 0)
    former = cache.kv
    head.start(cache, [5] * 380, states[20:], 20)
    assert cache.kv is not former and not former.any()


def test_texts_that_draft_in_turn_are_independent(tmp_path: Path) -> None:
    """A head in C, compared with torch, whose texts draft one after the other."""
    target = target_of(NativeWeights(random_model(TARGET)))
    name = save_head(tmp_path, head_tensors(TARGET, IDS), head_config(TARGET, len(IDS)))
    kinds = (partial(NativeHead, form="float32"), TorchEagle3)
    native, torch_head = (make(read_head(HeadSpec(name, target.spec), target), target.model) for make in kinds)
    states = torch.randn(2, 4, len(native.taps), TARGET.hidden_size, generator=torch.Generator().manual_seed(6))

    def begun(head: Head, text: int) -> tuple[HeadCache, list[torch.Tensor]]:
        cache = head.open()
        return cache, [head.start(cache, [5, 9, text, 77], states[text], 0)[: len(IDS)].clone()]

    tokens, in_turn = (7, 8, 9), [begun(native, text) for text in range(2)]
    for token in tokens:
        for cache, rows in in_turn:
            rows.append(native.step(cache, token)[: len(IDS)].clone())
    for text, (_, rows) in enumerate(in_turn):
        cache, expected = begun(torch_head, text)
        expected += [torch_head.step(cache, token)[: len(IDS)] for token in tokens]
        torch.testing.assert_close(torch.stack(rows), torch.stack(expected), rtol=1e-3, atol=1e-4)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16, "factor": 8.0}


@pytest.mark.parametrize("rope", [None, {"rope_type": "llama3", **LLAMA3}, {"rope_type": "linear", "factor": 3.0}])
def test_positions_are_rotated_like_those_of_transformers(tmp_path: Path, target: LoadedModel, rope: Any) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = head_config(TARGET, len(IDS), rope_scaling=rope, rope_theta=5_000.0)
    head: Any = load(save_head(tmp_path, head_tensors(TARGET, IDS), config), target)
    parameters = {**(rope or {"rope_type": "default"}), "rope_theta": 5_000.0}
    known = {name: config[name] for name in ("hidden_size", "num_attention_heads", "head_dim")}
    oracle = LlamaRotaryEmbedding(LlamaConfig(**known, rope_parameters=parameters, max_position_embeddings=512))
    expected = oracle(torch.empty(0), torch.arange(500)[None])
    for ours, theirs in zip(head.layer.rotation(500), expected, strict=True):
        assert (ours - theirs[0, :, : ours.shape[1]]).abs().max() < 1e-4


def _without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda tensors, config: tensors.pop(name)


def _wide(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["fc.weight"] = torch.zeros(96, 3 * 96)


def _shifted(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"] + 1


def _contradiction(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


def _integers(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].int()


def _configured(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda tensors, config: config.update(changes)


INVALID = {
    "another target": (_wide, r"fc.weight of .* has shape 96 x 288 instead of 64 x 192: choose a head for this"),
    "vocabulary": (_configured(draft_vocab_size=30), r"d2t of .* has shape 39 instead of 30"),
    "missing": (
        _without("midlayer.hidden_norm.weight"),
        "has no tensor midlayer.hidden_norm.weight: choose",
    ),
    "ids out of range": (_shifted, "d2t of .* leaves the 301 tokens of the target"),
    "contradicting ids": (_contradiction, "t2d of .* contradicts d2t"),
    "integers": (_integers, "norm.weight of .* has type I32 instead of F32"),
    "layers": (_configured(eagle_aux_hidden_state_layer_ids=[2, 15, 27]), "states of layers that the target does not"),
    "sizes": (_configured(num_attention_heads=3, num_key_value_heads=2), "divides 3 heads among 2"),
    "rotary embedding": (_configured(rope_scaling={"rope_type": "longrope"}), "rotary embedding of .* is not of kind"),
    "list of norms": (_configured(rms_norm_eps=[1e-5]), "choose another head"),
    "kind": (_configured(speculators_model_type="mtp"), r"head of another kind \(mtp\)"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_checkpoints_are_refused_in_a_sentence(case: str, tmp_path: Path, target: LoadedModel) -> None:
    change, message = INVALID[case]
    tensors, config = head_tensors(TARGET, IDS), head_config(TARGET, len(IDS))
    load(save_head(tmp_path / "valid", tensors, config), target)
    change(tensors, config)
    with pytest.raises(UserError, match=message) as refused:
        load(save_head(tmp_path / "invalid", tensors, config), target)
    assert "\n" not in str(refused.value)


def _narrow(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["0.1.weight"] = torch.zeros(300, 64)


def _input_norm(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["layers.0.input_layernorm.weight"] = torch.ones(64)


INVALID_KINDS = {
    "medusa, missing": ("medusa", _without("2.0.linear.bias"), "has no tensor 2.0.linear.bias: choose a head of kind"),
    "medusa, vocabulary": ("medusa", _narrow, "0.1.weight of .* has shape 300 x 64 instead of 301 x 64: choose a head"),
    "medusa, base model": (
        "medusa",
        lambda tensors, config: tensors.update({"model.norm.weight": torch.ones(64)}),
        r"a tensor unknown to Medusa \(model.norm.weight\)",
    ),
    "eagle, another target": (
        "eagle",
        lambda tensors, config: tensors.update({"fc.weight": torch.zeros(96, 192)}),
        "fc.weight of .* has shape 96 x 192 instead of 64 x 128: choose a head for this target",
    ),
    "eagle, norm": ("eagle", _input_norm, r"unknown to EAGLE-1 or EAGLE-2 \(layers.0.input_layernorm.weight\)"),
}


@pytest.mark.parametrize("case", INVALID_KINDS)
def test_invalid_checkpoints_of_other_kinds_are_refused(case: str, tmp_path: Path, target: LoadedModel) -> None:
    kind, change, message = INVALID_KINDS[case]
    tensors, config = {
        "medusa": (medusa_tensors(TARGET, own=True), medusa_config()),
        "eagle": (eagle_tensors(TARGET), eagle_config(TARGET)),
    }[kind]
    load(save_head(tmp_path / "valid", tensors, config), target)
    change(tensors, config)
    with pytest.raises(UserError, match=message) as refused:
        load(save_head(tmp_path / "invalid", tensors, config), target)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_pickled_medusa_heads_are_converted(tmp_path: Path, target: LoadedModel) -> None:
    """Blocks of published heads are the same module."""
    block = torch.nn.Module()
    block.linear = torch.nn.Linear(64, 64)
    heads = torch.nn.ModuleList(
        torch.nn.Sequential(block, block, torch.nn.Linear(64, 301, bias=False)) for _ in range(2)
    )
    source = tmp_path / "pickled" / "medusa_lm_head.pt"
    source.parent.mkdir()
    torch.save(heads.state_dict(), source)
    (source.parent / "config.json").write_text(json.dumps(medusa_config()))
    with pytest.raises(UserError, match="specdemo convert-head FILE DIRECTORY"):
        load(str(source.parent), target)
    assert convert_head(source, tmp_path / "converted") == 10
    assert load(str(tmp_path / "converted"), target).longest_draft(7) == 2


def test_damaged_files_are_refused(tmp_path: Path, target: LoadedModel) -> None:
    folder = random_head(tmp_path, TARGET, IDS)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(UserError, match="damaged"):
        load(folder, target)


@pytest.mark.slow
def test_pickles_are_refused_and_converted_without_running_them(tmp_path: Path, target: LoadedModel) -> None:
    folder, source = tmp_path / "pickled", tmp_path / "pickled" / "pytorch_model.bin"
    expected = logits(load(random_head(folder, TARGET, IDS), target))
    (folder / "model.safetensors").unlink()
    torch.save(head_tensors(TARGET, IDS), source)
    for name in (folder, source):
        with pytest.raises(UserError, match="specdemo convert-head FILE DIRECTORY"):
            load(str(name), target)
    assert convert_head(source, tmp_path / "converted") == 14
    assert torch.equal(logits(load(str(tmp_path / "converted"), target)), expected)


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.slow
@pytest.mark.parametrize("content", ["code", "list", "number", "text"])
def test_hostile_pickles_are_not_converted(content: str, tmp_path: Path) -> None:
    touched, source = tmp_path / "touched", tmp_path / "head.pt"
    values = {"code": {"a": _Hostile(touched)}, "list": [1], "number": {"a": 1}}
    if content == "text":
        source.write_text("no pickle")
    else:
        torch.save(values[content], source)
    with pytest.raises(UserError, match=r"the conversion of .*head.pt failed \(.*\): choose another file"):
        convert_head(source, tmp_path / "out")
    assert not touched.exists() and not (tmp_path / "out" / "model.safetensors").exists()


def test_targets_without_hidden_states_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(LlamaWeights(random_model(TARGET)))
    monkeypatch.setattr("specdemo.models.engines.llama.LlamaEngine.hidden_states", False)
    with pytest.raises(UserError, match="heads need hidden states, and LlamaWeights runs without them"):
        load(random_head(tmp_path, TARGET, IDS), target)
