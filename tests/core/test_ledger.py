"""The ledger of a run: known costs, the link, unknown times, and its sum over real runs."""

from typing import Any

import pytest
from contracts.traces import golden_traces
from fakes.services import listening

from specdemo.core import trace
from specdemo.core.events import StepEvent
from specdemo.core.ledger import Ledger, TimeCause, one_row_seconds
from specdemo.core.step import Draft, LinkStats, Source, Step, Verdict
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.admission import ServiceOptions
from specdemo.remote.config import CloudConfig
from specdemo.remote.server import serve_model

PASS_S, ROW_S, DRAFT_S, COMMIT_S, BETWEEN_S = 1.0, 0.25, 0.5, 0.125, 0.0625
PROMPT_S = 3.0


def machine(drafts: list[int], link: LinkStats | None = None, waits_s: float = 0.0) -> list[Step]:
    """Steps with constant costs per pass, row, draft token and committed token, all draft tokens rejected."""
    steps = [Step(0, (1,), Draft(), Verdict((), 1, link=link), 0, 0.0, 2.0 + waits_s, 0.0, PROMPT_S + waits_s)]
    for i, drafted in enumerate(drafts, 1):
        draft_s = DRAFT_S * drafted
        verify_s = PASS_S + ROW_S * drafted + waits_s
        verdict = Verdict((), 1, link=link)
        t = steps[-1].t + draft_s + verify_s + COMMIT_S + BETWEEN_S
        steps.append(Step(i, (1,), Draft.chain((2,) * drafted), verdict, 4, draft_s, verify_s, COMMIT_S, t))
    return steps


def seconds(ledger: Ledger) -> dict[TimeCause, float]:
    return {entry.cause: entry.seconds for entry in ledger.entries}


def test_constant_costs_are_the_times_per_unit() -> None:
    ledger = Ledger.of(machine([4, 0, 2, 3]), PASS_S)
    assert ledger is not None
    assert {entry.cause: (entry.count, entry.seconds / max(1, entry.count)) for entry in ledger.entries} == {
        TimeCause.PROMPT: (0, PROMPT_S),
        TimeCause.PASS: (4, PASS_S),
        TimeCause.ROW: (9, ROW_S),
        TimeCause.DRAFT: (9, DRAFT_S),
        TimeCause.COMMIT: (4, COMMIT_S),
        TimeCause.OUTSIDE: (4, BETWEEN_S),
    }
    assert ledger.loss == f"guessing, {1000 * DRAFT_S * 9 / 4:.2f} ms per step"
    assert ledger.share(TimeCause.PROMPT) == pytest.approx(PROMPT_S / ledger.wall_s)
    assert sum(map(ledger.share, TimeCause)) == pytest.approx(1)


def test_waiting_for_a_link_is_no_time_of_a_pass() -> None:
    steps = machine([2, 2], LinkStats(cloud_s=PASS_S + 2 * ROW_S, up_s=0.5), waits_s=8.0)
    ledger = Ledger.of(steps)
    assert ledger is not None and ledger.loss.startswith("the link")
    waited = 8.0 * 2 + steps[0].seconds.verify - PASS_S - 2 * ROW_S
    assert seconds(ledger)[TimeCause.LINK] == pytest.approx(waited)
    assert seconds(ledger)[TimeCause.CHECK] == pytest.approx(2 * (PASS_S + 2 * ROW_S))
    assert sum(seconds(ledger).values()) == pytest.approx(ledger.wall_s)


def test_the_largest_loss_is_unknown_while_the_passes_may_contain_a_larger_one() -> None:
    ledger = Ledger.of(machine([1, 1]))
    assert ledger is not None and ledger.loss == ""
    assert seconds(ledger)[TimeCause.CHECK] == 2 * (PASS_S + ROW_S) and TimeCause.ROW not in seconds(ledger)
    split = Ledger.of(machine([1, 1]), PASS_S)
    assert split is not None and split.loss.startswith("guessing")


def test_a_pass_over_one_row_follows_from_the_baseline_or_from_the_costs_at_load() -> None:
    steps, costs = machine([4, 0, 4]), {"1": 1.0, "5": 1 + 4 * ROW_S}
    assert one_row_seconds(steps, {"parity": {"cost": costs}}) == pytest.approx(PASS_S)
    assert one_row_seconds(steps, {"parity": {"cost": costs}}, baseline=machine([0, 0, 0])) == PASS_S
    assert one_row_seconds(steps, {}) is None and one_row_seconds(steps[:1], {"parity": {"cost": costs}}) is None


def test_unknown_durations_have_no_ledger() -> None:
    unreported = Step(0, (1,), Draft(), Verdict((), 1, source=Source.UNREPORTED), 0, None, None, None, 1.0)
    assert Ledger.of([unreported]) is None and Ledger.of([]) is None


@pytest.mark.parametrize("name", golden_traces())
def test_recorded_traces_have_a_ledger(name: str) -> None:
    (recorded,) = trace.read(golden_traces()[name])
    steps = [event.step for event in recorded.steps]
    ledger = Ledger.of(steps, one_row_seconds(steps, recorded.header.environment))
    assert ledger is not None and sum(seconds(ledger).values()) == pytest.approx(steps[-1].t)


RUNS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 1.0},
    "tree": {"method": "tree", "temperature": 1.0},
    "prompt only": {"max_tokens": 1},
    "late responses": {"cloud": {"rtt_ms": 20.0, "deadline_ms": 5.0, "provisional": True}, "max_tokens": 12},
    "large model alone over a link": {"cloud": {"rtt_ms": 20.0, "mode": "cloud_only"}, "method": "ar"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_parts_of_a_run_add_up_to_its_wall_time(name: str, target: str, pool: ModelPool) -> None:
    values = {"target": target, "drafter": target, "device": "cpu", "max_tokens": 40} | RUNS[name]
    plan = plan_run(Recipe(**{**values, "cloud": None}))
    app = serve_model(pool.get(plan.target), ServiceOptions(local=True))
    with listening(app) as (host, port):
        if cloud := values.get("cloud"):
            values["cloud"] = CloudConfig(f"http://{host}:{port}", **cloud)
        steps = [event.step for event in generate(Recipe(**values), "abcabdabc", pool) if isinstance(event, StepEvent)]
    ledger = Ledger.of(steps, pass_s=min((step.seconds.verify for step in steps[1:]), default=None))
    assert ledger is not None and ledger.wall_s == steps[-1].t
    assert sum(seconds(ledger).values()) == pytest.approx(ledger.wall_s, rel=0.02)
    assert (TimeCause.LINK in seconds(ledger)) == ("cloud" in RUNS[name])
