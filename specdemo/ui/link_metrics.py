"""Measures of a run over a link: parts of each step in time, and the practice guide's table.

The delay per direction cannot be measured at an end of the link: it is split evenly around the cloud's pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from specdemo.core.errors import UserError
from specdemo.core.step import Step
from specdemo.ui.frames import Run
from specdemo.ui.labels import number, percent
from specdemo.ui.lane import Lane, mode, title

SLACK = 1.02  # tolerated deviation of the two clocks
LINK_TABLE_HEAD = (
    "round", "k", "accepted_len", "la/k", "alpha_mean", "edge_time ms", "cloud_prefill ms", "rtt ms",
    "bytes up", "bytes down", "hard_ratio", "escalated", "cumulative acceptance", "verdict",
)  # fmt: skip
VERDICTS = {"": "", "provisional": "provisional", "gate": "not queried", "alone": "cloud lost"}

WORDS = {
    "draft": "drafting",
    "up": "sending",
    "way": "link delay",
    "verify": "cloud's pass",
    "down": "receiving",
    "wait": "waiting",
    "idle": "idle",
}

_FACTS = (  # name in the trace, label, scale, digits
    ("cloud_s", "cloud, ms", 1000, 1),
    ("rtt_s", "link, ms", 1000, 1),
    ("bytes_up", "bytes up", 1, 0),
    ("bytes_down", "bytes down", 1, 0),
    ("hard_ratio", "hard", 1, 2),
)
_TOTALS = {
    "provisional": "committed provisionally",
    "confirmed": "confirmed",
    "overruled": "overruled",
}
Part = tuple[str, float, float]  # activity, start, duration; in seconds


def edge_lane(run: Run | None) -> Lane:
    """Return the first lane with a remote target. Raises `UserError` otherwise."""
    if run is None:
        raise UserError("No run available: choose a mode under Edge and cloud in the settings, then press Run")
    if not run.over:
        raise UserError("A run is in progress: return when it has ended")
    lane = next((lane for lane in run.lanes.values() if mode(lane.recipe)), None)
    if lane is None or not lane.metrics.steps:
        raise UserError("The last run had no cloud: choose a mode under Edge and cloud in the settings, then press Run")
    return lane


def steps(lane: Lane) -> list[Step]:
    return [event.step for event in lane.steps]


def parts(steps: Sequence[Step]) -> list[list[Part]]:
    """Split each step into idle, draft, up, way, verify, way, down; or into draft and wait.

    Verification is a wait if its response belongs to another step or the cloud's share is unknown.
    """
    result, end = [], 0.0
    for step in steps:
        start = max(end, step.t - step.draft_s - step.verify_s)
        activities: list[Part] = [("idle", end, start - end), ("draft", start, step.draft_s)]
        at = start + step.draft_s
        for activity, seconds in waited(step):
            activities.append((activity, at, seconds))
            at += seconds
        result.append([part for part in activities if part[2] > 0])
        end = step.t
    return result


def waited(step: Step) -> Iterator[tuple[str, float]]:
    link = step.verdict.notes
    cloud = link.get("cloud_s")
    up, down = link.get("up_s", 0.0), link.get("down_s", 0.0)
    if cloud is None or cloud + up + down > step.verify_s * SLACK:
        yield "wait", step.verify_s
        return
    way = max(0.0, step.verify_s - cloud - up - down) / 2
    yield from (("up", up), ("way", way), ("verify", cloud), ("way", way), ("down", down))


def link_facts(step: Step) -> list[tuple[str, str]]:
    link = step.verdict.notes
    return [(label, f"{link[name] * scale:,.{digits}f}") for name, label, scale, digits in _FACTS if name in link]


def totals(steps: Sequence[Step]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for activity, _, seconds in (part for step_parts in parts(steps) for part in step_parts):
        sums[activity] = sums.get(activity, 0.0) + seconds
    return sums


def measures(steps: Sequence[Step]) -> list[list[str]]:
    """Return the table of the practice guide, section 9: a total, then a row per step."""
    drafted = list(accumulate(len(step.draft) for step in steps))
    accepted = list(accumulate(len(step.verdict.accepted) for step in steps))
    rows = [
        _row(str(step.i), [step], kept / tried if tried else None)
        for step, kept, tried in zip(steps, accepted, drafted, strict=True)
    ]
    share = accepted[-1] / drafted[-1] if steps and drafted[-1] else None
    return [_row("all", steps, share), *rows]


def _row(name: str, steps: Sequence[Step], cumulative: float | None) -> list[str]:
    """Sums over `steps`; ratios of sums, means of shares."""
    k, accepted = sum(len(step.draft) for step in steps), sum(len(step.verdict.accepted) for step in steps)
    betas = [beta for step in steps for beta in step.betas]

    def noted(name: str) -> list[float]:
        return [step.verdict.notes[name] for step in steps if name in step.verdict.notes]

    def total(name: str) -> float | None:
        return sum(noted(name)) if noted(name) else None

    times = (sum(step.draft_s for step in steps), total("cloud_s"), total("rtt_s"))
    hard = noted("hard_ratio")
    return [
        name,
        str(k),
        str(accepted),
        number(accepted / k if k else None, 2),
        number(sum(betas) / len(betas) if betas else None, 3),
        *(number(None if seconds is None else 1000 * seconds, 2) for seconds in times),
        *(number(total(name), 0) for name in ("bytes_up", "bytes_down")),
        number(sum(hard) / len(hard) if hard else None, 2),
        number(total("escalated"), 0),
        percent(cumulative),
        VERDICTS[steps[0].fallback] if len(steps) == 1 else "",
    ]


def describe_link(lane: Lane) -> str:
    run_steps, m = steps(lane), lane.metrics
    remote: Mapping[str, float] = m.remote
    spent = totals(run_steps)
    total = sum(spent.values())
    shares = [f"{WORDS[activity]} {percent(spent[activity] / total)}" for activity in WORDS if spent.get(activity)]
    sentences = [
        f"**{title(lane.recipe)}**: {m.tokens} tokens in {m.steps} steps, {number(m.tokens_per_second, 1)} tokens per "
        f"second. {percent(remote.get('escalated', 0.0) / m.steps)} of the steps queried the cloud. The link carried "
        f"{remote.get('bytes_up', 0.0) / 1e3:,.1f} kB up and {remote.get('bytes_down', 0.0) / 1e3:,.1f} kB down, "
        "including HTTP headers.",
        f"Time: {', '.join(shares)}.",
    ]
    retries = remote.get("sent", 0.0) - sum("sent" in step.verdict.notes for step in run_steps)
    if retries > (rows := remote.get("rows", 0.0)):
        sentences.append(f"{retries - rows:.0f} messages were sent again.")
    sentences += [f"{remote[name]:.0f} tokens were {words}." for name, words in _TOTALS.items() if remote.get(name)]
    return " ".join(sentences)


def window(steps: Sequence[Step], first: int, count: int) -> tuple[list[list[Part]], list[str]]:
    captions = [f"{step.i}: {len(step.verdict.accepted)}/{len(step.draft)}" for step in steps]
    return parts(steps)[first : first + count], captions[first : first + count]
