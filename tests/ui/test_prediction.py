"""Predictions, which a run may contradict, and the estimate of other draft lengths from a run."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from fakes.trace_records import PREFILL, absorb, end, header, step

from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS
from specdemo.preflight import Estimate, Preflight
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run, read_traces
from specdemo.ui.lane import PLAIN, SPEC, baseline_of
from specdemo.ui.run_estimate import estimate_lengths
from specdemo.ui.service import Service
from specdemo.ui.tabs.prediction import SpeedupPrediction, contradicted_prediction

PROMPT = "def quicksort(items):"
RECIPE = Recipe(pair="bundled", gamma=1, temperature=0.0)


def run_of(recipe: Recipe, prompt: str = PROMPT) -> Run:
    """Two tokens per step in the time of 1.25 steps of the baseline: 1.6 times as fast."""
    run = Run((SPEC, PLAIN), visitor="visitor")
    for name, own, pieces, guesses in ((SPEC, recipe, ["x", "y"], ("x",)), (PLAIN, baseline_of(recipe), ["x"], ())):
        times = {"draft_s": 0.0, "verify_s": 0.0125 if guesses else 0.01, "host_s": 0.0}
        lines = [step(i, pieces=pieces, draft=guesses, accepted=(0,) * len(guesses)) | times for i in range(1, 9)]
        made = header(recipe=asdict(own), prompt=prompt)
        absorb(run, name, made, PREFILL, *lines, end())
    run.finish()
    return run


def predicted(low: float, high: float) -> SpeedupPrediction:
    rows = tuple(Estimate(gamma, 2.0, 1.3, low, high) for gamma in (1, 2))
    return SpeedupPrediction(RECIPE, PROMPT, Preflight(RECIPE, 0.5, 0.1, {1: 1.0, 9: 2.0}, rows, 1, 1, "1 sampled", 48))


@pytest.mark.parametrize(
    ("low", "high", "changes", "prompt", "contradicted"),
    [
        (1.1, 1.58, {}, PROMPT, True),
        (1.1, 1.7, {}, PROMPT, False),
        (1.1, 1.58, {"gamma": 3}, PROMPT, False),  # other settings
        (1.1, 1.58, {"max_tokens": 9, "seed": 3}, PROMPT, True),
        (1.1, 1.58, {}, "another prompt", False),
    ],
)
def test_a_run_outside_the_interval_is_named(
    low: float, high: float, changes: dict[str, Any], prompt: str, contradicted: bool
) -> None:
    run = run_of(replace(RECIPE, **changes), prompt)
    words = predicted(low, high).describe(run)
    assert ("The last run measured 1.60×, outside this interval." in words) == contradicted
    service = Service(ModelPool(), engine=lambda *_: iter(()))
    service.visitors.enter("visitor").prediction = predicted(low, high)
    assert (contradicted_prediction(service, run) == words) == contradicted
    service.worker.close()


# --- estimates of other draft lengths from a recorded run -------------------------------------------------------------


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
