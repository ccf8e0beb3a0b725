"""Estimated speeds of other draft lengths, from the lines of a run."""

from fakes.shown_figures import RunFigures
from fakes.trace_lines import jsonl
from specdemo.ui.frames import read_traces
from specdemo.ui.run_estimate import RunEstimate, estimate_lengths


def estimates(run: RunFigures, longest: int) -> dict[int, tuple[float, float, list[float]]]:
    """Tokens per pass, tokens per second, and ordered speeds of 95 % of the simulated runs, by draft length.

    tests/core/test_theory.py verifies the estimate.
    """
    opened = read_traces(jsonl(*(line for lane in run.lanes.values() for line in (lane.header, *lane.steps))))
    estimate = estimate_lengths(opened.lanes["spec"], opened.lanes.get("ar"))
    assert isinstance(estimate, RunEstimate) and estimate.rows[-1].gamma == longest
    return {row.gamma: (row.tokens_per_pass, row.speed, [row.low] * 10 + [row.high] * 10) for row in estimate.rows}
