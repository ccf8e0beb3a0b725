"""Tabs without a browser: theory, edge and cloud, memory."""

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.heads import head_config, head_tensors, save_head
from fakes.page import figure_of
from fakes.traces import ALL_KEPT, PREFILL, REJECTION, absorb, end, header, step, step_event, trace_lines
from transformers import AutoConfig

from specdemo.core.errors import UserError
from specdemo.core.ledger import parts
from specdemo.models import memory
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS, Pair
from specdemo.preflight import Preflight, predict
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC
from specdemo.ui.limits import PUBLIC
from specdemo.ui.service import Service
from specdemo.ui.tabs import memory as ledger
from specdemo.ui.tabs import worked_example as worked
from specdemo.ui.tabs.edge import LINK_TABLE_HEAD, describe_link, edge_lane, step_measurements
from specdemo.ui.tabs.theory import Coefficients, call_timeline, calls, describe_run, point_of, slider_values


def ended(*lines: dict[str, Any], **head: Any) -> Run:
    run = Run((SPEC,))
    absorb(run, SPEC, header(**head), PREFILL, *lines, end())
    run.finish()
    return run


def test_costs_and_speedup_require_a_baseline_lane() -> None:
    point = point_of(ended(REJECTION, ALL_KEPT))
    at = point.coefficients
    assert all(map(math.isnan, (at.c, at.v, at.o, point.speedup, at.speedup)))
    assert point.tokens == 2.5 and not math.isnan(point.operations)
    assert "Without an AR baseline" in describe_run(point) and "×" not in describe_run(point)
    defaults = Coefficients()
    assert slider_values(at) == [0.75, defaults.c, 2, defaults.v, defaults.o, round(5 / 28, 2)]
    tree = point_of(ended(REJECTION | {"parents": [-1, -1, 0]}))
    assert not tree.chains and "trees" in describe_run(tree)


@pytest.mark.parametrize(
    ("values", "why"), [([0, 0, 0, 0], "p sums to 0"), ([1e308, 1e308, 1e308, 0], "p sums to inf")]
)
def test_invalid_probabilities_raise_an_error(values: list, why: str) -> None:
    with pytest.raises(UserError, match=why):
        worked.parse_probs("p", values)


def test_example_columns_sum_to_p() -> None:
    generator = random.Random(3)
    distributions = [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0.5, 0.5, 0, 0]]
    for _ in range(20):
        weights = [generator.random() ** 3 for _ in range(4)]
        distributions.append([weight / sum(weights) for weight in weights])
    for p, q in ((p, q) for p in distributions for q in distributions):
        words = worked.describe_example(p, q)
        assert f"**β = {sum(map(min, p, q)):.3f}**" in words
        _, *rows = [line for line in words.splitlines() if line.startswith("|") and "---" not in line]
        for row, a, b in zip(rows, p, q, strict=True):
            accepted, corrected, total = map(float, re.findall(r"[\d.]+", row.strip("| ").rpartition("|")[2]))
            assert total == pytest.approx(a, abs=6e-4) and accepted == pytest.approx(min(a, b), abs=6e-4)
            assert corrected == pytest.approx(max(a - b, 0), abs=6e-4)


# --- timeline of model calls -----------------------------------------------------------------------------------------


def test_a_step_is_gamma_drafter_calls_and_a_target_pass() -> None:
    """In order and without overlap; the browser tests compare the durations with the trace."""
    found = calls(ended(REJECTION, ALL_KEPT).lanes[SPEC])
    assert [call.kind for call in found] == ["prompt", *["draft"] * 3, "target", *["draft"] * 2, "target"]
    for earlier, later in zip(found, found[1:], strict=False):
        assert earlier.start + earlier.duration <= later.start + 1e-6
    assert found[4].start + found[4].duration == pytest.approx(1000 * REJECTION["t"])


def test_a_level_of_a_tree_is_a_call_and_drafts_of_a_text_are_none() -> None:
    tree = step(1, pieces=["b", "X"], draft=("a", "b", "c"), accepted=(1,), tested=2) | {"parents": [-1, -1, 1]}
    _, first, second, target = calls(ended(tree).lanes[SPEC])
    assert (first.kind, second.kind, target.kind) == ("draft", "draft", "target")
    assert "'a' rejected, 'b' accepted" in first.tooltip and "'c'" in second.tooltip
    line = step(1, pieces=["b", "X"], draft=("b",), accepted=(0,), q=None, origin=[{"source": "n-gram"}])
    assert [call.kind for call in calls(ended(line).lanes[SPEC])] == ["prompt", "search", "target"]
    assert "encoder and first pass" in calls(ended(encoder=True).lanes[SPEC])[0].tooltip


def test_markup_in_tokens_of_the_timeline_is_escaped() -> None:
    line = step(1, pieces=['<b>"', "X"], draft=('<b>"',), accepted=(0,))
    text = call_timeline([ended(line).lanes[SPEC]], 0, 16)
    assert "<b>" not in text and "'<b>\"' accepted" in figure_of(text)["blocks"][1]["tooltip"]


# --- edge and cloud: the run in numbers ------------------------------------------------------------------------------

WIRE = {"remote": "http://cloud:8300", "mode": "speculative", "rtt_ms": 30.0}
RECIPE = {"method": "draft", "gamma": 3, "temperature": 0.0, "rule": "rejection", "cloud": WIRE}
ASKED = {"escalated": 1.0, "sent": 1.0, "rows": 0.0, "bytes_up": 200.0, "bytes_down": 300.0}
TIMES = {"cloud_s": 0.008, "rtt_s": 0.032, "up_s": 0.015, "down_s": 0.013}


def over_the_link(i: int, accepted: int, **notes: float) -> dict[str, Any]:
    """Step verified in time: 3 ms of drafting, 40 ms of waiting, and 7 ms unaccounted between steps."""
    pieces = [*"abc"[:accepted], "X"]
    line = step(i, pieces=pieces, draft=(*"abc",), accepted=(*range(accepted),), tested=min(accepted + 1, 3))
    times = {"draft_s": 0.003, "verify_s": 0.04, "host_s": 0.0, "t": 0.05 * (i + 1)}
    return line | times | {"remote": {**ASKED, **TIMES, **notes}}


UNVERIFIED = {"p": [None] * 2, "beta": [None] * 2, "draw": [None] * 2, "choices": [], "top": [None] * 2, "q": None}
LINES = [
    PREFILL | {"remote": {**ASKED, **TIMES}, "verify_s": 0.04, "draft_s": 0.0},
    over_the_link(1, 1),
    over_the_link(2, 3, hard_ratio=0.5),
    step(3, pieces=["a"], draft=("a", "b"), accepted=(0,), **UNVERIFIED, remote={"escalated": 1.0, "provisional": 1.0}),
    over_the_link(4, 0, confirmed=1.0, overruled=0.0, hard_ratio=1.0),
]
STEPS = [step_event(line).step for line in LINES]


def played(**options: Any) -> Run:
    run = Run()
    absorb(run, SPEC, header(recipe=RECIPE | options), *LINES, end())
    run.finish()
    return run


def test_parts_of_steps_fill_the_time_without_overlap() -> None:
    end_s = 0.0
    for _, start, seconds in (part for of_step in parts(STEPS) for part in of_step):
        assert start == pytest.approx(end_s) and seconds > 0
        end_s = start + seconds
    assert end_s == pytest.approx(LINES[-1]["t"])
    causes = [(cause, pytest.approx(seconds)) for cause, _, seconds in parts(STEPS)[1]]
    delay = (0.04 - 0.015 - 0.013 - 0.008) / 2
    assert causes[2:] == [("up", 0.015), ("way", delay), ("verify", 0.008), ("way", delay), ("down", 0.013)]
    assert [cause for cause, _ in causes[:2]] == ["idle", "draft"]


def test_visitors_cannot_kill_shared_services() -> None:
    public = Service(ModelPool(), lambda *_: iter(()), PUBLIC)
    with pytest.raises(UserError, match="belong to all visitors"):
        public.kill_replica(played())


def test_table_contains_the_measures_of_the_guide() -> None:
    total, *rows = [dict(zip(LINK_TABLE_HEAD, row, strict=True)) for row in step_measurements(STEPS)]
    assert [row["round"] for row in rows] == ["0", "1", "2", "3", "4"] and total["round"] == "all"
    assert [row["la/k"] for row in rows] == ["–", "0.33", "1.00", "–", "0.00"]
    assert [row["cumulative acceptance"] for row in rows] == ["–", "33 %", "67 %", "67 %", "44 %"]
    assert rows[1]["alpha_mean"] == "0.750" and rows[3]["alpha_mean"] == "–"
    assert (rows[1]["edge_time ms"], rows[1]["cloud_prefill ms"], rows[1]["rtt ms"]) == ("3.00", "8.00", "32.00")
    assert (rows[3]["cloud_prefill ms"], rows[3]["rtt ms"], rows[3]["verdict"]) == ("–", "–", "provisional")
    assert (total["k"], total["bytes up"], total["escalated"], total["hard_ratio"]) == ("11", "800", "5", "0.75")


def test_markdown_of_a_trace_is_escaped() -> None:
    said = describe_link(edge_lane(played(method="![](http://evil.example/a.png)")))
    assert "![](" not in said and "evil" in said


# --- memory use and requirements, against real models and the trace --------------------------------------------------

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
