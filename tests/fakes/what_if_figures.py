"""Estimated speeds of other draft lengths, recomputed from the lines of a run."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fakes.shown_figures import PARTS, LaneFigures, Line, RunFigures

SIMULATIONS = 400


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass by its rows, of a drafted token, of the rest of a step, and of a step without a draft."""

    verify: Callable[[int], float]
    token: float
    host: float
    plain: float

    def step(self, drafted: int) -> float:
        return self.verify(drafted + 1) + drafted * self.token + self.host if drafted else self.plain


def pass_cost(run: RunFigures) -> Callable[[int], float]:
    """Cost of a pass by its rows: measured at load, else the line through the passes of this comparison."""
    measured = run.first.header["environment"].get("parity", {}).get("cost")
    points = {int(rows): cost for rows, cost in (measured or {}).items()}
    if not points:
        lane = run.first
        rows = 1 + max(1, round(lane.all_drafted / (len(lane.steps) - 1)))
        points = {1: 1.0, rows: run.step_cost("verify_s") or 1.0}
    known = sorted(points)
    heights = {rows: max(1.0, min(points[other] for other in known if other >= rows)) for rows in known}

    def cost(rows: int) -> float:
        if len(known) == 1:
            return heights[known[0]]
        a, b = next((pair for pair in pairwise(known) if rows <= pair[1]), (known[-2], known[-1]))
        return heights[a] + (heights[b] - heights[a]) * (rows - a) / (b - a)

    return cost


def chances_of(steps: Sequence[Line], longest: int) -> list[list[float]]:
    """Acceptance of a draft at each position of the text; untested tokens have the mean."""
    known = [beta for line in steps for beta in line["beta"] if beta is not None]
    mean = statistics.fmean(known)
    text: list[float] = []
    limits: list[int] = []
    for line in steps:
        tested = line["beta"][: len(line["tokens"])]
        betas = [*tested, *[None] * (len(line["tokens"]) - len(tested))]
        text += [mean if beta is None else beta for beta in betas]
        ended = len(line["draft"]) < line["gamma"]
        limits += [min(longest, len(line["draft"])) if ended else longest] * len(betas)
    return [text[i : i + limit] for i, limit in enumerate(limits)]


def costs_of(steps: Sequence[Line], run: RunFigures, draft_s: Sequence[float]) -> Costs:
    """Mean costs of the steps. Passes after drafts scale the cost by rows."""
    by_rows, plain = pass_cost(run), run.plain
    drafted = [line for line in steps if line["draft"]]
    scale = sum(line["verify_s"] for line in drafted) / sum(by_rows(len(line["draft"]) + 1) for line in drafted)
    host = statistics.fmean(line["host_s"] for line in steps)
    empty = [line["verify_s"] for line in steps if not line["draft"]]
    alone = statistics.fmean(line["verify_s"] for line in plain.steps[1:]) if plain else scale * by_rows(1)
    token = sum(draft_s) / sum(len(line["draft"]) for line in steps)
    return Costs(lambda rows: scale * by_rows(rows), token, host, (statistics.fmean(empty) if empty else alone) + host)


def draft_seconds(lane: LaneFigures) -> list[float]:
    """Seconds of the drafts, where the first one has no more than usual per token: it reads the prompt."""
    steps = lane.steps[1:]
    usual = statistics.median(line["draft_s"] / len(line["draft"]) for line in steps if line["draft"])
    seconds = [line["draft_s"] for line in steps]
    first = next(i for i, line in enumerate(steps) if line["draft"])
    seconds[first] = min(seconds[first], usual * len(steps[first]["draft"]))
    return seconds


def expected(chances: Sequence[Sequence[float]], gamma: int, cost: Callable[[int], float]) -> tuple[float, float]:
    """Expected number and cost of the steps that write the text."""
    starts = [1.0, *[0.0] * len(chances)]
    seconds = 0.0
    for i in range(len(chances)):
        draft = chances[i][: min(gamma, len(chances) - i - 1)]
        seconds += starts[i] * cost(len(draft))
        kept = starts[i]
        for length, chance in enumerate(draft):
            starts[i + length + 1] += kept * (1 - chance)
            kept *= chance
        starts[i + len(draft) + 1] += kept
    return sum(starts[:-1]), seconds


def estimates(run: RunFigures, longest: int) -> dict[int, tuple[float, float, list[float]]]:
    """Tokens per pass, tokens per second, and ordered speeds of simulated runs, by draft length."""
    lane, plain = run.first, run.plain
    steps, seconds = lane.steps[1:], draft_seconds(lane)
    opening = lane.total("draft_s") - sum(seconds)
    chances, costs = chances_of(steps, longest), costs_of(steps, run, seconds)
    rng = random.Random(1)
    made = {}
    for gamma in range(longest + 1):
        count, duration = expected(chances, gamma, costs.step)
        figures = len(chances) / count, len(chances) / (opening + duration)
        if gamma == 0 and plain is not None:
            figures = 1.0, plain.decode_tokens / plain.decode_s
        made[gamma] = (*figures, sorted(_simulated(run, gamma, longest, opening, rng) for _ in range(SIMULATIONS)))
    return made


def _simulated(run: RunFigures, gamma: int, longest: int, opening: float, rng: random.Random) -> float:
    """Speed of a run of as many steps, drawn from the recorded ones."""
    if gamma == 0 and run.plain is not None:
        drawn = rng.choices(run.plain.steps[1:], k=len(run.plain.steps) - 1)
        return sum(len(line["tokens"]) for line in drawn) / sum(line[part] for line in drawn for part in PARTS)
    lane = run.first
    pairs = [*zip(lane.steps[1:], draft_seconds(lane), strict=True)]
    sample = rng.choices(pairs, k=len(pairs))
    if not any(line["draft"] for line, _ in sample):
        return math.nan
    steps, seconds = zip(*sample, strict=True)
    chances, costs = chances_of(steps, longest), costs_of(steps, run, seconds)
    position, duration = 0, opening
    while position < len(chances):
        draft = chances[position][: min(gamma, len(chances) - position - 1)]
        kept = next((i for i, chance in enumerate(draft) if rng.random() >= chance), len(draft))
        position += 1 + kept
        duration += costs.step(len(draft))
    return len(chances) / duration
