"""Loading for ZeroGPU: `spaces` emulates CUDA in the main thread of a process without a GPU."""

import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load
from specdemo.models.spec import ModelSpec
from specdemo.plan import plan_run
from specdemo.recipe import Recipe
from specdemo.ui import zero_gpu

ROOT = Path(__file__).parents[2]

# The real emulation with a stubbed configuration, in a process of its own: it replaces functions of torch.
EMULATED = """
import sys
import specdemo
specdemo.set_environment_defaults()
import torch
torch.version.cuda, torch._C._cuda_init = "13.0", lambda: None  # missing in a build without CUDA
import spaces.zero.config as config
config.get_config = lambda: {"model": "GPU", "memory": 48 << 30, "sm_major": 9, "sm_minor": 0, "sm_count": 100}
from spaces.zero.torch import patching
from specdemo.recipe import Recipe
from specdemo.ui import zero_gpu
patching.patch()
recipes = [Recipe(target=sys.argv[1], drafter=sys.argv[1], quantization=form) for form in ("none", "fp16")]
pool = zero_gpu.preload(recipes)
for recipe in recipes:
    loaded = pool.get(plan_run(recipe).target)
    model = loaded.model
    equal = loaded.invariance.equal
    print(loaded.engine, model.device, model.dtype, model.embedding.device, equal, loaded.weight_bytes)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "model", byte_level_tokenizer()))


def test_models_load_in_the_calling_thread_without_a_pass(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when they are loaded nor by a run, which would spend leased time on measurements."""
    scores: list[Any] = []
    monkeypatch.setattr(CachedModel, "score", lambda *arguments: scores.append(arguments))
    started: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    for dtype in ("float32", "bfloat16"):
        recipe = Recipe(target=folder, drafter=folder, device="cpu", dtype=dtype)
        loaded = zero_gpu.preload([recipe]).get(plan_run(recipe).target)
        assert not loaded.invariance.equal and loaded.invariance.pad == 1
    assert not scores and not started


@pytest.mark.skipif(find_spec("spaces") is None, reason="requires the package spaces")
def test_models_load_under_the_emulation_of_spaces(folder: str) -> None:
    command = [sys.executable, "-c", EMULATED, folder]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    loaded = load(ModelSpec(folder, dtype="bfloat16", device="cpu"))
    for line, dtype in zip(result.stdout.splitlines(), ("bfloat16", "float16"), strict=True):
        assert line == f"lean cuda:0 torch.{dtype} cuda:0 False {loaded.weight_bytes}"
