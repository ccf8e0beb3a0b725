"""Comparison of several pairs started from the page: settings, progress, skipped pairs and the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.bench.pairs import measure_pairs, pairs_table
from specdemo.bench.published_tables import leviathan_tables
from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import PAIRS, Pair
from specdemo.ui.limits import HostLimits
from specdemo.ui.method_names import with_method_names
from specdemo.ui.service import Service
from specdemo.ui.tabs.pairs import PairsResult, pairs_result

ASKED: dict[str, Any] = {
    "methods": ["draft", "nasd"],
    "gammas": [2],
    "policies": ["fixed"],
    "temperatures": [0],
    "kinds": ["code"],
    "each": 2,
}
SETTINGS = {"pair": "bundled", "max_tokens": 8, "chat": True, "mode": "off"}


@pytest.fixture(autouse=True)
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = str(save_model(tmp_path / "target", byte_level_tokenizer()))
    monkeypatch.setitem(PAIRS, "both", Pair("both", target, target, 2))
    monkeypatch.setitem(PAIRS, "alone", Pair("target without drafter", target, None, 2, method="nasd"))
    monkeypatch.setitem(PAIRS, "absent", Pair("absent", str(tmp_path / "absent"), None, 2, method="nasd"))
    monkeypatch.setitem(PAIRS, "uninstalled", Pair("not installed", "", None, 2, wheel="some-wheel"))


def meant(*names: str, offered: tuple[str, ...] | None = None, **changes: Any) -> PairsResult:
    chosen = {**ASKED, **changes}
    settings = {**SETTINGS, **{name: chosen.pop(name) for name in ("target", "external") if name in chosen}}
    return pairs_result(settings, "cpu", list(names), offered or tuple(PAIRS), **chosen)


def test_pairs_are_measured_in_turn_and_others_are_skipped() -> None:
    result = meant("both", "absent", "uninstalled", "alone", "both")
    assert [bench.name for bench in result.benches] == ["both", "absent", "uninstalled", "alone"]
    assert result.sweep.runs == 3 * 3 * 2 and all(not recipe.chat for recipe in result.sweep.recipes)
    numbers = []
    for item in measure_pairs(result.benches, result.sweep.prompts, ModelPool()):
        result.absorb(item)
        numbers.append(item.number)
        assert item.total == result.sweep.runs
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == result.sweep.runs
    assert "pair alone, code" in result.progress(1.0)
    assert "done: 2 of 4 pairs are measured" in result.ending()
    report = result.report()
    assert with_method_names(pairs_table(result.benches)) in report and leviathan_tables() in report
    assert report.count("| both ") == report.count("| alone ") == 2
    (skipped,) = (line for line in report.splitlines() if "uninstalled" in line)
    assert skipped.startswith("- ") and "is not installed" in skipped and "pair absent" in report


def test_a_stopped_comparison_shows_the_measured_prompts() -> None:
    result = meant("both", "alone")
    assert result.is_empty and "stopped: partial, 0 of 2 pairs are measured" in result.ending()
    for item in measure_pairs(result.benches, result.sweep.prompts, ModelPool()):
        if item.doing.startswith("pair alone"):
            break
    assert not result.is_empty and "stopped: partial, 1 of 2 pairs are measured" in result.ending()
    assert "failed: no memory; 1 of 2 pairs are measured" in result.ending("no memory")
    assert "| both " in result.report() and "| alone " not in result.report()


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (HostLimits(pairs=("gpt2-xl",)), "unknown pair 'bundled'"),
        (HostLimits(max_seconds=60), "measurements take minutes"),
        (HostLimits(max_gamma=1), "gamma may be 1 at most here, not 2"),
    ],
)
def test_limits_of_the_host_apply(limits: HostLimits, words: str) -> None:
    service = Service(ModelPool(), lambda *_: iter(()), limits)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(UserError, match=re.escape(words)):
            meant("bundled").start(service, "visitor", "address")
        assert service.worker.active == 0
    finally:
        service.worker.close()
