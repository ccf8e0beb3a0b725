"""Displayed memory use and requirements, against real models and the trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.heads import head_for
from fakes.trace_lines import trace_lines

from specdemo.models import memory
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS, Pair
from specdemo.recipe import Recipe
from specdemo.ui.tabs import memory as ledger

BUNDLED = PAIRS["bundled"]


def rows(table: str) -> dict[str, list[str]]:
    """Cells by the first cell of their row."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines if not first.startswith(" -")}


def test_missing_models_are_not_downloaded() -> None:
    table = rows(ledger.of_pairs("cpu"))
    far = PAIRS["qwen3-8b"]
    assert table[far.title][:3] == ["–"] * 3 and table[far.title][-1].endswith("not downloaded")
    assert float(table[far.title][3].replace(",", "")) > 30_000  # eight thousand million numbers of four bytes
    assert "someone" not in ledger.of_pairs("cpu", {"far": Pair("<far>", "someone/something", BUNDLED.drafter, 4)})


def test_pairs_are_planned_and_fit_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> list[str]:
        return rows(ledger.of_pairs("cpu", {"bundled": BUNDLED}))[f"{BUNDLED.title}; target in float32"]

    target, drafter, kv, total, fits = shown()
    planned = [plan_spec(ModelSpec(name, device="cpu").resolved(), 1000) for name in (BUNDLED.target, BUNDLED.drafter)]
    assert [target, drafter] == [f"{one.weights / 1e6:,.1f}" for one in planned] and fits == "yes"
    assert float(target) + float(drafter) + float(kv) < float(total)
    monkeypatch.setattr(memory, "memory_limit", lambda device: (int(1e6 * (float(total) - 7)), 90_000_000))
    assert shown()[-1] in ("no, by 6.9", "no, by 7.0", "no, by 7.1")  # rounded


@pytest.mark.slow
def test_the_head_of_a_pair_and_its_hidden_states_are_counted(tmp_path: Path) -> None:
    head = head_for(BUNDLED.target, tmp_path / "head")
    row = rows(ledger.of_pairs("cpu", {"pair": Pair("pair", BUNDLED.target, "", 4, head=head)}))
    _, drafter, kv, *_ = row["pair; target in float32"]
    recipe = Recipe(target=BUNDLED.target, head=head, method="eagle", max_tokens=60, device="cpu")
    lines = list(trace_lines(recipe, "def quicksort(items):", ModelPool()))
    (first,) = (line for line in lines if "prompt_tokens" in line)
    steps = [line for line in lines if "i" in line]
    tokens = sum(len(line["tokens"]) for line in steps) + len(first["prompt_tokens"])
    assert drafter == f"{sum(file.stat().st_size for file in Path(head).glob('*.safetensors')) / 1e6:,.1f}"
    assert float(kv) == pytest.approx(steps[-1]["memory"]["kv_bytes"] / tokens / 1000, rel=0.05)
