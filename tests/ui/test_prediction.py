"""Estimate of other draft lengths from a recorded run."""

import json
from typing import Any

import pytest
from fakes.trace_records import ALL_KEPT, PREFILL, REJECTION, absorb, end, header, step

from specdemo.models.zoo import ASSETS
from specdemo.ui.frames import Run, read_traces
from specdemo.ui.lane import PLAIN, SPEC, Lane
from specdemo.ui.run_estimate import RunEstimate, estimate_lengths


def lane(*lines: dict, **recipe: Any) -> Lane:
    run = Run()
    made = header()
    made["recipe"] = made["recipe"] | {"rule": "rejection", "temperature": 1.0} | recipe
    made["environment"] = made["environment"] | {"parity": {"cost": {"1": 1.0, "2": 1.0, "5": 1.1, "8": 1.4}}}
    absorb(run, SPEC, made, *lines, end())
    return run.lanes[SPEC]


def test_a_lane_of_another_target_is_no_baseline() -> None:
    drafted, plain = lane(PREFILL, REJECTION, ALL_KEPT), (PREFILL, step(1, pieces=["a"]))
    own, other = (estimate_lengths(drafted, lane(*plain, **changes)) for changes in ({}, {"target": "other"}))
    assert isinstance(own, RunEstimate) and isinstance(other, RunEstimate) and own.rows[0] != other.rows[0]


@pytest.mark.parametrize("path", sorted(ASSETS.glob("traces/*.jsonl")), ids=lambda path: path.stem)
def test_suggestion_advice_and_chart_use_one_estimate(path: Any) -> None:
    run = read_traces(path.read_text("utf-8"))
    frame = json.loads(run.frame(0))
    shown = frame["figures"][run.plan[0]]["what_if"]
    estimate = estimate_lengths(run.lanes[run.plan[0]], run.lanes.get(PLAIN))
    assert (shown is None) == isinstance(estimate, str)
    if isinstance(estimate, str):
        return
    assert [row[0] for row in shown["rows"]] == [row.gamma for row in estimate.rows]
    better, suggestions = estimate.better, frame["headline"]["suggestions"]
    gammas = {suggestion["set"]["gamma"] for suggestion in suggestions if "gamma" in suggestion.get("set", {})}
    assert gammas <= {better and better.gamma}
    assert "is estimated at" not in frame["verdict"] or f"γ {better and better.gamma} is estimated" in frame["verdict"]
