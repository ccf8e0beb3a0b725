"""Comparison of several pairs started from the page: settings, progress, skipped pairs and the table."""

import re
from typing import Any

import pytest

from specdemo.bench.pairs import PairBench, measure_pairs, pairs_table
from specdemo.bench.published_tables import leviathan_tables
from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import PAIRS, Pair
from specdemo.ui.limits import HostLimits
from specdemo.ui.method_names import with_method_names
from specdemo.ui.service import Service
from specdemo.ui.tabs.bench import count_measured, describe_pairs, selected_pairs

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
def pairs(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs with a random target: complete, without drafter, absent, and not installed."""
    monkeypatch.setitem(PAIRS, "both", Pair("both", target, target, 2))
    monkeypatch.setitem(PAIRS, "alone", Pair("target without drafter", target, None, 2, method="nasd"))
    monkeypatch.setitem(PAIRS, "absent", Pair("absent", f"{target}/absent", None, 2, method="nasd"))
    monkeypatch.setitem(PAIRS, "uninstalled", Pair("not installed", "", None, 2, wheel="some-wheel"))


def meant(*names: str, **changes: Any) -> tuple[list[PairBench], Any]:
    return selected_pairs(SETTINGS, "cpu", list(names), tuple(PAIRS), {**ASKED, **changes})


def test_pairs_are_measured_in_turn_and_others_are_skipped() -> None:
    methods = ["draft", "nasd", "eagle"]
    benches, prompts = meant("both", "absent", "uninstalled", "alone", "both", methods=methods)
    assert [bench.name for bench in benches] == ["both", "absent", "uninstalled", "alone"]
    recipes = [recipe for bench in benches for recipe in bench.recipes]
    assert len(recipes) == 3 * 3 and len(prompts) == 2 and all(not recipe.chat for recipe in recipes)
    progress = list(measure_pairs(benches, prompts, ModelPool()))
    numbers = [item.number for item in progress]
    assert numbers == sorted(numbers) and numbers[0] == 0 and {numbers[-1], *(item.total for item in progress)} == {18}
    assert "pair alone, code" in str(progress[-1]) and progress[-1].share == 17 / 18
    assert count_measured(benches, prompts) == (2, 4)
    report = describe_pairs(benches)
    assert with_method_names(pairs_table(benches)) in report and leviathan_tables() in report
    assert report.count("| both ") == report.count("| alone ") == 2
    (skipped,) = (line for line in report.splitlines() if "uninstalled" in line)
    assert skipped.startswith("- ") and "is not installed" in skipped and "pair absent" in report
    assert report.count("method eagle needs a head") == 3
    check_rows(pairs_table(benches))


def check_rows(table: str) -> None:
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    lanes = [(row["pair"], row["lane"]) for row in rows]
    copy = "draft gamma=2 (quantised copy)"
    assert lanes == [("both", "draft gamma=2"), ("both", "nasd gamma=2"), ("alone", copy), ("alone", "nasd gamma=2")]
    for row in rows:
        assert (row["drafter MB"] == "–") == row["lane"].startswith("nasd")
        assert row["class"] == "code" and row["T"] == "0" and float(row["c"]) > 0
        assert row["speed-up"] != "-" and float(row["tokens/pass"]) >= 1
    assert float(rows[0]["alpha"]) == 1.0  # the drafter is the target


def test_a_stopped_comparison_shows_the_measured_prompts() -> None:
    benches, prompts = meant("both", "alone")
    assert count_measured(benches, prompts) == (0, 2)
    for item in measure_pairs(benches, prompts, ModelPool()):
        if item.doing.startswith("pair alone"):
            break
    assert count_measured(benches, prompts) == (1, 2)
    assert "| both " in describe_pairs(benches) and "| alone " not in describe_pairs(benches)


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
            service.measurements.bench_pairs(*meant("bundled"), "visitor", "address")
        assert service.worker.active == 0
    finally:
        service.worker.close()
