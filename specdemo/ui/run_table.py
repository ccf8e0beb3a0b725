"""Table of the lanes of a run: speed-up with its range, acceptance, time to first token, and exactness."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from specdemo.core.formats import NOTHING, latency, number, percent
from specdemo.core.rules import rule_traits
from specdemo.ui.labels import guarantee, lane_speedup, ratio_text
from specdemo.ui.lane import PLAIN, Lane, mode, model_name

RUN_TABLE_HEAD = (
    "settings", "model", "speed-up", "tokens per pass", "acceptance", "α", "first token", "guarantee",
)  # fmt: skip


def run_table(lanes: Mapping[str, Lane], speeds: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Return a row per lane that has begun; the range of the speed-up is that over all pairs."""
    return [_row(name, lane, lanes, speeds) for name, lane in lanes.items() if lane.begun]


def _row(name: str, lane: Lane, lanes: Mapping[str, Lane], speeds: Mapping[str, Sequence[float]]) -> list[str]:
    m, alone = lane.metrics, mode(lane.recipe) == "edge_only"
    return [
        lane.title,
        model_name(lane.recipe),
        _speedup(name, lanes, speeds),
        NOTHING if alone else number(m.tokens_per_target_pass, 2),
        percent(m.acceptance_rate),
        number(m.alpha, 2) if m.drafted and not rule_traits(lane.recipe).chains_only else NOTHING,
        latency(m.ttft_s),
        guarantee(lane)[0],
    ]


def _speedup(name: str, lanes: Mapping[str, Lane], speeds: Mapping[str, Sequence[float]]) -> str:
    if name == PLAIN:
        return "1 (baseline)"
    single = lane_speedup(lanes, name)
    if single is None:
        return NOTHING
    pairs = zip(speeds.get(name, ()), speeds.get(PLAIN, ()), strict=False)
    ratios = [speed / baseline for speed, baseline in pairs if speed and baseline]
    if len(ratios) < 2:
        return f"{ratio_text(single)}× (one run)"
    return f"{statistics.median(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})"
