"""Benchmark: paired runs, medians checked by hand, losing cases included."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from fakes.bench_records import run
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.bench import measure, table
from specdemo.bench.baselines import BASELINES
from specdemo.core.events import End, Event, Header, Loading, MemoryUse, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.step import Draft, Step, Verdict
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

measuring = import_module("specdemo.bench.measure")  # the package has a function of that name


def test_speedups_are_medians_of_ratios_and_losses_are_named() -> None:
    recipes = [Recipe(method="ar", temperature=0), Recipe(temperature=0, gamma=2)]
    walls = [(1.0, 1.0), (1.0, 2.5), (1.0, 4.0 / 3.0)]  # seconds for 10 and for 20 tokens: 2x, 0.8x, 1.5x
    texts = [(1, 2), (1, 2), (1, 3)]
    records = [
        {"kind": "code", "name": f"code {i}", "runs": [run(plain), run(fast, drafted=20, text=text)]}
        for i, ((plain, fast), text) in enumerate(zip(walls, texts, strict=True))
    ]
    plain, draft = table.table(recipes, records, bandwidth=1000.0)
    assert plain.speedup is None and draft.speedup == pytest.approx(1.5)
    assert draft.interval is None  # less than five prompts
    assert draft.slower == ("code 1 (0.80x)",)
    assert draft.same_text == 2 and plain.same_text is None
    assert plain.bandwidth == pytest.approx(0.1) and draft.bandwidth == pytest.approx(0.075)
    text = table.markdown([plain, draft])
    assert "1 of 3" in text and "0.80-2.00" not in text
    assert json.loads(table.as_json([plain, draft]))["bench"][1]["speedup"] == pytest.approx(1.5)


def test_repetitions_of_prompts_are_not_independent() -> None:
    recipes = [Recipe(method="ar", temperature=0), Recipe(temperature=0, gamma=2)]
    walls = {"code 1": (2.5, 2.5, 1.0), "code 2": (2.5, 1.0, 1.0)} | dict.fromkeys(("code 3", "code 4"), (1.0,) * 3)

    def rows(walls: dict[str, tuple[float, ...]], repeat: int) -> list[table.BenchRow]:
        changed = {"code 2": {"text": (1, 3)}}
        records = [
            {"kind": "code", "name": name, "runs": [run(1.0), run(seconds[i], 20, **changed.get(name, {}))]}
            for i in range(repeat)
            for name, seconds in walls.items()
        ]
        return table.table(recipes, records)

    _, four = rows(walls, 3)
    assert (four.prompts, four.slower, four.same_text) == (4, ("code 1 (0.80x)",), 3)
    assert four.speedup == pytest.approx(2.0) and four.interval is None
    walls = {f"code {i}": (seconds,) * 8 for i, seconds in enumerate((1.0, 1.25, 2.0, 2.5, 4.0))}
    (_, once), (_, repeated) = rows(walls, 1), rows(walls, 8)  # speed-ups 2, 1.6, 1, 0.8, 0.5
    assert once.interval == repeated.interval == pytest.approx((0.5, 2.0))


def test_the_best_gamma_is_selected_on_other_prompts() -> None:
    """Gamma 2 is fast on a single prompt; the other prompt selects gamma 5."""
    recipes = [Recipe(temperature=0, gamma=2), Recipe(temperature=0, gamma=5), Recipe(temperature=0, policy="auto")]
    walls = {"code 1": (0.1, 1.0, 1.0), "code 2": (2.0, 1.0, 1.0)}
    records = [
        {"kind": "code", "name": name, "runs": [run(wall, drafted=20) for wall in row]}
        for name, row in [*walls.items(), *walls.items()]
    ]  # each prompt twice: both runs belong to the same prompt
    over = table.table(recipes, records)[2].over_fixed
    assert over == (1.5, None, None)  # ratios 1 and 2; less than five prompts


def test_real_models_are_measured_in_pairs(tmp_path: Path) -> None:
    models = {
        "target": str(save_model(tmp_path / "target", byte_level_tokenizer())),
        "drafter": str(save_model(tmp_path / "drafter", byte_level_tokenizer(), num_hidden_layers=1)),
    }
    settings = {"temperature": 0, "max_tokens": 12, "device": "cpu", **models}
    recipes = [Recipe(method=method, **settings) for method in ("ar", "draft", "nasd")]
    prompts, peers = load_prompts(kinds=["adversarial"])[:3], list(BASELINES)
    items = list(measure.measure(recipes, prompts, ModelPool(), peers))
    records = [item for item in items if isinstance(item, dict)]
    assert [record["name"] for record in records] == ["adversarial 1", "adversarial 2", "adversarial 3"]
    for record in records:
        plain, draft, _, *theirs = record["runs"]
        assert plain["drafted"] == 0 < draft["drafted"] and plain["tokens"] > 0
        assert all(run["text"] == plain["text"] for run in record["runs"])  # all lanes are greedy
        assert len(theirs) == len(peers) and all(run["ttft_s"] > 0 and run["wall_s"] > 0 for run in theirs)
    rows = table.table(recipes, records, peers, bandwidth=1e9)
    assert len(rows) == 3 + len({peer.family for peer in BASELINES.values()})
    assert all(row.same_text in (None, 3) for row in rows)


class Scripted:
    """Replacement of `generate`: steps of 1 s on a fake clock; counts steps and closed generators."""

    def __init__(self, end: str = "length") -> None:
        self.now, self.end, self.closed, self.steps = 0.0, end, 0, 0
        self.peak = MemoryUse(kv=1)

    def __call__(self, recipe: Recipe, text: str, pool: ModelPool) -> Iterator[Event]:
        start = self.now
        try:
            yield Loading("loading the target")
            yield Header({}, "", (), environment={"target_bytes": 7, "drafter_bytes": None})
            metrics = Metrics()
            for i in range(4):
                self.now += 1
                self.steps += 1
                step = Step(i, (i, i), Draft(), Verdict((), i), 0, 0.0, 0.0, 0.0, self.now - start)
                metrics = metrics.plus(step)
                yield StepEvent(step, ("a", "b"), metrics=metrics)
            error = "out of memory" if self.end == "error" else None
            yield End(self.end, error, metrics, self.peak)
        finally:
            self.closed += 1


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    script = Scripted()
    monkeypatch.setattr(measuring, "generate", script)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: script.now)
    return script


PROMPTS = [Prompt("code", "code 1", "a"), Prompt("prose", "prose 1", "b")]
RECIPES = [Recipe(method="ar", temperature=0), Recipe(method="nasd", temperature=0)]


@pytest.mark.parametrize("pause", [0.0, 0.5, 100.0])
def test_time_of_the_caller_between_steps_is_not_measured(scripted: Scripted, pause: float) -> None:
    records, turns = [], []
    for item in measure.measure(RECIPES, PROMPTS, ModelPool()):
        scripted.now += pause
        (records if isinstance(item, dict) else turns).append(item)
    runs = [run for record in records for run in record["runs"]]
    assert [run["wall_s"] for run in runs] == [3.0] * 4  # three seconds after the first token, without pauses
    assert [run["paused_s"] for run in runs] == [3 * pause] * 4
    assert table.disturbed(records) == (4 if pause else 0)
    timed = [turn for turn in turns if turn.number and "loading" not in turn.doing]
    assert [turn.number for turn in timed] == [n for n in (1, 2, 3, 4) for _ in range(5)]  # start and steps
    assert {turn.total for turn in turns} == {4} and str(turns[0]) == "warming up: ar T=0"
    assert str(timed[-1]).startswith("4 of 4: prose 1, ")


def test_a_grid_contains_ar_decoding_and_all_combinations() -> None:
    found = [
        measure.recipe_label(Recipe(**one))
        for one in measure.grid(["draft", "self"], [2, 5], ["fixed", "egag"], [0.0, 1.0])
    ]
    assert found == [
        f"{lane} T={temperature}"
        for temperature in (0, 1)
        for lane in (
            "ar",
            *(f"{method}{how}" for method in ("draft", "self") for how in (" gamma=2", " gamma=5", " egag")),
        )
    ]
    assert [one.get("gamma") for one in measure.grid(["draft"], [2, 5], ["egag"], [0.0])] == [None, 5]
