"""The shelf: each model once, as many as memory holds, and gone when it goes; runs that die of memory."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.core.errors import Refused
from specdemo.generate import generate
from specdemo.models.load import Loaded
from specdemo.models.model_pool import Shelf
from specdemo.models.spec import Spec
from specdemo.recipe import Recipe

LONG = 200_000
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", byte_level_tokenizer(), max_position_embeddings=LONG)


@pytest.fixture(scope="module")
def specs(folder: Path) -> tuple[Spec, Spec, Spec]:
    """Three models of which no two are one: the same weights in three forms."""
    return Spec(str(folder), device="cpu"), Spec(str(folder), "bfloat16", device="cpu"), Spec(str(folder), "float16")


@pytest.fixture(scope="module")
def size(specs: tuple[Spec, Spec, Spec]) -> int:
    return Shelf().take(specs[0]).weight_bytes


def test_each_model_is_loaded_once_whatever_it_is_called(folder: Path) -> None:
    shelf = Shelf()
    first = shelf.take(Spec(str(folder), device="auto"))
    assert shelf.take(Spec(str(folder), "float32", "none", str(first.model.device))) is first
    recipe = Recipe(target=str(folder), drafter=str(folder), device="cpu", max_tokens=4)
    list(generate(recipe, "def", shelf))
    assert shelf.take(recipe.target_spec) is shelf.take(recipe.drafter_spec) is first
    assert shelf.weight_bytes == first.weight_bytes


def test_the_longest_unused_makes_room(specs: tuple[Spec, Spec, Spec], size: int) -> None:
    a, b, c = specs
    shelf = Shelf(budget=int(2.2 * size))
    first = shelf.take(a)
    shelf.take(b)
    assert shelf.take(a) is first
    shelf.take(c)
    assert a in shelf and c in shelf and b in shelf  # one and two halves
    tight = Shelf(budget=int(1.7 * size))
    for spec in (a, b, a, c):
        tight.take(spec)
    assert a in tight and c in tight and b not in tight


def test_what_a_run_needs_is_not_unloaded_for_its_own_sake(specs: tuple[Spec, Spec, Spec], size: int) -> None:
    a, b, _ = specs
    shelf = Shelf(budget=int(1.2 * size))
    with pytest.raises(Refused, match=r"need .* for weights and models may take .*: choose a smaller pair"):
        list(shelf.bring([a, b]))
    assert a not in shelf and b not in shelf
    shelf.take(a)
    with pytest.raises(Refused, match="may take"):
        list(shelf.bring([a, b]))
    assert a in shelf


def test_idle_models_go(specs: tuple[Spec, Spec, Spec]) -> None:
    now = [0.0]
    shelf = Shelf(idle_s=60, clock=lambda: now[0])
    shelf.take(specs[0])
    now[0] = 50
    shelf.take(specs[1])
    now[0] = 70
    assert shelf.tidy() == 1 and specs[0] not in shelf and specs[1] in shelf
    assert shelf.tidy() == 0


@pytest.mark.parametrize("way", ["drop", "clear", "tidy"])
def test_what_is_unloaded_is_gone(way: str, specs: tuple[Spec, Spec, Spec]) -> None:
    shelf = Shelf(idle_s=0)
    recipe = Recipe(target=specs[0].name, drafter=specs[0].name, device="cpu", max_tokens=8)
    list(generate(recipe, "def add(a, b):", shelf))
    loaded: Loaded = shelf.take(recipe.target_spec)
    gone = [weakref.ref(loaded), weakref.ref(loaded.model), weakref.ref(loaded.model.embedding)]
    del loaded
    shelf.drop(recipe.target_spec) if way == "drop" else getattr(shelf, way)()
    assert [one() for one in gone] == [None, None, None] and not shelf.weight_bytes


def test_rounds_of_loading_running_and_unloading_leave_memory_flat() -> None:
    """In a process of its own, the bundled pair again and again.

    Where every thread had a heap of its own, some 8 MB stayed with every round; a dictionary that grows takes 3, once.
    """
    asked = ["--rounds", "4", "--quantization", "none", "--device", "cpu"]
    command = [sys.executable, "-m", "benchmarks.memory", *asked]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    taken = [float(figure) for figure in said.partition(":")[2].split()]
    assert len(taken) == 4 and min(taken) > 100
    assert max(taken) - taken[0] < 15, taken


def test_no_tensor_stays_that_was_not_there_before(specs: tuple[Spec, Spec, Spec]) -> None:
    """Counted, not measured: what the first round leaves (none), no further round adds to."""

    def held() -> int:
        gc.collect()
        # by `type`: asking every object for its class wakes some that load a module to answer
        tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
        return sum(one.numel() * one.element_size() for one in tensors)

    shelf, counts = Shelf(), []
    for _ in range(3):
        for spec in specs:
            recipe = Recipe(
                target=spec.name, drafter=spec.name, dtype=spec.dtype, device="cpu", max_tokens=8, method="draft"
            )
            list(generate(recipe, "def add(a, b):", shelf))
        during = held()
        shelf.clear()
        counts.append(held())
    assert len(set(counts)) == 1 and during > counts[0]


def test_a_run_keeps_its_models_though_they_are_unloaded(specs: tuple[Spec, Spec, Spec]) -> None:
    shelf = Shelf()
    recipe = Recipe(target=specs[0].name, method="ar", device="cpu", max_tokens=12, temperature=0)
    whole = [line["tokens"] for line in generate(recipe, "def", shelf) if "i" in line]
    run = (line for line in generate(recipe, "def", shelf) if "i" in line)
    begun = [next(run)["tokens"]]
    shelf.clear()
    assert begun + [line["tokens"] for line in run] == whole


def test_a_run_that_dies_of_memory_says_so_and_the_next_is_right(folder: Path) -> None:
    shelf = Shelf()
    recipe = Recipe(target=str(folder), method="ar", temperature=0, device="cpu", max_tokens=16)
    before = [line["tokens"] for line in generate(recipe, "def add(a, b):", shelf) if "i" in line]
    long = "x" * (LONG - 1000)
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (48 << 20), hard))
    try:
        *_, end = generate(recipe, long, shelf)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert end["end"] == "error" and "memory ran out (keys and values took" in end["error"], end
    assert "shorten the prompt" in end["error"]
    assert not shelf.take(recipe.target_spec).model.idle
    assert [line["tokens"] for line in generate(recipe, "def add(a, b):", shelf) if "i" in line] == before
