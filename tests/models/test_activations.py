"""Activations of 8 bits for GGUF files: integers equal to a reference, the option, and its place in the identity."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.gguf_models import save_gguf
from fakes.native_models import Passes, config_of, random_model, stored, text
from fakes.traces import trace_lines
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.core.explain import explain_engine
from specdemo.core.step import Draft
from specdemo.models.engines.gguf_linear import GgufLinear, separated
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.select import engine_of
from specdemo.models.load import load
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.native.interface import FORMATS, QUANTISED_GGUF
from specdemo.recipe import Recipe, plan_run

pytestmark = pytest.mark.slow

PEAKS = {"8": 127, "16": 32639}  # largest integers of activations
OFFSETS = {"Q4_0": 8}


def reference(head: GgufLinear, states: Tensor, peak: int) -> Tensor:
    """Return the logits of integer products, with a scale of the activations per row and group of the weights."""
    group = FORMATS[head.kind].group
    parts = separated(head.kind, head.weight)
    integers = parts["weights"].double().unflatten(1, (-1, group)) - OFFSETS.get(head.kind, 0)
    scales = parts["scales"].double()
    rows = states.unflatten(1, (-1, group))
    largest = rows.abs().amax(-1, keepdim=True)
    quantised = (rows.double() * (peak / largest)).round()  # C adds a constant to the exact product
    steps = largest[..., 0].double() / peak
    sums = torch.einsum("ogk,rgk->rgo", integers, quantised)
    logits = torch.einsum("rgo,rg,og->ro", sums, steps, scales[..., 0])
    if scales.shape[-1] == 2:
        logits += torch.einsum("rg,og->ro", quantised.sum(-1) * steps, scales[..., 1])
    return logits


@pytest.mark.parametrize("bits", PEAKS)
@pytest.mark.parametrize("kind", QUANTISED_GGUF)
def test_logits_equal_integer_products(kind: str, bits: str) -> None:
    """The head has exactly known inputs, the normalised states; the other width differs from the reference."""
    model, tokens = stored(kind, random_model(config_of("llama", kind)), narrow=bits == "8"), text(20)
    head, layers = model.lm_head, model.config.num_hidden_layers
    passes = Passes(engine_of(NativeWeights(model)), (layers,))
    logits = passes.run(tokens, 0, Draft.chain(tuple(tokens[1:]))).double()
    states = passes.cache.states[: len(tokens), 0]
    expected, other = (reference(head, states, PEAKS[width]) for width in (bits, "16" if bits == "8" else "8"))
    tolerance = 2e-5 * expected.abs().max()
    assert (logits - expected).abs().max() <= tolerance < (logits - other).abs().max() / 20


def spec_of(path: Path, activations: str = "8", **options: Any) -> ModelSpec:
    return ModelSpec(str(path), "float32", device="cpu", activations=activations, **options)


def test_runs_record_the_form_and_speculation_is_exact(tmp_path: Path) -> None:
    target = save_gguf(tmp_path / "target.gguf", "llama", {"": "Q4_0", "blk.1.ffn_down.weight": "Q8_0"})
    drafter = save_gguf(tmp_path / "drafter.gguf", "llama", "Q8_0")

    def tokens(method: str) -> list[int]:
        models = {"target": str(target), "drafter": str(drafter), "device": "cpu", "activations": "8"}
        recipe = Recipe(**models, method=method, temperature=0, max_tokens=24)
        lines = list(trace_lines(recipe, "def add", ModelPool()))
        header = next(line for line in lines if "recipe" in line)
        assert header["recipe"]["activations"] == "8"
        assert "8-bit activations" in header["environment"]["engine"]
        return [token for line in lines for token in line.get("tokens", ())]

    assert tokens("ar") == tokens("draft") == tokens("nasd")


def test_other_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floats, integers = (save_gguf(tmp_path / f"{kind}.gguf", "llama", kind) for kind in ("F16", "Q4_0"))
    refusals = {
        "has no 8-bit activations: choose auto or 16": lambda: ModelSpec("folder", activations="8"),
        r"8 needs a GGUF file: choose pair smollm2-135m, or auto": lambda: Recipe(activations="8"),
        r"activations '12'": lambda: Recipe(target="a.gguf", method="ar", activations="12"),
        r"\(F16.gguf in float32 has no matrices in Q8_0, .*choose activations auto or 16": lambda: load(
            spec_of(floats)
        ),
        r"\(Q4_0.gguf in bfloat16 has": lambda: load(spec_of(integers, quantization="bf16").resolved()),
    }
    for sentence, call in refusals.items():
        with pytest.raises(UserError, match=sentence):
            call()
    monkeypatch.setattr("specdemo.models.gguf_checkpoint.uses_native_engine", lambda device: False)
    with pytest.raises(UserError, match=r"the native engine does not run Q4_0.gguf on cpu\): choose activations auto"):
        plan_spec(spec_of(integers), 64)


@pytest.mark.parametrize(
    ("kind", "native", "activations", "bits"),
    [
        ("Q4_1", True, "auto", "8"),
        ("Q4_1", True, "16", "16"),
        ("F16", True, "auto", "16"),
        ("Q4_1", False, "auto", "16"),
    ],
)
def test_quantised_weights_have_8_bit_activations_where_available(
    kind: str, native: bool, activations: str, bits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_gguf(tmp_path / f"{kind}.gguf", "llama", kind)
    monkeypatch.setattr("specdemo.models.gguf_checkpoint.uses_native_engine", lambda device: native)
    recipe = Recipe(target=str(path), method="ar", device="cpu", activations=activations)
    loaded = load(plan_run(recipe).target)
    assert (recipe.activations, loaded.spec.activations) == (activations, bits)
    form = ", 8-bit activations, as llama.cpp"
    assert loaded.engine.endswith(form) == explain_engine(loaded.environment).endswith(form) == (bits == "8")
