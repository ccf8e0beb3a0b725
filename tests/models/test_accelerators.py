"""Accelerators, on machines without them: device and dtype, messages, operators of MPS, models on several devices."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fakes.heads import head_for
from fakes.tiny_models import byte_level_tokenizer, save_model
from torch.utils._python_dispatch import TorchDispatchMode

from specdemo import generate as run_recipe
from specdemo.core import sampling
from specdemo.core.distributions import DenseProbs
from specdemo.core.errors import UserError
from specdemo.core.events import End
from specdemo.core.rules import RULES
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.models import load as loading
from specdemo.models import memory, spec
from specdemo.models.engines.llama_weights import unsupported_reason
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load, load_with_transformers, placement
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import SPREAD, ModelSpec, find_device, unused_gpu
from specdemo.native import sampling as native_sampling
from specdemo.recipe import METHODS, Recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_engine")]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {torch.device(device).index}")


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16")])
def test_automatic_dtypes_have_fast_kernels(
    capability: tuple[int, int], dtype: str, gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for quantization in ("none", "int8", "nf4"):
        assert ModelSpec("x", quantization=quantization).resolved().dtype == dtype
        on_cpu = ModelSpec("x", quantization=quantization, device="cpu").resolved().dtype
        assert on_cpu == ("float16" if quantization == "int8" else "float32")


def test_names_of_a_device_are_one_device(gpus: None) -> None:
    devices = {"auto": "cuda:0", "cuda": "cuda:0", "cuda:0": "cuda:0", "cuda:1": "cuda:1", "cpu:0": "cpu"}
    assert {name: str(find_device(name)) for name in devices} == devices
    assert ModelSpec("x", device="cuda").resolved() == ModelSpec("x", device="cuda:0").resolved()


def test_an_unusable_gpu_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(spec.shutil, "which", lambda name: f"/usr/bin/{name}")
    for cuda, remedy in ((None, "install the CUDA build"), ("13.0", "update the NVIDIA driver")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        unused_gpu.cache_clear()
        with pytest.warns(UserWarning, match=remedy):
            find_device("auto")
        with pytest.raises(UserError, match=remedy):
            find_device("cuda")
    unused_gpu.cache_clear()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_exhausted_memory_is_recognised(error: Exception) -> None:
    assert memory.is_out_of_memory(error) and "restart" not in memory.describe_failure(error)


def test_a_lasting_cuda_error_recommends_a_restart(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with `X`")

    pool, recipe = ModelPool(), Recipe(target=target, method="ar", device="cpu", max_tokens=4)
    list(run_recipe(recipe, "ab", pool))
    monkeypatch.setattr("specdemo.models.engines.llama.LlamaEngine.run", fail)
    *_, end = run_recipe(recipe, "ab", pool)
    assert isinstance(end, End) and end.reason == "error"
    assert "illegal memory access" in end.error and "restart the program" in end.error and "Compile" not in end.error


def test_quantised_models_are_not_spread_to_the_host(target: str, gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers refuses quantised layers on GPU and host together."""
    monkeypatch.setattr(loading, "free_bytes", lambda device: 1 << 30)
    rooms = [placement(ModelSpec(target, quantization=form, device=SPREAD))["max_memory"] for form in ("nf4", "none")]
    assert [list(room) for room in rooms] == [[0, 1], [0, 1, "cpu"]]  # filled in this order


# --- operators and synchronisations of a run ---


class Operators(TorchDispatchMode):
    """Operators called, and the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[Any] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.called.add(func)
        self.dtypes |= {value.dtype for value in (out,) if isinstance(value, torch.Tensor) and value.ndim}
        return out

    @property
    def names(self) -> set[str]:
        """Names in torch's table of operators, such as `add.Tensor`."""
        return {str(func).removeprefix("aten.").removesuffix(".default") for func in self.called}


def kernels() -> dict[str, dict[str, Any]]:
    """Return torch's table of operators by name."""
    path = Path(find_spec("torchgen").submodule_search_locations[0], "packaged/ATen/native/native_functions.yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {entry["func"].split("(")[0]: entry for entry in yaml.load(path.read_text(), loader)}


def has_mps_kernel(name: str, table: dict[str, dict[str, Any]]) -> bool:
    entry = table[name]
    if delegate := entry.get("structured_delegate"):
        return has_mps_kernel(delegate, table)
    backends = {key.strip() for keys in entry.get("dispatch", {"Composite": ""}) for key in keys.split(",")}
    return "MPS" in backends or any(key.startswith("Composite") for key in backends)


def test_all_operators_of_a_run_have_mps_kernels(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method, greedy and sampled; `take` had none, so sampled runs with drafts failed."""
    monkeypatch.setattr(sampling, "is_on_host", lambda x: False)
    monkeypatch.setattr(native_sampling, "supports", lambda *tensors: False)
    heads = {name: head_for(target, tmp_path / name, name) for name in METHODS if METHODS[name].drafter == "head"}
    settings: list[dict[str, Any]] = [{"method": name, "temperature": t} for name in METHODS for t in (0.0, 0.8)]
    settings.remove({"method": "beam", "temperature": 0.8})
    settings += [{"rule": rule} for rule in ("top1", "typical", "coupled")]
    settings += [{"top_k": 5}, {"repetition_penalty": 1.3}, {"policy": "svip"}, {"top": 3}]
    common = {"target": target, "device": "cpu", "dtype": "bfloat16", "max_tokens": 10, "temperature": 0.8}
    operators, pool = Operators(), ModelPool()
    for changed in settings:
        method = METHODS[changed.get("method", "draft")]
        drafter = {"model": {"drafter": target}, "head": {"head": heads.get(method.name)}, None: {}}[method.drafter]
        recipe = replace(Recipe(), **{**common, **drafter, "top_p": 0.9, **changed})
        list(run_recipe(replace(recipe, max_tokens=1), "abcabcab", pool))  # loads and measures
        with operators:
            assert list(run_recipe(recipe, "abcabcab", pool))[-1].reason == "length", recipe
    table, attention = kernels(), "_scaled_dot_product_flash_attention_for_cpu"  # MPS has its own
    assert len(operators.names) > 50 and not has_mps_kernel("take", table)
    assert {name for name in operators.names - {attention} if not has_mps_kernel(name, table)} == set()
    assert torch.float64 not in operators.dtypes  # unsupported by MPS


# --- several devices ---

LAYERS = 4


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "model"
    return save_model(made, byte_level_tokenizer(), num_hidden_layers=LAYERS)


def test_layers_fill_the_devices_up_to_their_free_memory(layered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(str(layered), "float32", device=SPREAD)
    whole = load(replace(spec, device="cpu")).weight_bytes
    monkeypatch.setattr(loading, "free_bytes", lambda device: 10 * whole)
    model, _ = load_with_transformers(spec)
    assert model.device.type == "cpu"
    monkeypatch.setattr(loading, "free_bytes", lambda device: whole // 2)
    parted, _ = load_with_transformers(spec)
    assert list(dict.fromkeys(parted.hf_device_map.values())) == ["cpu", "disk"]
    assert unsupported_reason(parted) == "it is spread over several devices"
    a, b = (CachedModel(part).score([1, 2, 3], Draft.chain((4, 5))) for part in (model, parted))
    assert torch.equal(a, b)


def test_draft_probs_are_moved_to_the_device_of_the_target() -> None:
    """`meta` replaces a second device for the draft distribution, since it cannot be read by mistake."""
    moved: list[torch.device] = []

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

        def to(self, device: torch.device) -> torch.Tensor:
            moved.append(device)
            return torch.full((1, 4), 0.25)

    probs = torch.full((1, 4), 0.25).as_subclass(Elsewhere)
    target = ModelVerifier(
        lambda tokens, draft: torch.zeros(len(draft) + 1, 4),
        SamplingParams(temperature=1.0),
        RULES["rejection"].apply,
        Noise(0, "accept"),
        Noise(0, "correct"),
    )
    verdict = target.verify([1], Draft((2,), (-1,), (0.25,), DenseProbs(probs)))
    assert moved == [torch.device("cpu")] and verdict.accepted == (0,)
