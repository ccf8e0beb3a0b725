"""Benchmarks started from the page: settings, size limits, and presentation of the results."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from fakes.bench_records import run
from fakes.trace_records import absorb, end, header, step

from specdemo.bench import measure, table
from specdemo.bench.acceptance import Acceptance, AcceptanceCount
from specdemo.core.errors import UserError
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC
from specdemo.ui.tabs.bench import PLAIN, SWEEP_TABLE_HEAD, bars, class_colours, position_curves, sweep_cells
from specdemo.ui.tabs.bench_grid import MOST_RUNS, MOST_TOKENS, sweep
from specdemo.ui.tabs.sweep import Sweep, SweepResult, duration

ASKED: dict[str, Any] = {
    "methods": ["draft", "nasd"],
    "gammas": [2, 3],
    "policies": ["fixed"],
    "temperatures": [0],
    "kinds": ["code", "prose"],
    "each": 2,
}


def meant(tokens: int = 16, latest: Run | None = None, **changes: Any) -> Sweep:
    return sweep(lambda varied: Recipe(max_tokens=tokens, **varied), latest, **{**ASKED, **changes})


def test_recipes_equal_the_terminal_and_prompt_classes_alternate() -> None:
    found = meant()
    lanes = ["ar", "draft gamma=2", "draft gamma=3", "nasd gamma=2", "nasd gamma=3"]
    assert [measure.recipe_label(recipe) for recipe in found.recipes] == [f"{lane} T=0" for lane in lanes]
    assert [prompt.name for prompt in found.prompts] == ["code 1", "prose 1", "code 2", "prose 2"]
    assert found.runs == 20 and found.tokens == 320
    assert len(meant(kinds=["adversarial"], each=24).prompts) == 20  # the class has only 20 prompts


def test_every_class_has_a_colour() -> None:
    kinds = {prompt.kind for chat in (True, False) for prompt in load_prompts(chat=chat)}
    colours = class_colours([*kinds])
    assert {PLAIN, *kinds} == colours.keys() and len({*colours.values()}) == len(colours)


def test_several_servers_are_lanes() -> None:
    found = meant(external="vllm=http://127.0.0.1:1  llama.cpp=http://127.0.0.1:2")
    assert [recipe.external for recipe in found.recipes if recipe.external] == [
        "vllm=http://127.0.0.1:1",
        "llama.cpp=http://127.0.0.1:2",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": []}, "choose at least one method"),
        ({"kinds": []}, "choose at least one class of prompts"),
        ({"temperatures": None}, "choose at least one temperature"),
        ({"gammas": 3}, "choose at least one draft length"),
        ({"methods": ["magic"]}, "unknown method 'magic'"),
        ({"kinds": [["code"]]}, "unknown class of prompts"),
        ({"each": 0}, "prompts per class must be"),
        ({"each": 1.5}, "prompts per class must be"),
        ({"gammas": list(range(1, 1000))}, f"more than {MOST_RUNS} recipes"),
    ],
)
def test_empty_selections_raise(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        meant(**changes)


def test_oversized_grids_raise_with_size_and_estimated_time() -> None:
    most = MOST_TOKENS // 20  # 20 runs
    assert meant(most).tokens == MOST_TOKENS
    with pytest.raises(UserError, match=rf"20 runs of at most {most + 1} tokens, about 4 minutes at an assumed 100"):
        meant(most + 1)
    with pytest.raises(UserError, match="5 recipes × 84 prompts = 420 runs"):
        meant(1, kinds=["code", "repetitive", "prose", "adversarial"], each=24)


def test_estimate_uses_the_latest_run() -> None:
    latest = Run()
    for line in (header(), step(0, pieces=["a"]), step(1, pieces=["b", "X"], draft=("b", "c"), accepted=(0,)), end()):
        absorb(latest, SPEC, line)
    told = meant(latest=latest).describe(latest)  # two tokens in 0.03 s
    assert told.endswith("about 5 s at the 67 tokens per second of your latest run")
    assert meant().describe(Run()).endswith("about 3 s at an assumed 100 tokens per second")
    assert [duration(s) for s in (0.01, 99, 130)] == ["1 s", "99 s", "2 minutes"]


@pytest.fixture
def outcome() -> SweepResult:
    """AR decoding and a recipe on two classes: the recipe is faster on one and slower on the other."""
    recipes = (Recipe(method="ar", temperature=0), Recipe(temperature=0, gamma=2))
    prompts = [prompt for prompt in load_prompts() if prompt.name in ("code 1", "code 2", "prose 1")]
    return SweepResult(Sweep(recipes, tuple(prompts)))


WHERE = {"processor": "CPU", "device": "cpu", "dtype": "float32", "threads": 1, "engine": "lean"}
WHERE |= {"python": "3", "torch": "2", "transformers": "5"}


def record(name: str, seconds: float) -> dict[str, Any]:
    """AR decoding takes 1 s for 10 tokens, the other lane the given time for 20."""
    return {"kind": name[:-2], "name": name, "runs": [run(1.0, environment=WHERE), run(seconds, drafted=20)]}


def test_page_table_equals_the_bench_table(outcome: SweepResult) -> None:
    records = [record("code 1", 1.0), record("code 2", 4.0), record("prose 1", 2.5)]
    records += [record(f"code {i}", 1.6) for i in (3, 4, 5)]
    for one in records:
        outcome.absorb(one)
    rows = outcome.rows()
    assert rows == table.table(outcome.sweep.recipes, records)
    shown = [dict(zip(SWEEP_TABLE_HEAD, row, strict=True)) for row in sweep_cells(rows)]
    plain, code, _, prose = shown
    assert plain["speed-up"] == "baseline" and plain["95 %"] == plain["slower on"] == plain["α"] == "–"
    assert code["speed-up"] == "1.25×" and code["95 %"] == "0.50 to 2.00" and code["slower on"] == "1 of 5"
    assert prose["speed-up"] == "0.80× slower" and prose["95 %"] == "–" and prose["slower on"] == "1 of 1"
    assert code["accepted"] == "50 %" and code["α"] == "0.55" and code["tokens/pass"] == "2.00"
    assert code["mean overlap β"] == "0.60"
    assert code["same text"] == "5 of 5"
    notes = outcome.notes(rows)
    assert "code 2 (0.50x)" in notes and "prose 1 (0.80x)" in notes and "interrupted" not in notes
    plotted = {bar[0]: bar[2] for bar in bars(rows)["data"]}
    assert plotted == {"AR decoding": 1.0, "draft γ 2, code": 1.25, "draft γ 2, prose": 0.8}
    assert "n-grams gamma=2 T=0 on code 2" in outcome.notes([replace(row, lane="nasd gamma=2 T=0") for row in rows])
    text, line = outcome.files(rows)
    assert text == table.report(outcome.sweep.recipes, 6, records, rows)
    assert json.loads(line) == json.loads(table.as_json(rows)) and line.count("\n") == 1


def test_acceptance_of_all_lanes_is_plotted_by_position(outcome: SweepResult) -> None:
    """The classes are pooled; lanes without drafts have no line."""
    counts = {1: AcceptanceCount(4, 3), 2: AcceptanceCount(2, 1)}
    for name in ("code 1", "prose 1"):
        finished = record(name, 1.0)
        finished["runs"][1]["acceptance"] = Acceptance(position=counts)
        outcome.absorb(finished)
    plot = position_curves(outcome.rows())
    assert plot.count("<path") == 1 and ">draft γ 2 T=0</text>" in plot
    assert table.acceptance(outcome.rows())["draft gamma=2 T=0"].position[1] == AcceptanceCount(8, 6)


def test_progress_shows_finished_runs_and_remaining_time(outcome: SweepResult) -> None:
    assert "waiting for the device" in outcome.progress(0) and "queued: 2 ahead" in outcome.progress(0, ahead=2)
    outcome.absorb(measure.BenchProgress(0, 6, "ar T=0"))
    assert not outcome.timing and 'value="0"' in outcome.progress(5) and "to go" not in outcome.progress(5)
    outcome.absorb(measure.BenchProgress(3, 6, "<b>, ar T=0"))
    told = outcome.progress(8.0)  # two runs in eight seconds, four to run
    assert outcome.timing and 'value="2" max="6"' in told and "3 of 6: &lt;b&gt;, ar T=0 · about 16 s to go" in told


def test_final_status_marks_partial_results(outcome: SweepResult) -> None:
    assert "stopped: nothing is measured" in outcome.ending()
    outcome.absorb(record("code 1", 1.0))
    assert "stopped: partial, 1 of 3 prompts are measured" in outcome.ending()
    assert "failed: no &lt;memory&gt;; partial, 1 of 3" in outcome.ending("no <memory>")
    outcome.absorb(record("code 2", 1.0))
    outcome.absorb(record("prose 1", 1.0))
    assert "done: 6 runs on 3 prompts" in outcome.ending()
    assert "no recipe was slower" in outcome.notes(outcome.rows())
    outcome.records[0]["runs"][1]["paused_s"] = 1.0
    assert "interrupted 1 of these" in outcome.notes(outcome.rows())
