"""Loading of heads: published layouts give equal logits, and files that do not fit are refused in a sentence."""

from __future__ import annotations

import json
import warnings
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
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.cached_head import CachedHead
from specdemo.models.convert_head import convert_head
from specdemo.models.engines.head import Head, HeadCache
from specdemo.models.engines.llama_weights import LlamaWeights, layer_count
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.target_rows import embedding_rows, output_rows
from specdemo.models.engines.torch_head import TorchEagle3
from specdemo.models.heads import load_head, read_head
from specdemo.models.kv_cache import CachedModel
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


def test_eagle_heads_share_the_matrices_of_the_target(tmp_path: Path, target: LoadedModel) -> None:
    tensors, every = eagle_tensors(TARGET), torch.arange(TARGET.vocab_size)
    shared = load(save_head(tmp_path / "shared", tensors, eagle_config(TARGET)), target)
    tensors["embed_tokens.weight"] = embedding_rows(target.model, every)  # published heads contain a copy
    copied = load(save_head(tmp_path / "copied", tensors, eagle_config(TARGET)), target)
    torch.testing.assert_close(logits(shared), logits(copied), rtol=1e-3, atol=1e-3)
    assert (shared.kind, shared.taps) == ("eagle", (layer_count(target.model),))


def test_medusa_heads_are_counted_in_the_file(tmp_path: Path, target: LoadedModel) -> None:
    tensors = medusa_tensors(TARGET, IDS, heads=5)
    shared = load(save_head(tmp_path / "shared", tensors, medusa_config(draft_vocab_size=len(IDS))), target)
    rows = output_rows(target.model, torch.tensor(IDS))
    tensors |= {f"{i}.1.weight": rows.clone() for i in range(5)}
    own = load(save_head(tmp_path / "own", tensors, medusa_config(draft_vocab_size=len(IDS))), target)
    torch.testing.assert_close(logits(shared, draft=4), logits(own, draft=4), rtol=1e-4, atol=1e-4)
    assert (own.kind, own.taps, own.longest_draft(7)) == ("medusa", (layer_count(target.model),), 5)
    assert own.ids is not None and own.ids.tolist() == IDS and own.weight_bytes > shared.weight_bytes


def test_several_blocks_of_a_medusa_head_are_applied_in_turn(tmp_path: Path, target: LoadedModel) -> None:
    tensors = medusa_tensors(TARGET, heads=1, blocks=3, own=True)
    (row,) = logits(load(save_head(tmp_path, tensors, medusa_config(medusa_num_layers=3)), target), draft=0)
    x = torch.randn(7, 1, TARGET.hidden_size, generator=torch.Generator().manual_seed(5))[-1, 0]
    for block in range(3):
        x = x + torch.nn.functional.silu(x @ tensors[f"0.{block}.linear.weight"].T + tensors[f"0.{block}.linear.bias"])
    torch.testing.assert_close(row, tensors["0.3.weight"] @ x, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(("convert", "rows", "width"), [(NativeWeights, len(IDS) + 1024, 1), (LlamaWeights, 49, 4)])
def test_output_rows_of_a_text_are_reserved_bytes(
    convert: Callable[[Any], Any], rows: int, width: int, tmp_path: Path
) -> None:
    """A native head copies its output matrix for each text, with memory for 1,024 tokens."""
    target = target_of(convert(random_model(TARGET)))
    head = load(save_head(tmp_path, head_tensors(TARGET, IDS), head_config(TARGET, len(IDS))), target)
    cached = CachedModel(target.model, taps=head.taps)
    attached, tokens = CachedHead(head, cached), [*range(100, 150)]
    cached.score(tokens[:-1], Draft())
    assert attached.start(tokens) is not None
    before, cached.head = cached.reserved_bytes, attached
    cache: Any = attached._cache
    assert cached.reserved_bytes - before >= cache.kv.nbytes + rows * TARGET.hidden_size * width
    assert attached.kv_bytes < cache.kv.nbytes


def test_layers_are_inputs_and_lists_from_1_name_outputs(tmp_path: Path) -> None:
    deep = LlamaForCausalLM(LlamaConfig(**{**TARGET.to_dict(), "num_hidden_layers": 12})).eval()
    target = target_of(LlamaWeights(deep))

    def taps(listed: Any) -> tuple[int, ...]:
        folder = random_head(tmp_path / "head", TARGET, IDS, eagle_aux_hidden_state_layer_ids=listed)
        return load(folder, target).taps

    assert taps([2, 6, 9]) == taps([1, 5, 8]) == taps(None) == (2, 6, 9)


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


def test_rows_beyond_the_context_of_the_head_are_refused(tmp_path: Path, target: LoadedModel) -> None:
    head = load(random_head(tmp_path, TARGET, IDS, max_position_embeddings=8), target)
    logits(head, draft=1)
    with pytest.raises(ValueError, match="the head has 8 positions"):
        logits(head, draft=2)


def _without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda tensors, config: tensors.pop(name)


def _wide(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["fc.weight"] = torch.zeros(96, 3 * 96)


def _shifted(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"] + 1


def _unsorted(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"].flip(0)


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
    "no draft ids": (_without("d2t"), "has no tensor d2t"),
    "ids out of range": (_shifted, "d2t of .* leaves the 301 tokens of the target"),
    "ids out of order": (_unsorted, "d2t of .* leaves the 301 tokens"),
    "contradicting ids": (_contradiction, "t2d of .* contradicts d2t"),
    "integers": (_integers, "norm.weight of .* has type I32 instead of F32"),
    "layers": (_configured(eagle_aux_hidden_state_layer_ids=[2, 15, 27]), "states of layers that the target does not"),
    "texts": (_configured(eagle_aux_hidden_state_layer_ids="all"), "states of layers"),
    "sizes": (_configured(num_attention_heads=3, num_key_value_heads=2), "divides 3 heads among 2"),
    "no size": (_configured(intermediate_size=None), "config.json of .* has no intermediate_size"),
    "rotary embedding": (_configured(rope_scaling={"rope_type": "longrope"}), "rotary embedding of .* is not of kind"),
    "list of norms": (_configured(rms_norm_eps=[1e-5]), "choose another head"),
    "text instead of a layer": (_configured(transformer_layer_config="x"), "choose another head"),
    "list instead of a layer": (_configured(transformer_layer_config=[1]), "choose another head"),
    "rotary embedding without factor": (
        _configured(rope_scaling={"rope_type": "llama3", "rope_theta": 1e4}),
        "choose another head",
    ),
    "norm of states": (
        _configured(norm_before_fc=True),
        "has no tensor input_norm.weight: choose a head of kind EAGLE-3",
    ),
    "kind": (_configured(speculators_model_type="mtp"), r"head of another kind \(mtp\)"),
    "tensors of another kind": (_configured(medusa_num_heads=5), "has no tensor 0.0.linear.weight: choose a head of"),
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
    "medusa, gap": ("medusa", _without("1.0.linear.weight"), "has no tensor 1.0.linear.weight"),
    "medusa, vocabulary": ("medusa", _narrow, "0.1.weight of .* has shape 300 x 64 instead of 301 x 64: choose a head"),
    "medusa, no ids": ("medusa", _configured(draft_vocab_size=40), "instead of 40 x 64"),
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
    "eagle, missing": (
        "eagle",
        _without("layers.0.mlp.up_proj.weight"),
        "has no tensor layers.0.mlp.up_proj.weight: choose a head of kind EAGLE-1 or EAGLE-2",
    ),
    "eagle, norm": ("eagle", _input_norm, r"unknown to EAGLE-1 or EAGLE-2 \(layers.0.input_layernorm.weight\)"),
    "eagle, sizes": ("eagle", _configured(hidden_size="wide"), "config.json of .* is invalid .hidden_size is 'wide'"),
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


def test_unknown_tensors_are_refused(tmp_path: Path, target: LoadedModel) -> None:
    tensors = head_tensors(TARGET, IDS) | {"fc_norm.0.weight": torch.ones(64)}
    with pytest.raises(UserError, match=r"a tensor unknown to EAGLE-3 \(fc_norm.0.weight\)"):
        load(save_head(tmp_path, tensors, head_config(TARGET, len(IDS))), target)


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


@pytest.mark.parametrize(
    ("verifier", "name", "warned"),
    [
        ("org/Llama-3.1-8B-Instruct", "me/Llama-3.1-8B", True),
        ("org/Llama-3.1-8B-Instruct", "me/llama-3.1-8b-instruct", False),
        ("org/SmolLM2-135M-Instruct", "/files/SmolLM2-135M-Instruct.Q4_1.gguf", False),
        ("org/SmolLM2-135M", "/files/SmolLM2-135M-Instruct.Q4_1.gguf", True),
        ("", "me/any", False),
    ],
)
def test_another_verifier_causes_a_warning(verifier: str, name: str, warned: bool, tmp_path: Path) -> None:
    speculators = {"verifier": {"name_or_path": verifier, "architectures": []}}
    folder = random_head(tmp_path, TARGET, IDS, speculators_config=speculators)
    target = target_of(LlamaWeights(random_model(TARGET)), name)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        load(folder, target)
    assert [("was trained for" in str(warning.message)) for warning in seen] == [True] * warned


def test_targets_without_hidden_states_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(LlamaWeights(random_model(TARGET)))
    monkeypatch.setattr("specdemo.models.engines.llama.LlamaEngine.hidden_states", False)
    with pytest.raises(UserError, match="heads need hidden states, and LlamaWeights runs without them"):
        load(random_head(tmp_path, TARGET, IDS), target)


def test_config_of_the_trained_head_is_read(tmp_path: Path, target: LoadedModel) -> None:
    """The trainer writes `rope_parameters` and ties the output matrix."""
    rope = {"rope_theta": 100_000.0, "rope_type": "default"}
    folder = random_head(tmp_path, TARGET, IDS, rope_parameters=rope, tie_word_embeddings=True)
    head: Any = load(folder, target)
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"] == rope
    assert float(head.layer.frequencies[1]) == pytest.approx(100_000.0 ** (-2 / 8))
