"""The bench: pairs on each prompt, medians that can be checked by hand, losing cases kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import byte_level_tokenizer, save_model

from specdemo import bench
from specdemo.__main__ import main
from specdemo.core.errors import Refused
from specdemo.models.load import Shelf
from specdemo.recipe import Recipe


def figures(speed: float, drafted: int = 0) -> dict[str, Any]:
    return {
        "tokens_per_second": speed,
        "steps": 11,
        "decode_s": 1.0,
        "draft_s": 0.2,
        "verify_s": 0.7,
        "drafted": drafted,
        "acceptance_rate": 0.5 if drafted else None,
        "mean_beta": 0.6 if drafted else None,
        "tokens_per_target_pass": 2.0,
        "ttft_s": 0.1,
    }


def test_speedups_are_medians_of_ratios_and_losses_are_named() -> None:
    recipes = [Recipe(method="ar", temperature=0), Recipe(temperature=0)]
    speeds = [(10, 20), (100, 90), (50, 60)]
    records = [
        {"kind": "code", "name": f"code {i}", "metrics": [figures(plain), figures(fast, drafted=20)]}
        for i, (plain, fast) in enumerate(speeds)
    ]
    plain, draft = bench.table(recipes, records)
    assert plain.speedup is None and draft.speedup == pytest.approx(1.2)
    assert draft.interval == pytest.approx((0.9, 2.0))
    assert draft.slower == ("code 1 (0.90x)",)
    assert draft.c == pytest.approx(0.01 / 0.1) and draft.v == pytest.approx(0.07 / 0.1)
    text = bench.markdown([plain, draft])
    assert "1 of 3" in text and "0.90-2.00" in text
    assert json.loads(bench.as_json([plain, draft]))["bench"][1]["speedup"] == pytest.approx(1.2)


def test_real_models_are_measured_in_pairs(tmp_path: Path) -> None:
    models = {
        "target": str(save_model(tmp_path / "target", byte_level_tokenizer())),
        "drafter": str(save_model(tmp_path / "drafter", byte_level_tokenizer(), num_hidden_layers=1)),
    }
    recipes = [Recipe(method=method, max_tokens=12, device="cpu", **models) for method in ("ar", "draft", "nasd")]
    records = list(bench.measure(recipes, bench.load_prompts(kinds=["adversarial"])[:3], Shelf()))
    assert [record["name"] for record in records] == ["adversarial 1", "adversarial 2", "adversarial 3"]
    for record in records:
        plain, draft, _ = record["metrics"]
        assert plain["drafted"] == 0 < draft["drafted"] and plain["tokens"] > 0


def test_unknown_classes_are_refused() -> None:
    with pytest.raises(Refused, match="known are code, repetitive"):
        bench.load_prompts(kinds=["magic"])
    assert main(["bench", "--kind", "magic"]) == 2
