"""Loading for ZeroGPU: `spaces` emulates CUDA in the main thread of a process without a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.models.kv_cache import CachedModel
from specdemo.recipe import Recipe
from specdemo.ui import zero_gpu

ROOT = Path(__file__).parents[2]

# The real emulation with a stubbed configuration, in a process of its own: it replaces functions of torch.
EMULATED = """
import sys
import specdemo
specdemo.load_sequentially()
from spaces.config import Config
Config.zero_gpu = True
from spaces.zero.torch import patching
import torch
from specdemo.recipe import Recipe
from specdemo.ui import zero_gpu
patching.patch()
recipes = [Recipe(target=name, drafter=name, quantization=form) for name, form in (part.split("|") for part in sys.argv[1:])]
pool = zero_gpu.loaded(recipes)
for recipe in recipes:
    loaded = pool.take(recipe.target_spec)
    tensors = [part for part in loaded.model.parameters()] if hasattr(loaded.model, "parameters") else [loaded.model.embedding]
    print(loaded.engine, loaded.model.device, loaded.model.dtype, {str(part.device) for part in tensors},
          loaded.weight_bytes > 1000, loaded.invariance.equal)
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
        loaded = zero_gpu.loaded([recipe]).take(recipe.target_spec)
        assert not loaded.bit_equal and loaded.invariance.pad == 1
    assert not scores and not [thread for thread in started if thread.name != "pymain"]


@pytest.mark.skipif(find_spec("spaces") is None, reason="requires the package spaces")
def test_models_load_under_the_emulation_of_spaces(folder: str) -> None:
    forms = [f"{folder}|none", f"{folder}|bf16"]
    command = [sys.executable, "-c", EMULATED, *forms]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert set(result.stdout.splitlines()) == {"lean cuda:0 torch.bfloat16 {'cuda:0'} True False"}
    assert torch.cuda.device_count() == 0 or torch.cuda.is_available()
