"""A run over a link in numbers: its rounds in time, and the practice guide's measures.

Everything is from the trace. How long a message was under way in either direction, one end cannot tell: of what was
neither sending nor receiving nor the cloud's own time, half is drawn before and half after. Knows lanes; no gradio.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from specdemo.core.errors import UserError
from specdemo.ui.frames import Run
from specdemo.ui.labels import Lane, mode, number, percent, title, unseen

SLACK = 1.02  # what clocks at both ends may differ by
HEADERS = (
    "round", "k", "accepted_len", "la/k", "alpha_mean", "edge_time ms", "cloud_prefill ms", "rtt ms",
    "bytes up", "bytes down", "hard_ratio", "escalated", "cumulative acceptance", "verdict",
)  # fmt: skip
VERDICTS = {"": "", "provisional": "provisional", "gate": "not asked", "alone": "cloud lost"}

WORDS = {
    "draft": "drafting",
    "up": "sending",
    "way": "on the way",
    "verify": "the cloud's pass",
    "down": "receiving",
    "wait": "waiting",
    "idle": "idle",
}

OF_LINK = (  # what is told of a round over a link: name in the trace, words, scale, digits
    ("cloud_s", "cloud, ms", 1000, 1),
    ("rtt_s", "link, ms", 1000, 1),
    ("bytes_up", "bytes up", 1, 0),
    ("bytes_down", "bytes down", 1, 0),
    ("hard_ratio", "hard", 1, 2),
)
Part = tuple[str, float, float]  # what was done, when it began, how long it took: seconds


def edge_lane(run: Run | None) -> Lane:
    """The first lane whose target was elsewhere. `UserError` says why there is none."""
    if run is None:
        raise UserError("Nothing has been run yet: choose a mode under Edge and cloud in the settings, and press Run")
    if not run.over:
        raise UserError("A run is under way: look here again when it has ended")
    lane = next((one for one in run.lanes.values() if one.recipe and mode(one.recipe)), None)
    if lane is None or not steps(lane):
        raise UserError(
            "The latest run had no cloud: choose a mode under Edge and cloud in the settings, and press Run"
        )
    return lane


def steps(lane: Lane) -> list[dict[str, Any]]:
    """The lines of the rounds; the prefill is round 0."""
    return [line for line in lane.lines if "i" in line]


def parts(lines: Sequence[Mapping[str, Any]]) -> list[list[Part]]:
    """What each round was made of, in order: idle, draft, up, way, verify, way, down; or draft and wait.

    Where the answer was not this round's (it came late, or a gate or the loss of the cloud left none), or the cloud's
    share is not known (it streams), all of it is a wait.
    """
    found, over = [], 0.0
    for line in lines:
        start = max(over, line["t"] - line["draft_s"] - line["verify_s"])
        done: list[Part] = [("idle", over, start - over), ("draft", start, line["draft_s"])]
        at = start + line["draft_s"]
        for what, seconds in waited(line):
            done.append((what, at, seconds))
            at += seconds
        found.append([part for part in done if part[2] > 0])
        over = line["t"]
    return found


def waited(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What the edge waited for in a round, and how long: its answer's parts, or one that nothing is known of."""
    link, whole = line.get("remote", {}), line["verify_s"]
    cloud = link.get("cloud_s")
    up, down = link.get("up_s", 0.0), link.get("down_s", 0.0)
    if cloud is None or cloud + up + down > whole * SLACK:
        yield "wait", whole
        return
    way = max(0.0, whole - cloud - up - down) / 2
    yield from (("up", up), ("way", way), ("verify", cloud), ("way", way), ("down", down))


def link_facts(line: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a round's picture says of its link, by names."""
    link = line.get("remote", {})
    return [(what, f"{link[name] * scale:,.{digits}f}") for name, what, scale, digits in OF_LINK if name in link]


def totals(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each part over the whole run."""
    found: dict[str, float] = {}
    for what, _, seconds in (part for some in parts(lines) for part in some):
        found[what] = found.get(what, 0.0) + seconds
    return found


def measures(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The practice guide's section 9 in the order of `HEADERS`: a row for all, then one per round."""
    drafted = list(accumulate(len(line["draft"]) for line in lines))
    accepted = list(accumulate(len(line["accepted"]) for line in lines))
    rows = [
        _row(str(line["i"]), [line], kept / tried if tried else None)
        for line, kept, tried in zip(lines, accepted, drafted, strict=True)
    ]
    share = accepted[-1] / drafted[-1] if lines and drafted[-1] else None
    return [_row("all", lines, share), *rows]


def _row(name: str, lines: Sequence[Mapping[str, Any]], cumulative: float | None) -> list[str]:
    """Sums over `lines`; ratios of sums, means of shares."""
    k, kept = (sum(len(line[what]) for line in lines) for what in ("draft", "accepted"))
    betas = [beta for line in lines for beta in line["beta"] if beta is not None]

    def total(name: str) -> float | None:
        known = [line["remote"][name] for line in lines if name in line.get("remote", {})]
        return sum(known) if known else None

    def mean(name: str) -> float | None:
        known = [line["remote"][name] for line in lines if name in line.get("remote", {})]
        return sum(known) / len(known) if known else None

    times = (sum(line["draft_s"] for line in lines), total("cloud_s"), total("rtt_s"))
    return [
        name,
        str(k),
        str(kept),
        number(kept / k if k else None, 2),
        number(sum(betas) / len(betas) if betas else None, 3),
        *(number(None if seconds is None else 1000 * seconds, 2) for seconds in times),
        *(number(total(name), 0) for name in ("bytes_up", "bytes_down")),
        number(mean("hard_ratio"), 2),
        number(total("escalated"), 0),
        percent(cumulative),
        VERDICTS[unseen(lines[0])] if len(lines) == 1 else "",
    ]


def told(lane: Lane) -> str:
    """The run in a few sentences of Markdown."""
    lines, m = steps(lane), lane.metrics.as_dict()
    remote = m.get("remote", {})
    spent = totals(lines)
    whole = sum(spent.values())
    said = [
        f"**{title(lane.recipe)}**: {m['tokens']} tokens in {len(lines)} rounds, {number(m['tokens_per_second'], 1)} "
        f"tokens per second, {percent(remote.get('cloud_call_share', 0.0))} of the rounds asked the cloud. On the wire "
        f"went {remote.get('bytes_up', 0.0) / 1e3:,.1f} kB up and {remote.get('bytes_down', 0.0) / 1e3:,.1f} kB down, "
        "HTTP and its headers included.",
        "Time: "
        + ", ".join(f"{WORDS[what]} {percent(spent[what] / whole)}" for what in WORDS if spent.get(what))
        + ".",
    ]
    retries = remote.get("sent", 0.0) - sum("sent" in line.get("remote", {}) for line in lines)
    rows = remote.get("rows", 0.0)
    if retries > rows:
        said.append(f"{retries - rows:.0f} messages were sent again.")
    for name, words in (
        ("provisional", "committed provisionally"),
        ("confirmed", "confirmed"),
        ("overruled", "overruled"),
    ):
        if remote.get(name):
            said.append(f"{remote[name]:.0f} tokens were {words}.")
    return " ".join(said)


def window(lines: Sequence[Mapping[str, Any]], first: int, count: int) -> tuple[list[list[Part]], list[str]]:
    """Parts and captions of `count` rounds from `first` on."""
    captions = [f"{line['i']}: {len(line['accepted'])}/{len(line['draft'])}" for line in lines]
    return parts(lines)[first : first + count], captions[first : first + count]
