"""Data of steps for the browser, and the estimate of other draft lengths."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.trace_records import ALL_KEPT, PREFILL, REJECTION, absorb, end, header, step

from specdemo.ui import step_views
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC, Lane


def lane(*lines: dict, **recipe: Any) -> Lane:
    run = Run()
    made = header()
    made["recipe"] = made["recipe"] | {"rule": "rejection", "temperature": 1.0} | recipe
    made["environment"] = made["environment"] | {"parity": {"cost": {"1": 1.0, "2": 1.0, "5": 1.1, "8": 1.4}}}
    absorb(run, SPEC, made, *lines, end())
    return run.lanes[SPEC]


def test_what_if_is_calibrated_on_the_measured_lanes() -> None:
    """Gamma 0 is the speed of the AR lane; a run outside the range of its own gamma gets no advice."""
    made, plain = (
        lane(PREFILL, REJECTION, ALL_KEPT),
        lane(PREFILL, *(step(i, pieces=["a"]) for i in (1, 2)), method="ar"),
    )
    found, _ = step_views.what_if(made, plain)
    assert found["rows"][0][2] == pytest.approx(plain.metrics.tokens_per_second, abs=1e-3)
    assert (
        step_views.what_if(made, lane(PREFILL, step(1, pieces=["a"]), target="other"))[0]["rows"][0] != found["rows"][0]
    )
    gamma, _, speed, low, high = found["rows"][3]
    assert gamma == found["gamma"] and found["fits"] == (low <= made.metrics.tokens_per_second <= high)
    rejected = [
        REJECTION | {"i": i, "tokens": [1], "pieces": ["X"], "accepted": [], "beta": [1.0, None, None]}
        for i in range(1, 30)
    ]
    assert step_views.what_if(lane(PREFILL, *rejected))[0]["fits"] is False  # beta does not describe these outcomes


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_step_player_does_not_change_decisions_of_lenient_rules(temperature: float) -> None:
    """Its bounds have no threshold."""
    assert step_views.decided_by({"rule": "lenient", "temperature": temperature}) == "none"
    assert step_views.decided_by({"rule": "rejection", "temperature": 0.7}) == "draw"
