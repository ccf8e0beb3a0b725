"""Figures of a run: speed-ups, tiles, table and costs of passes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specdemo.core.formats import NOTHING, format_bytes, latency, number, percent
from specdemo.core.rules import rule_traits
from specdemo.ui.lane import PLAIN, SPEC, Lane, linked, mode, model_name, speed
from specdemo.ui.text_comparison import differing_inputs, guarantee

Lanes = Mapping[str, Lane]
Speeds = Mapping[str, Sequence[float]]  # tokens per second of each repetition, by lane

DISTURBED = 0.9  # ratio of the times of passes below which noise is the cause
_TABLE_HEAD = ("settings", "model", "speed-up", "tokens per pass", "acceptance", "α", "first token", "guarantee")


def lane_speedup(lanes: Lanes, name: str = SPEC) -> float | None:
    """Speed of a lane relative to the AR lane, once both have ended; over a link including the first token."""
    if name == PLAIN or not all(lane in lanes and lanes[lane].ended for lane in (name, PLAIN)):
        return None
    if "prompt" in differing_inputs(lanes[name], lanes[PLAIN]):
        return None
    value, baseline = (speed(lanes[lane].metrics, linked(lanes)) for lane in (name, PLAIN))
    return value / baseline if value and baseline else None


def ratio_text(value: float) -> str:
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def pairs_of(speeds: Speeds, name: str = SPEC) -> list[float]:
    """Return the speed-up of each pair; empty without repetitions."""
    pairs = zip(speeds.get(name, ()), speeds.get(PLAIN, ()), strict=False)
    ratios = [value / baseline for value, baseline in pairs if value and baseline]
    return ratios if len(ratios) > 1 else []


def tiles(lanes: Lanes, speeds: Speeds) -> dict[str, tuple[str, str]]:
    """Return value and note of each tile, also during a run."""
    lane = next(iter(lanes.values()))
    m = lane.metrics
    device = "" if lane.memory.device is None else f" · device {format_bytes(lane.memory.device)}"
    memory = f"weights {format_bytes(lane.weights)} · KV {format_bytes(lane.memory.kv)}{device}"
    return {
        "acceptance": (percent(m.acceptance_rate), _acceptance_note(lane)),
        "tokens_per_pass": _tokens_per_pass(lane),
        "tokens_per_second": (number(m.tokens_per_second, 1), f"{m.tokens} tokens, without prefill"),
        "ttft": (latency(m.ttft_s), "from the worker's start"),
        "memory": (format_bytes(lane.memory.process), memory),
        "speedup": _speedup(lanes, speeds),
    }


def _acceptance_note(lane: Lane) -> str:
    m = lane.metrics
    unverified = f" · {m.unverified} unverified" if m.unverified else ""
    if not m.drafted:
        return f"nothing drafted{unverified}"
    alpha = "" if rule_traits(lane.recipe).chains_only else f" · α {number(m.alpha, 2)}"
    overlap = "" if lane.counted else f" · {lane.acceptance_name} {number(lane.acceptance, 2)}"
    return f"{m.accepted} of {m.drafted - m.unverified_drafted} drafted{alpha}{overlap}{unverified}"


def _tokens_per_pass(lane: Lane) -> tuple[str, str]:
    m = lane.metrics
    if mode(lane.recipe) == "edge_only":
        return NOTHING, f"{m.decode_steps} passes of the drafter, none of the target"
    return number(m.tokens_per_target_pass, 2), f"{m.target_passes} target passes"


def run_table(lanes: Lanes, speeds: Speeds) -> list[Sequence[str]]:
    """Return the head and a row per lane."""
    return [_TABLE_HEAD, *(_row(name, lane, lanes, speeds) for name, lane in lanes.items() if lane.begun)]


def _row(name: str, lane: Lane, lanes: Lanes, speeds: Speeds) -> list[str]:
    m = lane.metrics
    speedup, runs = _speedup(lanes, speeds, name)
    if name == PLAIN:
        speedup, runs = "1", "baseline"
    return [
        lane.title,
        model_name(lane.recipe),
        speedup if speedup == NOTHING else f"{speedup} ({runs})",
        _tokens_per_pass(lane)[0],
        percent(m.acceptance_rate),
        number(m.alpha, 2) if m.drafted and not rule_traits(lane.recipe).chains_only else NOTHING,
        latency(m.ttft_s),
        guarantee(lane)[0],
    ]


def _speedup(lanes: Lanes, speeds: Speeds, name: str = SPEC) -> tuple[str, str]:
    """Return the speed-up of a lane, and of how many runs it is."""
    ratio = lane_speedup(lanes, name)
    if ratio is None:
        return NOTHING, "no baseline measured"
    if pairs := pairs_of(speeds, name):
        return f"{statistics.median(pairs):.2f}×", f"median of {len(pairs)} pairs, {min(pairs):.2f} to {max(pairs):.2f}"
    return f"{ratio_text(ratio)}×", "one run, total time" if linked(lanes) else "one run"


def pass_costs(lanes: Lanes) -> dict[str, Any] | None:
    """Compare passes over the most frequent draft with those over one row."""
    spec, plain = lanes.get(SPEC), lanes.get(PLAIN)
    if spec is None or plain is None or not (spec.ended and plain.ended) or mode(spec.recipe):
        return None
    checked = [(len(event.step.draft), event.step.verify_s) for event in spec.steps[1:] if event.step.draft.tokens]
    single = [event.step.verify_s for event in plain.steps[1:] if event.step.verify_s]
    drafts = Counter(length for length, verify_s in checked if verify_s)
    if not drafts or not single:
        return None
    rows = 1 + drafts.most_common(1)[0][0]
    several_s = statistics.median(verify_s for length, verify_s in checked if verify_s and length + 1 == rows)
    ratio = several_s / statistics.median(single)
    words = f"Why: checking {rows} tokens takes {ratio:.1f} times as long as writing 1."
    if ratio < DISTURBED:
        cause = f"checking {rows} tokens cannot be faster than writing 1"
        words = f"Other programs disturbed the times of the passes: {cause}. Press Repeat."
    bars = [["writing 1", statistics.median(single)], [f"checking {rows}", several_s]]
    return {"words": words, "bars": bars}
