"""GGUF files: weights, tokenizer and text equal those of the model they were written from."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from fakes.gguf_models import save_gguf, tiny_for_gguf, width_for, write_gguf
from fakes.hub_server import StandIn, serving
from fakes.tiny_models import TEMPLATE, TEXTS, byte_level_tokenizer, sentencepiece_tokenizer
from fakes.traces import run_of
from transformers import PreTrainedModel

from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.models.chat_prompt import read_prompt
from specdemo.models.engines.gguf_linear import FLOATS, GgufLinear, dequantised
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.select import engine_of
from specdemo.models.gguf_checkpoint import read_gguf
from specdemo.models.hub import Hub
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel, load, load_with_transformers, read_tokenizer
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import check_pair, fingerprint
from specdemo.native.interface import QUANTISED_GGUF
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q5_0")
IDS = [1, 5, 9, 33, 200, 7]


def spec_of(path: Path, dtype: str = "float32") -> ModelSpec:
    return ModelSpec(str(path), dtype, device="cpu")


def is_expanded(kind: str) -> bool:
    """Return True if the native engine expands matrices of this type to bfloat16."""
    return kind not in (*FLOATS, *QUANTISED_GGUF)


def written(
    path: Path, architecture: str, kind: Any, dtype: str = "float32", config: Any = None, **options: Any
) -> PreTrainedModel:
    """Write a random model; return the `transformers` model with the weights that the engine computes with.

    `dtype`: of the matrices that the engine expands.
    """
    tokenizer = byte_level_tokenizer()
    model = tiny_for_gguf(architecture, tokenizer, width=width_for(kind), **(config or {}))
    weights = write_gguf(path, model, tokenizer, kind, **options)
    rounded = {name: weight.to(getattr(torch, dtype)).float() for name, weight in weights.items() if weight.ndim > 1}
    model.load_state_dict(weights | rounded)
    return model


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.tensor([IDS])).logits[0]


def check_logits(loaded: LoadedModel, model: PreTrainedModel, tolerance: float = 2e-5) -> None:
    """Keys and values of quantised models, which are otherwise rounded to half precision, are floats."""
    if isinstance(loaded.model, NativeWeights):
        loaded.model.kv_dtype = torch.float32
        engine_of(loaded.model).release()
    torch.testing.assert_close(CachedModel(loaded.model).read(IDS), logits_of(model), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*(("llama", kind) for kind in KINDS), ("qwen2", "F16"), ("qwen2", "Q4_K"), ("qwen3", "Q8_0")],
)
def test_weights_and_logits_equal_the_dequantised_model(architecture: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = written(path, architecture, kind)
    stored, _ = read_gguf(spec_of(path), Hub())
    linears = {name: module for name, module in stored.named_modules() if isinstance(module, GgufLinear)}
    assert len(linears) == 16
    for name, linear in linears.items():
        exact = dequantised(linear.kind, linear.weight, linear.in_features, torch.float32)
        assert linear.kind == kind and torch.equal(exact, model.state_dict()[f"{name}.weight"])
    if is_expanded(kind):
        model = written(path, architecture, kind, "bfloat16")
    loaded = load(spec_of(path))
    note = f": {kind} expanded to bfloat16" if is_expanded(kind) else f": {kind}" if kind in QUANTISED_GGUF else ""
    assert loaded.engine == f"native{note}"
    check_logits(loaded, model, 1e-3 if kind in QUANTISED_GGUF else 2e-5)  # activations are integers of 16 bits


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "F16"), ("qwen2", "Q4_0"), ("qwen3", "Q4_0")])
def test_torch_computes_with_dequantised_weights(
    architecture: str, kind: str, tmp_path: Path, torch_engine: None
) -> None:
    model = written(tmp_path / "model.gguf", architecture, kind)
    loaded = load(spec_of(tmp_path / "model.gguf"))
    assert loaded.engine.startswith("lean: ")
    assert loaded.engine.endswith("Q4_0 expanded to float32") == (kind == "Q4_0")
    check_logits(loaded, model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("engine", ["torch", "native"])
def test_tied_embeddings_and_mixed_types(
    tied: bool, engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if engine == "torch":
        request.getfixturevalue("torch_engine")
    kinds = {"": "Q4_1", "token_embd.weight": "Q8_0", "blk.0.attn_v.weight": "Q8_0", "blk.1.ffn_down.weight": "F32"}
    kinds["blk.1.attn_k.weight"] = "F16"
    model = written(tmp_path / "model.gguf", "llama", kinds, config={"tie_word_embeddings": tied})
    loaded = load(spec_of(tmp_path / "model.gguf"))
    if engine == "native":
        assert loaded.engine == "native: Q4_1 and Q8_0, F16 and Q4_1 expanded to bfloat16"
        attention = model.model.layers[1].self_attn
        for linear in (attention.q_proj, attention.k_proj):  # expanded, since they are joined
            linear.weight.copy_(linear.weight.bfloat16())
    check_logits(loaded, model, 1e-3 if engine == "native" else 2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_apply_to_all_matrices(dtype: str, tmp_path: Path) -> None:
    model = written(tmp_path / "model.gguf", "llama", "Q8_0", dtype)
    loaded = load(spec_of(tmp_path / "model.gguf", dtype))
    assert loaded.engine == f"native: Q8_0 expanded to {dtype}"
    difference = CachedModel(loaded.model).read(IDS) - logits_of(model)
    assert difference.abs().max() < 0.05 * logits_of(model).std()


@pytest.mark.parametrize("kind", ["Q6_K", "Q5_K", "IQ4_XS"])
def test_other_types_are_dequantised_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    stored = np.random.default_rng(0).integers(0, 64, (5, 2 * size), dtype=np.uint8)
    expected = torch.from_numpy(gguf.dequantize(stored, qtype))
    monkeypatch.setattr("specdemo.models.engines.gguf_linear._CHUNK", 2 * 2 * block)
    result = dequantised(kind, torch.from_numpy(stored), 2 * block, torch.float32)
    assert result.shape == (5, 2 * block) and torch.equal(result, expected)


def test_rotary_factors_and_scaling(tmp_path: Path) -> None:
    """Factors as stored for Llama 3.1, and positions divided by a factor."""
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    scaling = {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 4.0}
    for change, expected in (
        ({"tensors": {"rope_freqs.weight": factors}}, torch.from_numpy(factors)),
        ({"metadata": scaling}, torch.tensor(4.0)),
    ):
        model = written(tmp_path / "model.gguf", "llama", "F32", **change)
        model.model.rotary_emb.inv_freq /= expected
        check_logits(load(spec_of(tmp_path / "model.gguf")), model)


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_tokenizers_equal_the_original(make: Any, tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.chat_template = TEMPLATE
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_for_gguf("llama", tokenizer), tokenizer, "F16")
    converted = read_tokenizer(spec_of(path))
    assert converted.get_vocab() == tokenizer.get_vocab()
    for text in (*TEXTS, "", "two  spaces\n\n\tand <|end|> tags</s>", "1234 naïve 🙂 don't", "x" * 100):
        plain = converted.encode(text, add_special_tokens=False)
        assert plain == tokenizer.encode(text, add_special_tokens=False)
        assert converted.decode(plain) == tokenizer.decode(plain)
    opening = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    assert converted.encode("def") == opening + tokenizer.encode("def", add_special_tokens=False)
    assert converted.special_tokens_map == tokenizer.special_tokens_map
    message = [{"role": "user", "content": "a <b> & naïve"}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert read_prompt(converted, message, True, 10**6).text == rendered
    check_pair(tokenizer, converted)
    assert fingerprint(tokenizer) == fingerprint(converted)


def test_special_tokens_follow_the_metadata(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    tokens[-3:] = ["<|im_end|>", "<note>", "[PAD299]"]
    changes = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["d e"],
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 4), 3, 4, 5],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    loaded = load(spec_of(save_gguf(tmp_path / "model.gguf", metadata=changes)))
    assert loaded.stop == {0, 5, len(tokens) - 3}
    ids = loaded.tokenizer.encode("de<note><|im_end|>")
    assert ids == [297, tokens.index("de"), 298, 297, 0]
    assert loaded.tokenizer.decode(ids, skip_special_tokens=True) == "de<note>"
    assert "[PAD299]" not in loaded.tokenizer.get_vocab() and loaded.vocab_size == len(tokens)


def test_greedy_texts_equal_transformers_and_speculation_is_exact(tmp_path: Path) -> None:
    target, drafter = tmp_path / "target.gguf", tmp_path / "drafter.gguf"
    model = written(target, "llama", "Q8_0")
    written(drafter, "llama", "Q4_0", config={"num_hidden_layers": 1})
    prompt = byte_level_tokenizer().encode(TEXTS[0][:40])
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    cached = CachedModel(load(spec_of(target)).model)
    assert cached.extend(prompt, 24, lambda logits, _: logits.argmax(-1)) == expected[0, len(prompt) :].tolist()

    def tokens(**options: Any) -> list[int]:
        recipe = Recipe(target=str(target), temperature=0, max_tokens=24, device="cpu", **options)
        return run_of(recipe, TEXTS[0][:40], ModelPool())[0]

    plain = tokens(method="ar")
    assert plain == tokens(method="draft", drafter=str(drafter)) == tokens(method="nasd")
    assert plain == tokens(method="tree", drafter=str(drafter)) == tokens(method="self")


@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q6_K", "Q5_0"])
@pytest.mark.parametrize("engine", ["torch", "native"])
def test_memory_is_planned_from_the_header(
    kind: str, engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if engine == "torch":
        request.getfixturevalue("torch_engine")
    spec = spec_of(save_gguf(tmp_path / "model.gguf", "qwen2", kind)).resolved()
    plan, loaded = plan_spec(spec, 64), load(spec)
    assert plan.weights == pytest.approx(loaded.weight_bytes, rel=0.15)


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_other_formats_are_refused(quantization: str, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", "llama", "F16")
    assert load(ModelSpec(str(path), quantization="bf16", device="cpu")).model.dtype == torch.bfloat16
    with pytest.raises(UserError, match="is a GGUF file, which runs in its own format: choose quantization none"):
        load(ModelSpec(str(path), quantization=quantization, device="cpu"))
    with pytest.raises(UserError, match="on a single device: choose"):
        plan_spec(ModelSpec(str(path), "float32", device="spread"), 64)
    with pytest.raises(UserError, match="does not run in transformers: choose"):
        load_with_transformers(spec_of(path))


def test_terminal_runs_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, missing, damaged = (tmp_path / f"{name}.gguf" for name in ("model", "missing", "damaged"))
    save_gguf(path, "qwen3", "Q8_0")
    damaged.write_bytes(path.read_bytes()[:-100])
    options = ["--method", "nasd", "--device", "cpu", "--max-tokens", "4", "--temperature", "0"]
    assert main(["run", "def", "--target", str(path), *options]) == 0
    capsys.readouterr()
    for wrong, words in ((missing, "is not a file: give a GGUF file"), (damaged, "is beyond the end")):
        assert main(["run", "def", "--target", str(wrong), *options]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("specdemo: ") and words in error


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    folder = tmp_path / "served/tiny/files"
    (folder / "Q8").mkdir(parents=True)
    save_gguf(folder / "Q8/model-Q8_0.gguf", "llama", "Q8_0")
    save_gguf(folder / "other[1].gguf")
    with serving(tmp_path / "served") as server:
        yield server


def test_files_of_a_hub(server: StandIn, tmp_path: Path) -> None:
    hub = Hub(server.endpoint, tmp_path / "cache")
    recipe = Recipe(target="tiny/files/Q8/model-Q8_0.gguf", method="nasd", max_tokens=4, device="cpu")
    run_of(recipe, "def add", ModelPool(hub=hub))
    assert len(server.gets("model-Q8_0.gguf")) == 1 and not server.gets("other")
    assert load(ModelSpec("tiny/files/other[1].gguf", device="cpu"), hub).engine == "native"
    for wrong, words in (
        ("tiny/files/none.gguf", "there is no file none.gguf in tiny/files: check the spelling"),
        ("tiny/none/model.gguf", "there is no model tiny/none on the hub"),
        ("tiny/files/../../../x.gguf", "is not a file: give a GGUF file, or owner/name/file.gguf"),
        ("files.gguf", "is not a file"),
    ):
        with pytest.raises(UserError, match=words.replace(".", r"\.")):
            load(ModelSpec(wrong, device="cpu"), hub)


def test_files_larger_than_the_memory_are_not_downloaded(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdemo.models.hub.memory_limit", lambda device: (1_000, 2_000))
    with pytest.raises(UserError, match=r"has \d+.*kB, and this machine has 2.0 kB of memory: choose a smaller"):
        load(ModelSpec("tiny/files/other[1].gguf", device="cpu"), Hub(server.endpoint, tmp_path / "cache"))
    assert not server.gets("other")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_file_is_closed_after_loading(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", "qwen2", {"": "F16", "output.weight": "Q8_0", "token_embd.weight": "F32"})
    loaded = load(spec_of(path))
    assert loaded.weight_bytes and str(path) not in Path("/proc/self/maps").read_text()
