"""What memory is said to hold and to need, against what models really take and what the trace says."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import torch
from test_frames import end, header, step
from tiny import byte_level_tokenizer, save_model

from specdemo.generate import generate
from specdemo.models import memory
from specdemo.models.load import Shelf, Spec, load, natural_dtype
from specdemo.models.pairs import PAIRS, Pair
from specdemo.recipe import Recipe
from specdemo.ui import ledger
from specdemo.ui.frames import Run
from specdemo.ui.words import PLAIN, SPEC

CPU = torch.device("cpu")
BUNDLED = PAIRS["bundled"]


def rows(table: str) -> dict[str, list[str]]:
    """Cells by the head of their row."""
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in re.findall(r"<tr>(.*?)</tr>", table)]
    return {first: rest for first, *rest in found}


@pytest.mark.parametrize("quantization", ["none", "int8", "nf4"])
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_needs_are_what_a_loaded_model_takes(role: str, quantization: str) -> None:
    name = getattr(BUNDLED, role)
    dtype = getattr(torch, natural_dtype(quantization, CPU))
    found = memory.needs(name, dtype, quantization, CPU)
    loaded = load(Spec(name, quantization=quantization, device="cpu"))
    assert found is not None and loaded.model.dtype == dtype
    assert found.weights == pytest.approx(loaded.weight_bytes, rel=0.02)


def test_a_head_of_its_own_is_counted_once(tmp_path: Path) -> None:
    """A model of another shape: untied, with as many heads for keys as for queries."""
    folder = save_model(tmp_path / "untied", byte_level_tokenizer(), tie_word_embeddings=False, num_key_value_heads=4)
    found = memory.needs(str(folder), torch.float32, "none", CPU)
    assert found is not None
    assert found.weights == pytest.approx(load(Spec(str(folder), "float32", device="cpu")).weight_bytes, rel=0.02)


def test_keys_and_values_grow_as_foreseen() -> None:
    recipe = Recipe(max_tokens=24, temperature=0, device="cpu")
    head, *_, last, _ = (line for line in generate(recipe, "def f(x):\n", Shelf()) if "phase" not in line)
    per_token = [memory.needs(name, torch.float32, "none", CPU) for name in recipe.models]
    assert all(per_token) and len(per_token) == 2
    held = len(head["prompt_tokens"]) + recipe.max_tokens
    foreseen = sum(one.kv for one in per_token) / 1000 * held
    assert foreseen * (held - 6) / held < last["memory"]["kv_bytes"] < foreseen * (held + 6) / held


def test_a_model_that_is_not_here_is_not_asked_for() -> None:
    for name in ("someone/something", "/no/such/folder"):
        assert memory.needs(name, torch.float32, "none", CPU) is None
    table = rows(ledger.of_pairs("cpu", {"far": Pair("<far>", "someone/something", BUNDLED.drafter, 4)}))
    assert table["&lt;far&gt;; target in float32"] == [*["–"] * 4, "not downloaded"] and len(table) == 4


def test_pairs_add_up_and_fit_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> list[str]:
        return rows(ledger.of_pairs("cpu"))[f"{BUNDLED.title}; target in float32"]

    target, drafter, kv, total, fits = shown()
    assert float(target) + float(drafter) + float(kv) == pytest.approx(float(total), abs=0.2) and fits == "yes"
    monkeypatch.setattr(memory, "room", lambda device: (60_000_000, 90_000_000))
    assert shown()[-1] == f"no, by {float(total) - 60:.1f}"


def test_what_a_run_held_is_what_its_trace_says() -> None:
    run = Run((SPEC, PLAIN))
    held = [{"rss_bytes": n * 1e8, "device_bytes": None, "kv_bytes": kv} for n, kv in ((5, 1e6), (7, 4e6), (6, 3e6))]
    run.absorb(SPEC, header())
    for i, one in enumerate(held):
        run.absorb(SPEC, step(i, pieces=["a"], memory=one))
    run.absorb(SPEC, end() | {"metrics": {"peak_rss_bytes": 9e8, "peak_device_bytes": None}})
    run.absorb(PLAIN, header("ar", environment={"target_bytes": 28e6, "drafter_bytes": None}))
    run.absorb(PLAIN, step(0, pieces=["a"], memory=held[0]))
    assert rows(ledger.of_run(run)) == {
        "MB": ["draft, γ 3", "target only"],
        "weights of the target": ["28.0", "28.0"],
        "weights of the drafter": ["5.0", "–"],
        "keys and values, at the last step": ["3.0", "1.0"],
        "keys and values, at most": ["4.0", "1.0"],
        "their share of weights, keys and values": ["11 %", "3 %"],  # 4 of 37, 1 of 29
        "process, at the last step": ["600.0", "500.0"],
        "process, at most": ["900.0", "500.0"],
    }


def test_before_a_run_and_on_a_device() -> None:
    assert "Nothing has run yet" in ledger.of_run(None) and "Nothing has run yet" in ledger.of_run(Run())
    run = Run()
    run.absorb(SPEC, header())
    run.absorb(SPEC, step(0, pieces=["a"], memory={"rss_bytes": 1e8, "device_bytes": 2e9, "kv_bytes": 1e6}))
    assert rows(ledger.of_run(run))["tensors on the device, at most"] == ["2,000.0"]


def test_the_machine_is_asked() -> None:
    table = {
        name: float(cells[0].replace(",", ""))
        for name, cells in rows(ledger.of_machine("cpu")).items()
        if cells != ["MB"]
    }
    assert table["system, in all"] == pytest.approx(psutil.virtual_memory().total / 1e6, abs=0.1)
    assert 0 < table["system, available"] <= table["system, in all"]
    assert 50 < table["process, now"] <= table["process, at most since it began"]
