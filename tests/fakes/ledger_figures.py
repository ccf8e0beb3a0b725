"""Wall time of a lane by cause, recomputed from the lines of a run."""

import statistics
from collections.abc import Iterator
from itertools import pairwise

from fakes.shown_figures import TARGET_OPTIONS, Claim, LaneFigures, RunFigures, by_target, claim

Causes = dict[str, tuple[float, int]]  # seconds and number of units by the words of the page


def link_s(line: dict) -> float:
    """Seconds of a verification in which the cloud did not compute."""
    return line["verify_s"] - (line.get("remote") or {}).get("cloud_s", 0.0)


def pass_cost(points: dict[int, float], rows: int) -> float:
    """Cost of a pass on the line through measured costs, which are at least 1 and do not fall."""
    known = sorted(points)
    heights = {count: max(1.0, min(points[other] for other in known if other >= count)) for count in known}
    if len(known) == 1:
        return heights[known[0]]
    a, b = next((pair for pair in pairwise(known) if rows <= pair[1]), (known[-2], known[-1]))
    return heights[a] + (heights[b] - heights[a]) * (rows - a) / (b - a)


def one_row(run: RunFigures, lane: LaneFigures) -> float | None:
    """Seconds of a pass over one row: in the baseline, else from the costs that were measured at load."""
    plain = run.plain
    same = plain and all(lane.recipe.get(option) == plain.recipe.get(option) for option in TARGET_OPTIONS)
    if plain and same and not lane.linked and not any(map(run.withheld, run.lanes)):
        return statistics.median(line["verify_s"] for line in plain.steps[1:])
    points = {int(rows): cost for rows, cost in lane.header["environment"].get("parity", {}).get("cost", {}).items()}
    if not points:
        return None
    return statistics.median(line["verify_s"] / pass_cost(points, 1 + len(line["draft"])) for line in lane.steps[1:])


def causes(run: RunFigures, lane: LaneFigures) -> Causes:
    steps, single = lane.steps[1:], one_row(run, lane)
    crossed = any("cloud_s" in (line.get("remote") or {}) for line in lane.steps)
    waited = [link_s(line) if crossed else 0.0 for line in lane.steps]
    drafted, target_s = lane.all_drafted, lane.total("verify_s") - sum(waited[1:])
    passes = len([line for line in steps if by_target(line)])
    writing_s = target_s
    words = "writing a token"
    if drafted and single is not None:
        writing_s = min(target_s, passes * single)
    elif drafted:
        words = "checking"
    parts = {
        "until the first token": (lane.ttft_s - waited[0], 0),
        words: (writing_s, passes),
        "checking the guesses": (target_s - writing_s, drafted),
        "guessing": (lane.total("draft_s"), drafted),
        "the rest": (lane.total("host_s"), lane.decode_tokens),
        "the link": (sum(waited), len(steps)),
    }
    between = lane.steps[-1]["t"] - sum(seconds for seconds, _ in parts.values())
    return parts | {"between the steps": (between, len(steps))}


def loss(run: RunFigures, lane: LaneFigures) -> Iterator[Claim]:
    """The largest loss of a step, compared with writing a token."""
    found, steps = causes(run, lane), len(lane.steps) - 1
    kept = {
        name: seconds
        for name, (seconds, _) in found.items()
        if name not in ("until the first token", "between the steps", "writing a token")
    }
    name = max(kept, key=lambda name: kept[name])
    yield claim(f"Largest extra cost: {name}, {{}} ms per step.", 1000 * kept[name] / steps if steps else None)


def ledger_table(run: RunFigures, lane: LaneFigures) -> Iterator[Claim]:
    found, wall = causes(run, lane), lane.steps[-1]["t"]
    yield claim("{} s from the start to the last token", wall)
    yield Claim("{} × {} ms", [(count, 1000 * seconds / count) for seconds, count in found.values() if count])
    yield Claim("{} ms", [(1000 * seconds,) for seconds, _ in found.values()])
    yield Claim("{} %", [(100 * seconds / wall,) for seconds, _ in found.values()])
