"""Benchmarks of several pairs: recipes, skipped pairs and methods, and the published tables."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.added_pairs import add_pairs

from specdemo.bench.measure import grid
from specdemo.bench.pairs import PairBench, measure_pair, pair_bench, pairs_table, skipped_lines
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe

MAKE = partial(replace, Recipe(), device="cpu", max_tokens=8)


def varied(*methods: str) -> list[dict[str, Any]]:
    return list(grid(methods, [2], ["fixed"], [0.0]))


def cells(table: str) -> list[dict[str, str]]:
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(head, row, strict=True)) for row in rows]


def measured(name: str, *methods: str) -> PairBench:
    bench = pair_bench(name, MAKE, varied(*methods))
    list(measure_pair(bench, load_prompts(["code"])[:2], ModelPool()))
    return bench


def test_every_pair_has_rows_or_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = add_pairs(tmp_path, monkeypatch)
    benches = [measured(name, "draft", "nasd", "eagle") for name in pairs]
    rows = cells(pairs_table(benches))
    assert [(row["pair"], row["lane"]) for row in rows] == [
        ("both", "draft gamma=2"),
        ("both", "nasd gamma=2"),
        ("alone", "draft gamma=2 (quantised copy)"),
        ("alone", "nasd gamma=2"),
    ]
    for row in rows:
        assert (row["drafter MB"] == "–") == row["lane"].startswith("nasd")
        assert row["class"] == "code" and row["T"] == "0" and float(row["c"]) > 0
        assert row["speed-up"] != "-" and float(row["tokens/pass"]) >= 1
    assert float(rows[0]["alpha"]) == 1.0  # the drafter is the target
    lines = skipped_lines(benches)
    assert sum("method eagle needs a head" in line for line in lines) == 3
    assert any(line.startswith("skipped: pair absent: ") for line in lines)
    assert any(line.startswith("skipped: pair uninstalled: ") and "some-wheel" in line for line in lines)
