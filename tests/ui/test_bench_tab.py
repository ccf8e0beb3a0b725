"""Measurements started from the page: benchmarks, comparisons of pairs, calibrations; progress and results."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from fakes.page import figure_of, values
from fakes.traces import absorb, bench_run, end, header, step

from specdemo.bench import table
from specdemo.bench.measure import BenchProgress
from specdemo.bench.pairs import PairBench, measure_pairs, pairs_table
from specdemo.bench.published_tables import leviathan_tables
from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import PAIRS, Pair
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC
from specdemo.ui.limits import HostLimits
from specdemo.ui.service import Service, pairs_bench_job
from specdemo.ui.settings import OPTIONS, setting_of, with_method_names
from specdemo.ui.tabs.bench import (
    SWEEP_TABLE_HEAD,
    Sweep,
    count_measured,
    describe_pairs,
    notes,
    selected,
    selected_pairs,
    speedup_chart,
    speedup_map_table,
    sweep_cells,
)
from specdemo.ui.tabs.edge import calibration_recipe
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, PanelMeasurement
from specdemo.worker import Stream

ASKED: dict[str, Any] = {
    "methods": ["draft", "nasd"],
    "gammas": [2, 3],
    "policies": ["fixed"],
    "temperatures": [0],
    "kinds": ["code", "prose"],
    "each": 2,
}


def meant(tokens: int = 16, latest: Run | None = None, **changes: Any) -> Sweep:
    varied, prompts = selected({**ASKED, **changes})
    return Sweep(tuple(Recipe(max_tokens=tokens, **own) for own in varied), prompts).within_limits(latest)


def test_estimate_uses_the_latest_run() -> None:
    latest = Run()
    drafted = step(1, pieces=["b", "X"], draft=("b", "c"), accepted=(0,))
    absorb(latest, SPEC, header(), step(0, pieces=["a"]), drafted, end())
    words = meant(latest=latest).describe(latest)  # two tokens in 0.03 s
    assert words.endswith("about 5 s at the 67 tokens per second of your latest run")
    assert meant().describe(Run()).endswith("about 3 s at an assumed 100 tokens per second")
    assert len(meant(kinds=["adversarial"], each=24).prompts) == 20  # the class has only 20 prompts


WHERE = {"processor": "CPU", "device": "cpu", "dtype": "float32", "threads": 1, "engine": "lean"}
WHERE |= {"python": "3", "torch": "2", "transformers": "5"}


def record(name: str, seconds: float) -> dict[str, Any]:
    """AR decoding takes 1 s for 10 tokens, the other lane the given time for 20."""
    return {
        "kind": name[:-2],
        "name": name,
        "runs": [bench_run(1.0, environment=WHERE), bench_run(seconds, drafted=20)],
    }


def test_rows_of_the_page_name_losses() -> None:
    """A recipe is faster than AR decoding on one class and slower on the other."""
    recipes = (Recipe(method="ar", temperature=0), Recipe(temperature=0, gamma=2))
    records = [record("code 1", 1.0), record("code 2", 4.0), record("prose 1", 2.5)]
    records += [record(f"code {i}", 1.6) for i in (3, 4, 5)]
    rows = table.table(recipes, records)
    plain, code, _, prose = [dict(zip(SWEEP_TABLE_HEAD, row, strict=True)) for row in sweep_cells(rows)]
    assert plain["speed-up"] == "baseline" and plain["95 %"] == plain["slower on"] == plain["α"] == "–"
    assert code["speed-up"] == "1.25×" and code["95 %"] == "0.50 to 2.00" and code["slower on"] == "1 of 5"
    assert prose["speed-up"] == "0.80× slower" and prose["95 %"] == "–" and prose["slower on"] == "1 of 1"
    figures = [code[name] for name in ("accepted", "α", "tokens/pass", "mean overlap β", "same text")]
    assert figures == ["50 %", "0.55", "2.00", "0.60", "5 of 5"]
    listed = notes(rows, records)
    assert "code 2 (0.50x)" in listed and "prose 1 (0.80x)" in listed and "interrupted" not in listed
    plotted = speedup_chart(rows)
    assert figure_of(plotted)["names"] == ["AR decoding", "draft γ 2, code, n 5", "draft γ 2, prose, n 1"]
    assert [values(plotted, kind) for kind in ("AR decoding", "code", "prose")] == [{0: 1.0}, {1: 1.25}, {2: 0.8}]


def row(lane: str, kind: str, speedup: float, interval: tuple[float, float] | None) -> table.BenchRow:
    recipes = (Recipe(method="ar", temperature=0), Recipe(temperature=0, gamma=2))
    *_, measured = table.table(recipes, [record("code 1", 1.0)])
    return replace(measured, lane=lane, kind=kind, speedup=speedup, interval=interval)


def test_maps_mark_speedups_that_may_be_none() -> None:
    plain = replace(row("ar T=0", "code", 1.0, None), speedup=None)
    fast, slow = row("nasd gamma=2 T=0", "code", 1.5, (1.2, 1.8)), row("nasd gamma=2 T=0", "prose", 0.9, (0.7, 1.0))
    rows = [plain, fast, slow, row("draft path T=0", "prose", 1.2, None)]
    drawn = speedup_map_table(rows)
    assert re.findall("<th>(.*?)</th>", drawn)[1:] == ["code", "prose", "n-grams γ 2 T=0", "draft path T=0"]
    assert re.findall("<td.*?>(.*?)</td>", drawn) == ["1.50×", "0.90× ±", "", "1.20×"]
    intervals = ["95 % 1.20 to 1.80, n 1", "95 % 0.70 to 1.00, n 1", "no interval, n 1"]
    assert re.findall('title="(.*?)"', drawn) == intervals
    lines = "| nasd gamma=2 T=0 | 1.50× | 0.90× ± | | draft path T=0 | – | 1.20× |"
    assert " ".join(table.map_markdown(rows).split()).endswith(lines)


def test_maps_of_a_class_have_draft_lengths_as_columns() -> None:
    rows = [row(f"{name} gamma={gamma} T=0", "code", gamma / 2, None) for name in ("nasd", "draft") for gamma in (2, 8)]
    drawn = speedup_map_table([*rows, row("draft path T=0", "code", 1.0, None)])
    assert re.findall("<th>(.*?)</th>", drawn) == ["recipe, γ", "2", "8", "n-grams T=0", "draft T=0"]
    assert re.findall("<td.*?>(.*?)</td>", drawn) == ["1.00×", "4.00×"] * 2
    assert speedup_map_table(rows[:2]) == "" == table.map_markdown(rows[:1])


# --- comparison of several pairs --------------------------------------------------------------------------------------

ASKED_OF_PAIRS = ASKED | {"gammas": [2], "kinds": ["code"]}
SETTINGS = {"pair": "bundled", "max_tokens": 8, "chat": True, "mode": "off"}


@pytest.fixture(autouse=True)
def pairs(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs with a random target: complete, without drafter, absent, and not installed."""
    monkeypatch.setitem(PAIRS, "both", Pair("both", target, target, 2))
    monkeypatch.setitem(PAIRS, "alone", Pair("target without drafter", target, None, 2, method="nasd"))
    monkeypatch.setitem(PAIRS, "absent", Pair("absent", f"{target}/absent", None, 2, method="nasd"))
    monkeypatch.setitem(PAIRS, "uninstalled", Pair("not installed", "", None, 2, wheel="some-wheel"))


def chosen(*names: str, **changes: Any) -> tuple[list[PairBench], Any]:
    return selected_pairs(SETTINGS, "cpu", list(names), tuple(PAIRS), {**ASKED_OF_PAIRS, **changes})


def test_pairs_are_measured_in_turn_and_others_are_skipped() -> None:
    methods = ["draft", "nasd", "eagle"]
    benches, prompts = chosen("both", "absent", "uninstalled", "alone", "both", methods=methods)
    assert [bench.name for bench in benches] == ["both", "absent", "uninstalled", "alone"]
    recipes = [recipe for bench in benches for recipe in bench.recipes]
    assert len(recipes) == 3 * 3 and len(prompts) == 2 and all(not recipe.chat for recipe in recipes)
    assert count_measured(benches, prompts) == (0, 4)
    progress = []
    for item in measure_pairs(benches, prompts, ModelPool()):
        if item.doing.startswith("pair alone") and not any("pair alone" in former.doing for former in progress):
            assert count_measured(benches, prompts)[0] == 1  # a comparison that is stopped now shows one pair
            assert "| both " in describe_pairs(benches) and "| alone " not in describe_pairs(benches)
        progress.append(item)
    numbers = [item.number for item in progress]
    assert numbers == sorted(numbers) and numbers[0] == 0 and {numbers[-1], *(item.total for item in progress)} == {18}
    assert "pair alone, code" in str(progress[-1]) and progress[-1].share == 17 / 18
    assert count_measured(benches, prompts) == (2, 4)
    report = describe_pairs(benches)
    assert with_method_names(pairs_table(benches)) in report and leviathan_tables() in report
    (skipped,) = (line for line in report.splitlines() if "uninstalled" in line)
    assert skipped.startswith("- ") and "is not installed" in skipped and "pair absent" in report
    assert report.count("method eagle needs a head") == 3
    head, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in pairs_table(benches).splitlines()
    ]
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    copy = "draft gamma=2 (quantised copy)"
    assert [row["pair"] for row in rows] == ["both", "both", "alone", "alone"]
    assert [row["lane"] for row in rows] == ["draft gamma=2", "nasd gamma=2", copy, "nasd gamma=2"]
    for row in rows:
        assert (row["drafter MB"] == "–") == row["lane"].startswith("nasd")
        assert row["speed-up"] != "-" and float(row["tokens/pass"]) >= 1 and float(row["c"]) > 0
    assert float(rows[0]["alpha"]) == 1.0  # the drafter is the target


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
            pairs_bench_job(service, *chosen("bundled"))
        assert service.worker.active == 0
    finally:
        service.worker.close()


# --- measurements: a timer shows the results --------------------------------------------------------------------------

PATIENCE = 60.0
VISITOR = SimpleNamespace(session_hash="visitor", client=None)


class Bench:
    """A panel that measures two prompts; the second waits for a gate."""

    def __init__(self) -> None:
        self.readable, self.gate = True, threading.Event()
        self.service = Service(ModelPool(), lambda *_: (event for event in ()))
        with gr.Blocks() as blocks:
            self.panel, results = MeasurementPanel.create(self.service, "bench")
            with results:
                self.report = gr.Markdown()
            self.panel.connect([], [self.report], self.prepare)
        functions = {fn.targets[0]: fn.fn for fn in blocks.fns.values()}
        self.press = functions[self.panel.buttons[0]._id, "click"]
        self.tick = functions[self.panel._timer._id, "tick"]

    def prepare(self, session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        return PanelMeasurement(self.items, self.show, lambda records: (len(records), 2), "prompts")

    def show(self, records: list[Any]) -> dict[Any, Any]:
        if not self.readable:
            raise ValueError("the records cannot be shown")
        return {self.report: f"{len(records)} records"} if records else {}

    @property
    def stream(self) -> Stream[Any]:
        stream: Stream[Any] = self.service.visitors.find(VISITOR.session_hash).measurements[self.panel].stream
        return stream

    def items(self) -> Iterator[Any]:
        yield BenchProgress(1, 2, "code 1")
        yield {"name": "code 1"}
        while not self.gate.is_set():
            yield BenchProgress(2, 2, "code 2")
        yield {"name": "code 2"}

    def words(self, values: dict[Any, Any]) -> str:
        return str(values.get(self.panel.status, ""))


@pytest.fixture
def bench() -> Iterator[Bench]:
    started = Bench()
    yield started
    started.gate.set()
    started.service.worker.close()


def test_a_lost_response_is_repeated_by_the_next_one(bench: Bench) -> None:
    pressed = bench.press(VISITOR)
    assert pressed[bench.panel._timer].active is True and pressed[bench.panel.buttons[0]].interactive is False
    assert list(bench.tick(VISITOR)) == [bench.panel.status]  # still running
    bench.gate.set()
    assert bench.stream.wait(PATIENCE)
    lost, shown = bench.tick(VISITOR), bench.tick(VISITOR)
    assert bench.words(lost) == bench.words(shown) and "done: 2 of 2 prompts are measured" in bench.words(shown)
    assert shown[bench.report] == "2 records"
    assert shown[bench.panel._timer].active is False and shown[bench.panel.buttons[0]].interactive is True


def test_an_error_in_the_results_is_not_repeated(bench: Bench) -> None:
    bench.gate.set()
    bench.press(VISITOR)
    assert bench.stream.wait(PATIENCE)
    bench.readable = False
    with pytest.raises(ValueError, match="cannot be shown"):
        bench.tick(VISITOR)
    assert bench.tick(VISITOR)[bench.panel._timer].active is False


def test_a_second_press_stops_the_first_measurement(bench: Bench) -> None:
    bench.press(VISITOR)
    first = bench.stream
    bench.press(VISITOR)
    assert first.wait(PATIENCE) and first.stopping and not bench.stream.stopping


EVERY = {name: setting_of(option, option.default) for name, option in OPTIONS.items()}


def test_drafts_are_verified_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = calibration_recipe({**EVERY, "pair": "bundled", "mode": "speculative", "method": "ar"}, "cpu")
    assert recipe.cloud is None and recipe.method == "draft" and recipe.models[1]
    with pytest.raises(UserError, match="temperature"):
        calibration_recipe({**EVERY, "temperature": -1}, "cpu")
    monkeypatch.setitem(PAIRS, "alone", Pair("target without drafter", "target", None, 2, method="nasd"))
    with pytest.raises(UserError, match="gates need .*: add a drafter, or choose pair bundled"):
        calibration_recipe({**EVERY, "pair": "alone", "method": "nasd"}, "cpu")
