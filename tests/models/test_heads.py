"""Heads: published layouts give the logits of published programs, and files that do not fit are refused."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.heads import checkpoint, dflash_config, head_config, head_tensors, opened, random_head, save_head
from fakes.native_models import CONFIGS, config_of, dequantized, random_model, stored
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.core.errors import UserError
from specdemo.core.sampling import ChainSampler, Noise, SamplingParams
from specdemo.models import limited_process
from specdemo.models.cached_head import CachedHead, Head
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native import CHAIN_ROWS
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_matrix import WritableMatrix
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.head_kinds import TorchEagle3
from specdemo.models.heads import load_head
from specdemo.models.limited_process import LimitedProcess, convert_head
from specdemo.models.load import LoadedModel
from specdemo.models.memory import LargePageBuffer
from specdemo.models.spec import HeadSpec, ModelSpec
from specdemo.native.interface import FORMATS

NATIVE: Callable[..., Head] = partial(NativeHead, precision="float32")
TARGET = CONFIGS["llama"]
IDS = [*range(3, 40), 77, 300]


def target_of(model: Any, name: str = "small/target") -> LoadedModel:
    return LoadedModel(ModelSpec(name), model, None, 0, "native")


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return target_of(LlamaWeights(random_model(TARGET)))


@pytest.fixture(scope="module")
def native_target() -> LoadedModel:
    return target_of(NativeWeights(random_model(TARGET)))


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


DRAFTED = torch.tensor(IDS)
LAYER = dflash_config(TARGET, len(IDS))["transformer_layer_config"]


@pytest.mark.parametrize(
    ("kind", "tensors", "config", "message"),  # changes; None: without the tensor
    [
        ("eagle3", {"fc.weight": torch.zeros(96, 288)}, {}, "fc.weight of .* has shape 96 x 288 instead of 64 x 192"),
        ("eagle3", {"d2t": DRAFTED}, {}, "d2t of .* leaves the 301 tokens of the target"),
        ("eagle3", {"t2d": torch.zeros(301, dtype=torch.bool)}, {}, "t2d of .* contradicts d2t"),
        ("eagle3", {}, {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}, "states of layers that the target does not"),
        ("eagle3", {}, {"rope_scaling": {"rope_type": "longrope"}}, "rotary embedding of .* is not of kind"),
        ("medusa", {"2.0.linear.bias": None}, {}, "has no tensor 2.0.linear.bias: choose a head of kind"),
        ("dspark", {}, {"mask_token_id": 5000}, "has no mask token of the target"),
        ("dspark", {}, {"block_size": 999}, "block_size in config.json of .* is not within 1 to 64"),
        ("dspark", {}, {"markov_head_type": "rnn"}, r"another kind \(rnn\): choose one of kind vanilla"),
        (
            "dspark",
            {},
            {"transformer_layer_config": {**LAYER, "layer_types": ["full_attention"]}},
            "layer_types in config.json of .* do not fit",
        ),
    ],
)
def test_invalid_checkpoints_are_refused_in_a_sentence(
    kind: str, tensors: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path, target: LoadedModel
) -> None:
    valid, described = checkpoint(kind, TARGET, IDS)
    changed = {name: tensor for name, tensor in {**valid, **tensors}.items() if tensor is not None}
    with pytest.raises(UserError, match=message) as refused:
        load(save_head(tmp_path, changed, described | config), target)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def converter() -> Iterator[None]:
    """Use a process for all conversions, which imports torch once."""
    with (
        closing(LimitedProcess("specdemo.models.limited_process", "conversion")) as process,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(limited_process, "LimitedProcess", lambda *program: nullcontext(process))
        patch.setattr(limited_process, "closing", lambda process: process)
        yield


def test_damaged_files_are_refused(tmp_path: Path, target: LoadedModel) -> None:
    folder = random_head(tmp_path, TARGET, IDS)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(UserError, match="damaged"):
        load(folder, target)


@pytest.mark.slow
@pytest.mark.usefixtures("converter")
@pytest.mark.parametrize(("kind", "name"), [("eagle3", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt")])
def test_pickles_are_refused_and_converted(kind: str, name: str, tmp_path: Path, target: LoadedModel) -> None:
    """Blocks of published Medusa heads are the same module."""
    folder, source = tmp_path / "pickled", tmp_path / "pickled" / name
    tensors, config = checkpoint(kind, TARGET, IDS)
    tensors |= {key: tensors[f"0{key[1:]}"] for key in tensors if kind == "medusa" and ".linear." in key}
    expected = logits(load(save_head(folder, tensors, config), target))
    (folder / "model.safetensors").unlink()
    torch.save(tensors, source)
    for pickled in (folder, source):
        with pytest.raises(UserError, match="specdemo convert-head FILE DIRECTORY"):
            load(str(pickled), target)
    assert convert_head(source, tmp_path / "converted") == len(tensors)
    converted = load(str(tmp_path / "converted"), target)
    assert torch.equal(logits(converted), expected)
    assert kind != "medusa" or converted.longest_draft(7) == 3  # more than in config.json


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
    matrix.write(rows)
    assert (matrix.rows(torch.arange(len(rows))) - rows).norm() <= error * rows.norm()


# --- windows ---

WINDOW = 8
TEXT = [(31 * i) % 290 for i in range(1, 30)]


@pytest.fixture(scope="module", params=["native", "torch", "eagle", "medusa", "dflash"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, native_target: LoadedModel) -> Head:
    """Head whose rows see few rows: long prompts need no other rows, and drafts depend on the text alone."""
    make = {"native": NATIVE, "torch": TorchEagle3}.get(request.param)
    tensors, config = checkpoint("eagle3" if make else request.param, TARGET, IDS)
    name = save_head(tmp_path_factory.mktemp("head"), tensors, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Head, "window", WINDOW)
        head = load(name, native_target, make)
    head.window = WINDOW
    return head


def states_of_text(head: Head) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(len(TEXT), len(head.taps), TARGET.hidden_size, generator=generator)


def draft(text: CachedHead, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits of three draft tokens over the static vocabulary."""
    rows = [text.start(tokens), text.step(7), text.step(9)]
    return torch.stack([row[: len(IDS)].clone() for row in rows if row is not None])


def difference(head: Head, rows: torch.Tensor, tokens: Sequence[int], first: int) -> float:
    """Return the largest difference from a head that is given the text from `first` on, at positions from 0."""
    expected = draft(opened(head, states_of_text(head)[first:]), tokens[first:])
    return float((rows - expected).abs().max())


@pytest.mark.parametrize("length", [5, WINDOW + 1, WINDOW + 2, 21])
def test_drafts_of_a_prompt_need_the_rows_of_its_window(head: Head, length: int) -> None:
    text: Any = opened(head, states_of_text(head))
    first_rows: list[int] = []
    given = text.target.states

    def recorded(tokens: Sequence[int], start: int) -> torch.Tensor | None:
        first_rows.append(start)
        return given(tokens, start)

    text.target.states = recorded
    rows, first = draft(text, TEXT[:length]), max(0, length - 1 - WINDOW)
    assert first_rows == [first]
    assert difference(head, rows, TEXT[:length], first) < 1e-3
    cut = difference(head, rows, TEXT[:length], first + 1)
    assert (cut > 1e-2) is (head.kind != "medusa")


def test_texts_draft_alike_after_all_texts_before(head: Head) -> None:
    """Answers and turns continue rows, edits end before the window; missing rows extend the draft vocabulary."""
    text = opened(head, states_of_text(head))
    for length in (6, 9, 12, 13, 27, 29, 26, 14, 5, 7, 28, 4):
        rows = draft(text, TEXT[:length])
        exact = isinstance(head, NativeHead)
        assert difference(head, rows, TEXT[:length], 0) <= (0 if exact else 1e-4), length
        if head.extends:
            assert text.ids.tolist() == [*IDS, *(token for token in [*TEXT[1:length], 7, 9] if token not in IDS)]


def test_rows_without_logits_store_the_same_keys_and_values(tmp_path: Path, native_target: LoadedModel) -> None:
    head = load(random_head(tmp_path, TARGET, IDS), native_target, NativeHead)
    by_token, at_once = opened(head, states_of_text(head)), opened(head, states_of_text(head))
    by_token.start(TEXT)
    sampler = ChainSampler(SamplingParams(temperature=0), Noise(1, "draft"), len(TEXT), TARGET.vocab_size)
    assert len(at_once.sample_chain(TEXT, sampler, [0.0])) == 1
    assert len(TEXT) > CHAIN_ROWS + 1 and by_token.cache.kv.any()
    assert torch.equal(by_token.cache.kv, at_once.cache.kv)


# --- recordings of published programs, see `fixtures/` ---

FIXTURES = Path(__file__).parent / "fixtures" / "published_heads"
SMALL = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}


def recorded_head(
    name: str, folder: Path, make: Callable[..., Head] | None = None, **changes: Any
) -> tuple[dict[str, torch.Tensor], Head]:
    """Return the recorded outputs of a published program, and its head for a small target, saved in `folder`."""
    with safe_open(FIXTURES / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config.json"]) | changes
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    weights, recorded = (
        {key.removeprefix(part): tensor for key, tensor in tensors.items() if key.startswith(part)}
        for part in ("model.", "outputs.")
    )
    model = LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=4, num_hidden_layers=8, vocab_size=20)).eval()
    if "output" in recorded:
        model.lm_head.weight.data = recorded["output"]
    if "embeddings" in recorded:
        model.model.embed_tokens.weight.data = recorded["embeddings"]
    return recorded, load(save_head(folder, weights, config), target_of(NativeWeights(model)), make)


def check(recorded: dict[str, torch.Tensor], head: Head, key: str, taps: tuple[int, ...]) -> None:
    """Draft from every row: committed rows, then tokens of the text."""
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
    recorded, head = recorded_head("speculators_eagle3", tmp_path, make, norm_before_residual=before)
    check(recorded, head, "logits, {'norm_before_residual': True}" if before else "logits, {}", (2, 3, 5))


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_block_heads_of_speculators(name: str, tmp_path: Path) -> None:
    """Recorded after each token from the second on; rows of a DFlash block after the first draft."""
    recorded, head = recorded_head(f"speculators_{name}", tmp_path)
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
def test_published_heads(name: str, make: Callable[..., Head] | None, taps: tuple[int, ...], tmp_path: Path) -> None:
    recorded, head = recorded_head(name, tmp_path, make)
    (key,) = (key for key in recorded if key.startswith("logits"))
    check(recorded, head, key, taps)
