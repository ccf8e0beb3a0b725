"""Figures of a run: speed-ups, tiles, table, costs of passes, and estimates of other draft lengths."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specdemo.core.formats import NOTHING, format_bytes, latency, number, percent, rate
from specdemo.core.ledger import Ledger, one_row_seconds
from specdemo.core.metrics import Metrics
from specdemo.core.policies import CostModel, costs_at_load
from specdemo.core.rules import rule_traits
from specdemo.core.simulate import other_gammas
from specdemo.core.theory import CostTerms, LengthEstimate
from specdemo.drafters import METHODS
from specdemo.ui.lane import (
    ALONE,
    BASELINE,
    LANES,
    SPEC,
    Lane,
    linked,
    mode,
    model_name,
    same_target,
    short_names,
    speed,
)
from specdemo.ui.text_comparison import differing_inputs, guarantee

Lanes = Mapping[str, Lane]
Speeds = Mapping[str, Sequence[float]]  # tokens per second of each repetition, by lane

FASTER, SLOWER = 1.05, 0.95  # ratios of a single run that are a result
ENOUGH_PAIRS = 5  # equal speeds give 5 ratios on one side of 1 in 6 % of the repetitions
MOST_PER_PASS = 1.05  # speed-up divided by tokens per pass
LEAST_PASS = 0.95  # duration of a pass over several rows, in passes over one row
LONGEST_ESTIMATE = 8  # longest draft of the estimate, in tokens
NOT_MEASURABLE = "not measurable now"
DISTURBED = "times disturbed"
_TABLE_HEAD = (
    "settings", "model", "speed-up", "tokens per pass", "guesses kept", "of the checked", "first token", "guarantee",
)  # fmt: skip


def measured_speedups(lanes: Lanes, speeds: Speeds, name: str = SPEC) -> list[float]:
    """Return the speed of a lane relative to the AR lane, once both have ended, of each pair or of the only run.

    Over a link they include the first token. Impossible values are left out: another program used the processor.
    """
    ratio = _measured_ratio(lanes, name)
    if ratio is None:
        return []
    pairs = zip(speeds.get(name, ()), speeds.get(BASELINE, ()), strict=False)
    ratios = [value / baseline for value, baseline in pairs if value and baseline]
    if len(ratios) < 2:  # without repetitions
        passes = typical_passes(lanes)
        if name == SPEC and passes and passes.ratio < LEAST_PASS:
            return []
        ratios = [ratio]
    return [value for value in ratios if value <= _largest_speedup(lanes, name)]


def withheld(lanes: Lanes, speeds: Speeds, name: str = SPEC) -> bool:
    """Return True if all measured speed-ups are impossible."""
    return _measured_ratio(lanes, name) is not None and not measured_speedups(lanes, speeds, name)


def disturbed_lanes(lanes: Lanes) -> list[str]:
    """Return lanes with impossible speed-ups, and the baseline."""
    disturbed = [name for name in lanes if withheld(lanes, {}, name)]
    return [*disturbed, BASELINE] if disturbed else []


def rates(lanes: Lanes) -> dict[str, str]:
    marks = dict.fromkeys(disturbed_lanes(lanes), f", {DISTURBED}")
    speeds = {name: speed(lane.metrics, linked(lanes)) for name, lane in lanes.items()}
    return {
        name: "" if value is None else f"{rate(value)} tok/s{marks.get(name, '')}" for name, value in speeds.items()
    }


def _largest_speedup(lanes: Lanes, name: str) -> float:
    """Return the largest possible speed-up: a step contains a pass of the target, which takes as long as an AR step."""
    gain = lanes[name].metrics.tokens_per_target_pass
    if not gain or linked(lanes) or not same_target(lanes[name], lanes[BASELINE]):
        return math.inf
    return MOST_PER_PASS * gain


def _measured_ratio(lanes: Lanes, name: str) -> float | None:
    if name == BASELINE or not all(lane in lanes and lanes[lane].ended for lane in (name, BASELINE)):
        return None
    if "prompt" in differing_inputs(lanes[name], lanes[BASELINE]):
        return None
    value, baseline = (speed(lanes[lane].metrics, linked(lanes)) for lane in (name, BASELINE))
    return value / baseline if value and baseline else None


def ratio_text(value: float) -> str:
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def tiles(lanes: Lanes, speeds: Speeds) -> dict[str, tuple[str, str]]:
    """Return value and note of each tile, also during a run."""
    lane = next(iter(lanes.values()))
    m = lane.metrics
    total = linked(lanes)
    clock = DISTURBED if disturbed_lanes(lanes) else "total time" if total else "without prefill"
    device = "" if lane.memory.device is None else f" · device {format_bytes(lane.memory.device)}"
    memory = f"weights {format_bytes(lane.weights)} · KV {format_bytes(lane.memory.kv)}{device}"
    return {
        "acceptance": (percent(m.acceptance_rate), _acceptance_note(lane)),
        "tokens_per_pass": _tokens_per_pass(lane),
        "tokens_per_second": (rate(speed(m, total)), f"{m.tokens} tokens, {clock}"),
        "ttft": (latency(m.ttft_s), "after the start"),
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
        return NOTHING, f"{m.decode_steps} passes of the helper, none of the large model"
    return number(m.tokens_per_target_pass, 2), f"{m.target_passes} passes"


def run_table(lanes: Lanes, speeds: Speeds) -> list[Sequence[str]]:
    """Return the head and a row per lane; the fastest of several is marked."""
    return [_TABLE_HEAD, *(_row(name, lane, lanes, speeds) for name, lane in lanes.items() if lane.begun)]


def _fastest(lanes: Lanes, speeds: Speeds) -> str | None:
    """Return the fastest lane, if several were measured and one is faster than the AR lane."""
    medians = {name: statistics.median(ratios) for name in lanes if (ratios := measured_speedups(lanes, speeds, name))}
    if len(medians) < 2:
        return None
    name, value = max(medians.items(), key=lambda measured: measured[1])
    return name if value > 1 else None


def marked_names(lanes: Lanes, speeds: Speeds) -> dict[str, str]:
    """Return the names of several lanes with drafts; the fastest is marked."""
    fastest = _fastest(lanes, speeds)
    return {name: f"{text}, fastest" if name == fastest else text for name, text in short_names(lanes).items()}


def _row(name: str, lane: Lane, lanes: Lanes, speeds: Speeds) -> list[str]:
    m = lane.metrics
    speedup, runs = _speedup(lanes, speeds, name)
    if name == BASELINE:
        speedup, runs = "1", "baseline"
    elif name == _fastest(lanes, speeds):
        runs += ", fastest"
    return [
        lane.title,
        model_name(lane.recipe),
        speedup if speedup == NOTHING else f"{speedup} ({runs})",
        _tokens_per_pass(lane)[0],
        percent(m.acceptance_rate),
        percent(m.alpha) if m.drafted and not rule_traits(lane.recipe).chains_only else NOTHING,
        latency(m.ttft_s),
        guarantee(lane)[0],
    ]


def _speedup(lanes: Lanes, speeds: Speeds, name: str = SPEC) -> tuple[str, str]:
    """Return the speed-up of a lane, and of how many runs it is."""
    ratios = measured_speedups(lanes, speeds, name)
    if not ratios:
        return NOTHING, NOT_MEASURABLE if withheld(lanes, speeds, name) else "no baseline measured"
    if len(ratios) > 1:
        spread = f"median of {len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}"
        return f"{statistics.median(ratios):.2f}×", spread
    return f"{ratio_text(ratios[0])}×", "one run, total time" if linked(lanes) else "one run"


def checking_cost(lanes: Lanes) -> str:
    """Return the cost of passes over the most frequent draft in words; empty if it is unknown or impossible."""
    passes = None if withheld(lanes, {}) else typical_passes(lanes)
    return f"checking {passes.rows} tokens costs {passes.ratio:.2f} times the time of writing 1" if passes else ""


def pass_costs(lanes: Lanes) -> dict[str, Any] | None:
    """Compare passes over the most frequent draft with those over one row; None also if they were withheld."""
    passes, words = typical_passes(lanes), checking_cost(lanes)
    if passes is None or not words:
        return None
    contrast = f", not {passes.rows} times" if passes.ratio < passes.rows else ""
    return {
        "words": f"{words[0].upper()}{words[1:]}{contrast}.",
        "bars": [["writing 1", passes.single_s], [f"checking {passes.rows}", passes.several_s]],
    }


@dataclass(frozen=True)
class TypicalPasses:
    """Median durations of passes over one row and over the most frequent draft."""

    rows: int
    single_s: float
    several_s: float

    @property
    def ratio(self) -> float:
        return self.several_s / self.single_s


def typical_passes(lanes: Lanes) -> TypicalPasses | None:
    """Return median durations of the passes of a comparison."""
    spec, plain = lanes.get(SPEC), lanes.get(BASELINE)
    if spec is None or plain is None or not (spec.ended and plain.ended) or mode(spec.recipe):
        return None
    checked = [(len(event.step.draft), event.step.verify_s) for event in spec.steps[1:] if event.step.draft.tokens]
    single = [event.step.verify_s for event in plain.steps[1:] if event.step.verify_s]
    drafts = Counter(length for length, verify_s in checked if verify_s)
    if not drafts or not single:
        return None
    rows = 1 + drafts.most_common(1)[0][0]
    several_s = statistics.median(verify_s for length, verify_s in checked if verify_s and length + 1 == rows)
    return TypicalPasses(rows, statistics.median(single), several_s)


@dataclass(frozen=True)
class RunEstimate:
    """Estimates of draft lengths beside the measured speed in tokens per second."""

    rows: Sequence[LengthEstimate]
    gamma: int | None  # draft length of the run, if fixed
    measured: float | None

    @property
    def fits(self) -> bool:
        """True if the run is within its own range."""
        own = [row for row in self.rows if row.gamma == self.gamma]
        return self.measured is None or all(row.low <= self.measured <= row.high for row in own)

    def as_dict(self) -> dict[str, Any]:
        rows = [(row.gamma, row.tokens_per_pass, row.speed, row.low, row.high) for row in self.rows]
        return {
            "rows": [[gamma, *(round(x, 3) for x in figures)] for gamma, *figures in rows],
            "gamma": self.gamma,
            "measured": self.measured,
            "fits": self.fits,
            "better": self.better and self.better.gamma,
        }

    @property
    def better(self) -> LengthEstimate | None:
        """Fastest other draft length, if its whole range is above the measured speed."""
        best = max(self.rows, key=lambda row: row.speed)
        if not self.fits or self.measured is None or best.gamma == self.gamma:
            return None
        return best if best.low > self.measured else None


@lru_cache(maxsize=len(LANES))  # headline, verdict and chart use it
def estimate_lengths(lane: Lane, baseline: Lane | None = None) -> RunEstimate | str:
    """Return the estimate for an ended lane, or the obstacle in words."""
    method = METHODS.get(lane.recipe["method"])
    if not lane.timed:
        return "The engine does not report the durations of its steps."
    if method and not method.drafts:
        return "This run did not draft."
    plain = baseline if baseline is not None and _comparable(lane, baseline) else None
    terms = cost_terms(lane.metrics, plain.metrics) if plain else None
    cost = costs_at_load(lane.environment)  # otherwise a line through the costs of this comparison
    if not cost and terms:
        cost = CostModel({1: 1.0, 1 + max(1, round(terms.drafted)): terms.v})
    if not cost:
        return "The trace does not contain the cost of passes over several rows."
    steps = [event.step for event in lane.steps]
    longest = LONGEST_ESTIMATE
    if method and method.copies and not method.sampled:  # drafts end with the known context
        longest = max((len(step.draft) for step in steps), default=0)
    gamma = lane.recipe["gamma"] if lane.recipe.get("policy", "fixed") == "fixed" else None
    lengths = sorted({*range(longest + 1), *([gamma] if gamma else [])})
    plain_steps = [event.step for event in plain.steps] if plain else []
    try:
        rows = other_gammas([steps], lengths, cost.verify, plain_steps, counted=lane.counted)
    except ValueError:
        return "The drafts are trees: other draft lengths cannot be estimated from them."
    if not rows:
        return "No draft token was tested in this run."
    return RunEstimate(rows, gamma, lane.metrics.tokens_per_second)


def lane_ledger(lane: Lane, baseline: Lane | None = None) -> Ledger | None:
    """Return the ledger of a lane; passes of a comparable `baseline` split its passes."""
    if not lane.timed:
        return None
    steps = [event.step for event in lane.steps]
    plain = baseline.steps if baseline is not None and _comparable(lane, baseline) else ()
    return Ledger.of(steps, one_row_seconds(steps, lane.environment, [event.step for event in plain]))


def cost_terms(spec: Metrics, baseline: Metrics) -> CostTerms | None:
    """Return the costs of a step in AR steps; None without a measured step of either, or if they are unknown."""
    if not (spec.decode_steps and baseline.decode_steps and baseline.decode_s):
        return None
    if spec.draft_s is None or spec.verify_s is None or spec.host_s is None:
        return None
    counts = {"drafted": spec.drafted, "steps": spec.decode_steps}
    pass_s = baseline.decode_s / baseline.decode_steps
    return CostTerms.of(spec.draft_s, spec.verify_s, spec.host_s, **counts, pass_s=pass_s)


def _comparable(lane: Lane, baseline: Lane) -> bool:
    return same_target(lane, baseline) and baseline.metrics.decode_steps > 0 and not mode(lane.recipe)


class BaselineComparison:
    """First lane compared with the AR lane: its speed-ups `ratios`, and its costs if step durations are known."""

    def __init__(self, lanes: Lanes, ratios: Sequence[float]) -> None:
        self.spec, self.plain = lanes[SPEC], lanes[BASELINE]
        self.linked = linked(lanes)
        self.pairs = ratios if len(ratios) > 1 else ()
        self.median = statistics.median(ratios)
        self.decided = len(self.pairs) >= ENOUGH_PAIRS
        self.terms = cost_terms(self.spec.metrics, self.plain.metrics)
        self.for_speed = self.spec.recipe["method"] != "beam" and mode(self.spec.recipe) not in ALONE

    @property
    def tone(self) -> str:
        """Good, bad, even, or none if speed is not the aim."""
        if not self.for_speed:
            return "none"
        if self.pairs and min(self.pairs) <= 1 < max(self.pairs):
            return "even"
        if self.decided:
            return "good" if self.median > 1 else "bad"
        return "good" if self.median >= FASTER else "bad" if self.median < SLOWER else "even"

    @property
    def outcome(self) -> str:
        value = f"{ratio_text(self.median)}×"
        equal = self.spec.metrics.tokens == self.plain.metrics.tokens
        measure = f" in total time{'' if equal else ' per token'}" if self.linked else ""
        times = ""
        if self.pairs:
            every = "all " if self.decided else ""
            times = f", {min(self.pairs):.2f} to {max(self.pairs):.2f} in {every}{len(self.pairs)} pairs"
        return {
            "good": f"{value} faster with drafts{measure}{times}",
            "bad": f"{value} the speed, slower with drafts{measure}{times}",
            "even": f"No clear difference: {value}{measure}{times}",
            "none": f"{value} the speed of the large model alone",
        }[self.tone]

    @property
    def better(self) -> LengthEstimate | None:
        estimate = estimate_lengths(self.spec, self.plain)
        return estimate.better if isinstance(estimate, RunEstimate) else None
