"""Displayed memory use and requirements, against real models and the trace."""

from pathlib import Path

import pytest
from fakes.heads import head_config, head_tensors, save_head
from fakes.traces import trace_lines
from transformers import AutoConfig

from specdemo.models import memory
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS, Pair
from specdemo.preflight import Preflight, predict
from specdemo.prompts import Prompt
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
@pytest.mark.parametrize("own", [(), ("lm_head", "embed_tokens")])
def test_run_prediction_and_list_of_pairs_agree_about_a_head(tmp_path: Path, own: tuple[str, ...]) -> None:
    config = AutoConfig.from_pretrained(BUNDLED.target)
    ids = [*range(0, config.vocab_size, 2)]
    head = save_head(tmp_path / "head", head_tensors(config, ids, own), head_config(config, len(ids)))
    row = rows(ledger.of_pairs("cpu", {"pair": Pair("pair", BUNDLED.target, "", 4, head=head)}))
    target, drafter, kv, *_ = row["pair; target in float32"]
    pool, recipe = ModelPool(), Recipe(target=BUNDLED.target, head=head, method="eagle", max_tokens=60, device="cpu")
    (first,) = (line for line in trace_lines(recipe, "def quicksort(items):", pool) if "prompt_tokens" in line)
    sizes = [first["environment"][name] for name in ("target_bytes", "drafter_bytes")]
    assert [target, drafter] == [f"{size / 1e6:,.1f}" for size in sizes]
    if own:
        return
    *_, estimate = predict(recipe, [Prompt("code", "sort", "def quicksort(items):")], pool)
    assert isinstance(estimate, Preflight) and estimate.weight_bytes == sum(sizes)
    assert float(kv) == pytest.approx(estimate.kv_bytes / 1e6, abs=0.05 + 0.01 * float(kv))
