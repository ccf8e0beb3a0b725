"""Heads: published layouts give the logits of published programs, and files that do not fit are refused."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.heads import (
    checkpoint,
    head_config,
    head_tensors,
    medusa_config,
    opened,
    random_head,
    save_head,
)
from fakes.native_models import CONFIGS, config_of, dequantized, random_model, stored
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.core.errors import UserError
from specdemo.models.cached_head import CachedHead, Head
from specdemo.models.convert_head import convert_head
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_matrix import WritableMatrix
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.head_kinds.eagle import TorchEagle3
from specdemo.models.heads import load_head
from specdemo.models.limited_process import LimitedProcess
from specdemo.models.load import LoadedModel
from specdemo.models.memory import LargePageBuffer
from specdemo.models.spec import HeadSpec, ModelSpec
from specdemo.native.formats import FORMATS

TARGET = CONFIGS["llama"]
IDS = [*range(3, 40), 77, 300]


def target_of(model: Any, name: str = "small/target") -> LoadedModel:
    return LoadedModel(ModelSpec(name), model, None, 0, "native")


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return target_of(LlamaWeights(random_model(TARGET)))


def load(folder: str, target: LoadedModel, make: Any = None) -> Head:
    return load_head(HeadSpec(folder, target.spec), target, make=make)


def logits(head: Head, draft: int = 2) -> torch.Tensor:
    """Return the logits after seven committed rows and `draft` draft rows."""
    states = torch.randn(7, len(head.taps), TARGET.hidden_size, generator=torch.Generator().manual_seed(5))
    text = opened(head, states)
    rows = [text.start([1, 5, 9, 2, 77, 3, 300, 8])]
    rows += [text.step(7 + i) for i in range(draft)]
    return torch.stack(rows)


@pytest.mark.parametrize("ids", [IDS, None], ids=["draft vocabulary", "all tokens"])
def test_missing_matrices_are_the_rows_of_the_target(
    tmp_path: Path, target: LoadedModel, ids: list[int] | None
) -> None:
    tensors, config = head_tensors(TARGET, ids), head_config(TARGET, len(ids or range(TARGET.vocab_size)))
    shared = load(save_head(tmp_path / "shared", tensors, config), target)
    every = torch.arange(TARGET.vocab_size)
    tensors["lm_head.weight"] = target.model.output_rows(every if ids is None else torch.tensor(ids))
    tensors["embed_tokens.weight"] = target.model.embedding_rows(every)
    own = load(save_head(tmp_path / "own", tensors, config), target)
    size = len(ids or every)
    torch.testing.assert_close(logits(shared)[:, :size], logits(own), rtol=1e-5, atol=1e-5)
    assert logits(shared).shape[1] == size + (ids is not None)  # token 2 of the text extends the draft vocabulary
    assert shared.weight_bytes < own.weight_bytes


@pytest.mark.parametrize("form", ["Q4_1", "Q6_K"])
def test_rows_of_stored_matrices_are_those_of_their_floats(form: str) -> None:
    ids, model = torch.tensor([300, 0, 17]), stored(form, random_model(config_of("tied", form)))
    weights = NativeWeights(model)
    expected = dequantized(model).lm_head.weight[ids]
    for rows in (weights.embedding_rows(ids), weights.output_rows(ids)):
        assert (rows - expected).abs().max() < 1e-6
    with pytest.raises(IndexError, match="no output 301"):
        weights.output_rows(torch.tensor([301]))


def test_texts_that_draft_in_turn_are_independent(tmp_path: Path) -> None:
    """A head in C, compared with torch, whose texts draft one after the other."""
    target = target_of(NativeWeights(random_model(TARGET)))
    name = random_head(tmp_path, TARGET, IDS)
    native, torch_head = (load(name, target, make) for make in (NATIVE, TorchEagle3))
    states = torch.randn(2, 4, len(native.taps), TARGET.hidden_size, generator=torch.Generator().manual_seed(6))

    def begun(head: Head, i: int) -> tuple[CachedHead, list[torch.Tensor]]:
        text = opened(head)
        return text, [text.start_rows([5, 9, i, 77], states[i], 0)[: len(IDS)].clone()]

    tokens, in_turn = (7, 8, 9), [begun(native, text) for text in range(2)]
    for token in tokens:
        for text, rows in in_turn:
            rows.append(text.step(token)[: len(IDS)].clone())
    for i, (_, rows) in enumerate(in_turn):
        text, expected = begun(torch_head, i)
        expected += [text.step(token)[: len(IDS)] for token in tokens]
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


Change = Callable[[dict[str, Any], dict[str, Any]], Any]  # of tensors and configuration


def _without(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name)


def _replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, config: tensors.update({name: change(tensors[name])})


def _configured(**changes: Any) -> Change:
    return lambda tensors, config: config.update(changes)


def _layer(**changes: Any) -> Change:
    return lambda tensors, config: config["transformer_layer_config"].update(changes)


WIDE = torch.zeros(96, 288)
INVALID: list[tuple[str, Change, str]] = [  # kind, change and refusal
    (
        "eagle3",
        _replaced("fc.weight", lambda x: WIDE),
        r"fc.weight of .* has shape 96 x 288 instead of 64 x 192",
    ),
    ("eagle3", _replaced("d2t", lambda x: x + 1), "d2t of .* leaves the 301 tokens of the target"),
    ("eagle3", _replaced("t2d", lambda x: x.roll(1)), "t2d of .* contradicts d2t"),
    ("eagle3", _configured(eagle_aux_hidden_state_layer_ids=[2, 15, 27]), "states of layers that the target does not"),
    ("eagle3", _configured(rope_scaling={"rope_type": "longrope"}), "rotary embedding of .* is not of kind"),
    ("medusa", _without("2.0.linear.bias"), "has no tensor 2.0.linear.bias: choose a head of kind"),
    ("dspark", _configured(mask_token_id=5000), "has no mask token of the target"),
    ("dspark", _configured(block_size=999), "block_size in config.json of .* is not within 1 to 64"),
    ("dspark", _configured(markov_head_type="rnn"), r"another kind \(rnn\): choose one of kind vanilla"),
    ("dspark", _layer(layer_types=["full_attention"]), "layer_types in config.json of .* do not fit"),
]


@pytest.mark.parametrize(("kind", "change", "message"), INVALID)
def test_invalid_checkpoints_are_refused_in_a_sentence(
    kind: str, change: Change, message: str, tmp_path: Path, target: LoadedModel
) -> None:
    tensors, config = checkpoint(kind, TARGET, IDS)
    change(tensors, config)
    with pytest.raises(UserError, match=message) as refused:
        load(save_head(tmp_path / "invalid", tensors, config), target)
    assert "\n" not in str(refused.value)


class KeptProcess(LimitedProcess):
    """Process that serves several conversions; it imports torch once."""

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def converter() -> Iterator[None]:
    process = KeptProcess("specdemo.models.convert_head")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdemo.models.convert_head.LimitedProcess", lambda module: process)
        yield
    LimitedProcess.close(process)


@pytest.mark.slow
@pytest.mark.usefixtures("converter")
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
@pytest.mark.usefixtures("converter")
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
@pytest.mark.usefixtures("converter")
@pytest.mark.parametrize("content", ["code", "number"])
def test_hostile_pickles_are_not_converted(content: str, tmp_path: Path) -> None:
    touched, source = tmp_path / "touched", tmp_path / "head.pt"
    torch.save({"a": _Hostile(touched) if content == "code" else 1}, source)
    with pytest.raises(UserError, match=r"the conversion of .*head.pt failed \(.*\): choose another file"):
        convert_head(source, tmp_path / "out")
    assert not touched.exists() and not (tmp_path / "out" / "model.safetensors").exists()


def test_targets_without_hidden_states_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(LlamaWeights(random_model(TARGET)))
    monkeypatch.setattr("specdemo.models.engines.llama.LlamaEngine.hidden_states", False)
    with pytest.raises(UserError, match="heads need hidden states, and LlamaWeights runs without them"):
        load(random_head(tmp_path, TARGET, IDS), target)


@pytest.mark.parametrize(("form", "error"), [("F32", 0.0), ("INT8", 0.01), ("Q8_0", 0.007), ("Q4_0", 0.085)])
def test_matrices_store_rows_with_small_errors(form: str, error: float) -> None:
    """A scale of four bits that is always an eighth of the largest number has an error of 0.087."""
    rows = torch.randn(70, 96, generator=torch.Generator().manual_seed(0))
    matrix = WritableMatrix(len(rows), 96, FORMATS[form], LargePageBuffer())
    matrix.write(rows[:40])
    matrix.write(rows[40:], 40)
    assert (matrix.rows(torch.arange(len(rows))) - rows).norm() <= error * rows.norm()


# --- recordings of published programs, see `fixtures/` ---

FIXTURES = Path(__file__).parent / "fixtures" / "published_heads"
NATIVE: Callable[..., Head] = partial(NativeHead, form="float32")
SMALL = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}


def recorded_head(folder: Path, make: Callable[..., Head] | None = None) -> tuple[dict[str, torch.Tensor], Head]:
    """Return the outputs recorded in `folder` and its head for a small target."""
    recorded = load_file(folder / "outputs.safetensors")
    model = LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=4, num_hidden_layers=8, vocab_size=20)).eval()
    if "output" in recorded:
        model.lm_head.weight.data = recorded["output"]
    if "embeddings" in recorded:
        model.model.embed_tokens.weight.data = recorded["embeddings"]
    weights, spec = NativeWeights(model), ModelSpec("small/target")
    return recorded, load(str(folder), LoadedModel(spec, weights, None, 0, "native"), make)


def check(folder: Path, make: Callable[..., Head] | None, key: str, taps: tuple[int, ...]) -> None:
    """Draft from every row: committed rows, then tokens of the text."""
    recorded, head = recorded_head(folder, make)
    tokens, states, text = recorded["tokens"].tolist(), recorded["states"], opened(head)
    expected, steps = recorded[key], len(recorded[key])
    rounding = 1e-4 + 1e-5 * float(expected.abs().max())  # random weights of EAGLE give logits of several hundred
    for rows in range(1, len(tokens) - steps + 2):
        logits = [text.start_rows(tokens[:rows], states[:rows], 0)]
        logits += [text.step(token) for token in tokens[rows : rows + steps - 1]]
        torch.testing.assert_close(torch.stack(logits), expected[:, rows - 1], rtol=1e-3, atol=rounding)
    assert head.taps == taps


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("make", [NATIVE, TorchEagle3])
def test_speculators(make: Callable[..., Head], before: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "speculators_eagle3", tmp_path / "head")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_before_residual": before}))
    check(folder, make, "logits, {'norm_before_residual': True}" if before else "logits, {}", (2, 3, 5))


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_block_heads_of_speculators(name: str) -> None:
    """Recorded after each token from the second on; rows of a DFlash block after the first draft."""
    folder = FIXTURES / f"speculators_{name}"
    recorded, head = recorded_head(folder)
    tokens, states, text = recorded["tokens"].tolist(), recorded["states"], opened(head)
    first = 1 if name == "dflash" else 0
    for row, expected in enumerate(recorded["logits"]):
        following = tokens[1 : row + 2]
        logits, confidences = [text.start_rows(following, states[: row + 1], 0)], [text.confidence]
        for token in tokens[row + 2 : row + len(expected) - first + 1]:
            logits.append(text.step(token))
            confidences.append(text.confidence)
        assert len(logits) == head.longest_draft(len(following) + 1) == len(expected) - first
        torch.testing.assert_close(torch.stack(logits), expected[first:], rtol=1e-3, atol=1e-4)
        if "confidences" in recorded:
            torch.testing.assert_close(torch.tensor(confidences), recorded["confidences"][row], rtol=1e-3, atol=1e-4)
    assert head.kind == "block" and head.taps == (2, 3, 5)


@pytest.mark.parametrize(
    ("name", "make", "taps"),
    [
        ("eagle3", NATIVE, (2, 4, 5)),
        ("eagle3", TorchEagle3, (2, 4, 5)),
        ("speculators_eagle3_input_norm", None, (2, 3, 5)),
        ("speculators_eagle3_output_norm", None, (2, 3, 5)),
        ("eagle", None, (8,)),  # the final state
        ("medusa", None, (8,)),
    ],
)
def test_published_heads(name: str, make: Callable[..., Head] | None, taps: tuple[int, ...]) -> None:
    folder = FIXTURES / name
    (key,) = (key for key in load_file(folder / "outputs.safetensors") if key.startswith("logits"))
    check(folder, make, key, taps)
