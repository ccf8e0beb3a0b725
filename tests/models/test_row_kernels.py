"""Products of few rows in Triton's interpreter, on CPU tensors."""

import copy
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.tiny_models import LLAMA
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.core.step import Draft
from specdemo.models.engines import row_linear
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.row_linear import FEW_ROWS, NF4_CODES, RowLinear, Tiles, can_join, decoding
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import use_row_kernels

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter compute with bfloat16."""
    interpreter: Any = import_module("triton.runtime.interpreter")

    def floats(handle: Any) -> Any:
        bits = handle.data
        return (bits.astype("uint32") << 16).view("float32") if bits.dtype == "uint16" else bits.astype("float32")

    def product(builder: Any, left: Any, right: Any, sums: Any, *rest: object) -> Any:
        return interpreter.TensorHandle(floats(left) @ floats(right) + sums.data, sums.dtype.scalar)

    def converted(builder: Any, integers: Any, dtype: Any) -> Any:
        return builder.cast_impl(builder.cast_impl(integers, import_module("triton.language").float32), dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_si_to_fp", converted)


TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 6e-4}  # the interpreter truncates to bfloat16
LEVELS = torch.linspace(0, 1, 256) ** 2  # of scales
SIZES = {"even": (64, 256), "odd": (37, 192), "tail": (66, 320)}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def four_bit(
    outputs: int, inputs: int, dtype: torch.dtype, nested: bool, bias: Tensor | None, seed: int = 0
) -> tuple[RowLinear, Tensor]:
    """Return a random layer in the storage of bitsandbytes and its matrix."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
    count = outputs * inputs // 64
    absmax = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    scales = {
        "absmax": absmax,
        "levels": LEVELS,
        "nested_absmax": torch.rand(-(-count // 256), generator=generator),
        "offset": torch.tensor(0.3 + seed),
    }
    stored = LEVELS[absmax.int()] * scales["nested_absmax"].repeat_interleave(256)[:count] + scales["offset"]
    if not nested:
        scales = {"absmax": stored}
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten(1).int()
    factors = stored.double().view(outputs, -1).repeat_interleave(64, 1)
    matrix = torch.tensor(NF4_CODES, dtype=torch.float64)[codes] * factors
    return row_linear.nf4_linear(packed, scales, bias, dtype), matrix


def layer(form: str, outputs: int, inputs: int, dtype: torch.dtype, bias: Tensor | None) -> tuple[RowLinear, Tensor]:
    """Return a random layer and its matrix in float64."""
    if form.startswith("nf4"):
        return four_bit(outputs, inputs, dtype, form == "nf4", bias)
    if form == "int8":
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
        scales = torch.rand(outputs, generator=generator) / 127
        return row_linear.int8_linear(codes, scales, bias, dtype), codes.double() * scales.double()[:, None]
    weight = random(outputs, inputs).to(dtype)
    return row_linear.float_linear(weight, bias), weight.double()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("nf4", torch.bfloat16),
        ("nf4-plain", torch.float16),
        ("int8", torch.bfloat16),
        ("float", torch.float16),
    ],
)
def test_products_are_those_of_the_matrix(form: str, size: str, dtype: torch.dtype) -> None:
    outputs, inputs = SIZES[size]
    if form in ("int8", "float") and size == "odd":
        inputs -= 5
    bias = random(outputs, seed=2).to(dtype) if size == "odd" else None
    linear, matrix = layer(form, outputs, inputs, dtype, bias)
    rows = random(17, inputs, seed=1).to(dtype)
    expected = rows.double() @ matrix.T + (0 if bias is None else bias.double())
    assert error(linear.expanded(), matrix) < TOLERANCE[dtype]
    most = linear(rows[:FEW_ROWS])
    for count in (1, 2, 3, 8, 15, 16, 17):  # a tile has 16 rows, and those beyond `count` are masked
        found = linear(rows[:count])
        assert found.dtype == dtype and error(found, expected[:count]) < TOLERANCE[dtype]
        assert count > FEW_ROWS or torch.equal(found, most[:count])
    for i in (3, 15):
        assert torch.equal(linear(rows[i : i + 1])[0], most[i])


@pytest.mark.parametrize("form", ["nf4", "int8", "float"])
def test_inputs_may_be_strided_and_have_further_dimensions(form: str) -> None:
    linear, _ = layer(form, 40, 192, torch.bfloat16, None)
    wide = random(3, 2 * 192, seed=3).to(torch.bfloat16)
    views = [wide[:, 192:], wide[:, ::2], wide.view(3, 2, 192)[:, 1], wide[:1, :192].expand(3, -1)]
    for rows in views:
        assert torch.equal(linear(rows), linear(rows.contiguous()))
    assert torch.equal(linear(wide.view(3, 2, 192)), linear(wide.view(6, 192)).view(3, 2, 40))


def prmt(a: int, b: int, selector: int) -> int:
    """Return the result of the instruction. Bit 3 of a selector extends the sign of its byte."""
    data, result = a | b << 32, 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = data >> 8 * (nibble & 7) & 255
        result |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return result


def executed(program: str, word: int) -> list[int]:
    """Return the outputs $0 to $3 of a program of `decoding`."""
    registers = {"$4": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in program.splitlines():
        name, _, operands = line.rstrip(";").partition(" ")
        target, *arguments = operands.split(", ")
        if name.startswith(("prmt", "xor", "shr")):
            values = [value(argument) for argument in arguments]
            operation = {"prmt": prmt, "xor": int.__xor__, "shr": int.__rshift__}[name.partition(".")[0]]
            registers[target] = operation(*values)
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decoding_returns_the_values_of_the_codes(dtype: torch.dtype) -> None:
    values, _ = four_bit(1, 64, dtype, False, None)
    table = values.tensors["values"].to(dtype)
    for seed in range(16):
        data = torch.randint(0, 256, (4,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        word = int(data.view(torch.int32)) & 0xFFFFFFFF
        halves = [half & 0xFFFF for out in executed(decoding(dtype), word) for half in (out, out >> 16)]
        found = torch.tensor([half - (half >> 15 << 16) for half in halves], dtype=torch.int16).view(dtype)
        assert torch.equal(found, torch.cat((table[(data >> 4).int()], table[(data & 15).int()])))


@pytest.mark.parametrize(("programs", "splits"), [(1, 1), (7, 3), (1000, 3)])
def test_partial_sums_have_all_inputs(programs: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = Tiles(32, 4, programs, 4, 3)
    assert tiles.splits(20, 64 * 11) == splits
    linear, matrix = four_bit(20, 64 * 11, torch.float16, True, None)
    monkeypatch.setitem(row_linear.TILES, (0, 0), {linear.form: tiles})
    rows = random(2, 64 * 11).half()
    assert error(linear(rows), rows.double() @ matrix.T) < TOLERANCE[torch.float16]


LAST_STEP = ("steps = tl.cdiv(width, _BLOCK * BLOCKS)", "steps = width // (_BLOCK * BLOCKS)")
NEXT_BLOCK = ("block = step * BLOCKS + i", "block = step * BLOCKS")
THREAD_ORDER = ("tl.permute(parts, (0, 2, 1, 3))", "parts")
MUTANTS = {
    "nf4": {
        "order of codes": ("values + (pair >> 4).to(", "values + (pair & 15).to("),
        "halves of a block": ("x_rows + _HALF + column", "x_rows + column"),
        "scale of a block": ("word >> (8 * i) & 255", "word & 255"),
        "scale of scales": ("tl.where(block < change, factor, next_factor)", "factor"),
        "first scale of scales": ("group = (start + block) // _NESTED_BLOCK", "group = start // _NESTED_BLOCK"),
        "tail of the inputs": LAST_STEP,
        "order of a thread": THREAD_ORDER,
    },
    "int8": {
        "scale of an output": ("sums *= tl.load(scales + index,", "sums *= tl.load(scales + index * 0,"),
        "block of a step": NEXT_BLOCK,
        "tail of the inputs": LAST_STEP,
        "order of a thread": THREAD_ORDER,
        "rows of outputs": ('if FORM == "CODE4" else width)', 'if FORM == "CODE4" else inputs)'),
        "partial sums": ("for part in range(splits):", "for part in range(1):"),
    },
    "float": {
        "block of a step": NEXT_BLOCK,
        "tail of the inputs": LAST_STEP,
        "sum of the steps": ("tl.dot(weights, tl.trans(x_block), sums)", "tl.dot(weights, tl.trans(x_block))"),
    },
}


SCALE_COUNTS = {None: 531, "first scale of scales": 531, "scale of scales": 279}  # three or two scales of scales


@pytest.mark.parametrize(("form", "name"), [(form, name) for form in MUTANTS for name in (None, *MUTANTS[form])])
def test_a_changed_stage_changes_the_products(
    form: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = import_module("specdemo.models.engines.row_kernels")
    source = Path(str(kernels.__file__)).read_text("utf-8")
    before, after = MUTANTS[form][name] if name else ("", "")
    assert source.count(before) == 1 or not name
    (tmp_path / "mutant.py").write_text(source.replace(before, after), "utf-8")
    spec = spec_from_file_location("mutant", tmp_path / "mutant.py")
    assert spec and spec.loader
    mutant = module_from_spec(spec)
    spec.loader.exec_module(mutant)
    for kernel in ("product", "total"):
        monkeypatch.setattr(kernels, kernel, getattr(mutant, kernel))
    dtype = torch.bfloat16 if form == "float" else torch.float16
    inputs = 1084  # the last block and the last step are incomplete
    if form == "nf4":
        inputs = 64 * SCALE_COUNTS.get(name, 11)
    linear, matrix = layer(form, 2, inputs, dtype, None)
    rows = random(1, inputs, seed=1).to(dtype)
    if form == "float":  # several steps of a part
        monkeypatch.setitem(row_linear.TILES, (0, 0), {linear.form: Tiles(64, 2, 1, 4, 3)})
    wrong = error(linear(rows), rows.double() @ matrix.T) > 5 * TOLERANCE[dtype]
    assert wrong == (name is not None)


@pytest.mark.parametrize("nested", [True, False])
def test_layers_of_bitsandbytes_keep_their_values(nested: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    linear = bitsandbytes.nn.Linear4bit(192, 37, True, torch.bfloat16, nested, "nf4")
    linear.load_state_dict({"weight": random(37, 192), "bias": random(37, seed=1)})
    linear = linear.to(torch.bfloat16).to("cpu")
    linear.weight = linear.weight.to("cpu")
    converted = row_linear.from_bitsandbytes(linear, torch.bfloat16)
    assert converted is not None
    state = linear.weight.quant_state
    expected = bitsandbytes.functional.dequantize_4bit(linear.weight.data, state).view(37, 192)
    assert error(converted.expanded(), expected.double()) < TOLERANCE[torch.bfloat16]
    assert torch.equal(converted.tensors["bias"], linear.bias)


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_model_has_the_logits_of_its_expanded_matrices(form: str) -> None:
    """Layers of equal form are joined; others stay apart."""
    torch.manual_seed(0)
    sizes = {**LLAMA, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    models: list[Any] = [LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().eval().requires_grad_(False)]
    models.append(copy.deepcopy(models[0]))
    for i, one in enumerate(models[0].model.layers):
        other = models[1].model.layers[i]
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"):
            weight = one.get_submodule(name).weight
            stored, _ = layer(form, *weight.shape, torch.bfloat16, None)
            one.set_submodule(name, stored)
            other.get_submodule(name).weight = torch.nn.Parameter(stored.expanded())
    weights = [LlamaWeights(model) for model in models]
    found, expected = (CachedModel(one).score([1, 2, 3, 4], Draft.chain((5, 6))) for one in weights)
    assert error(found, expected.double()) < 5e-2
    assert can_join([models[0].model.layers[0].mlp.gate_proj, models[0].model.layers[0].mlp.up_proj])
    assert weights[0].weight_bytes < weights[1].weight_bytes


def test_without_triton_the_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(row_linear.importlib.util, "find_spec", lambda name: None)
    model = SimpleNamespace(hf_quantizer=None, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    note = use_row_kernels(model)  # type: ignore[arg-type]
    assert note == "kernels of bitsandbytes, Triton is not installed"
    assert not use_row_kernels(SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]


def test_other_layers_are_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    kept = list(model)
    row_linear.replace_linears(model, torch.bfloat16)
    assert list(model) == kept and row_linear.from_bitsandbytes(kept[0], torch.bfloat16) is None
