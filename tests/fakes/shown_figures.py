"""Figures that the page may show of a run, recomputed from the lines of its traces, and their search in texts.

Nothing here calls the product. A displayed figure that no claim explains, or that differs from it, is an error.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

Line = dict[str, Any]
PARTS = ("draft_s", "verify_s", "host_s")
MOST_PER_PASS, LEAST_PASS = 1.05, 0.95
TARGET_OPTIONS = ("external", "pair", "target", "dtype", "quantization", "activations", "device")
NUMBER = r"((?:< )?\d[\d,]*(?:\.\d+)?(?:e-\d+)?)"


def agrees(shown: str, value: float | None) -> bool:
    """Return True if `value` is rounded to the displayed digits, or below a displayed bound."""
    if value is None:
        return False
    if shown.startswith("< "):
        return value < float(shown[2:])
    mantissa, _, exponent = shown.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(shown.replace(",", "")) - value) <= 0.55 * unit  # records are rounded before


@dataclass(frozen=True)
class Claim:
    """Words with {} for each figure, and the figures that they may have: one entry per thing that they may describe."""

    words: str
    figures: Sequence[tuple[float | None, ...]]


def claim(words: str, *figures: float | None) -> Claim:
    return Claim(words, [figures])


def unexplained(text: str, claims: Iterable[Claim]) -> str:
    """Return `text` without the words of `claims`; fail if a figure in them has another value."""
    for known in claims:
        pattern = re.compile(re.escape(known.words).replace(r"\{\}", NUMBER) + r"(?![\d.]*\d)")
        for match in pattern.finditer(text):
            fits = (all(map(agrees, match.groups(), figures)) for figures in known.figures)
            assert any(fits), f"{match.group()!r} in {text!r}, but the traces give {known.figures}"
        text = pattern.sub(" ", text)
    return text


@dataclass(frozen=True)
class LaneFigures:
    """Figures of one trace."""

    header: Line
    steps: Sequence[Line]
    linked: bool = False  # a lane of its run decodes over a link, so total times are compared

    @property
    def recipe(self) -> Line:
        return self.header["recipe"]

    @cached_property
    def tokens(self) -> list[int]:
        return [token for line in self.steps for token in line["tokens"]]

    @property
    def decode_tokens(self) -> int:
        return len(self.tokens) - len(self.steps[0]["tokens"])

    @property
    def ttft_s(self) -> float:
        return self.steps[0]["t"]

    @cached_property
    def at(self) -> list[float]:
        """Seconds at the end of each step, from the first token on, or from the prompt on over a link."""
        times = [self.ttft_s if self.linked else 0.0]
        for line in self.steps[1:]:
            times.append(times[-1] + sum(line[part] for part in PARTS))
        return times

    def total(self, part: str) -> float:
        return sum(line[part] for line in self.steps[1:])

    @property
    def decode_s(self) -> float:
        return sum(map(self.total, PARTS))

    @property
    def speed(self) -> float | None:
        tokens = len(self.tokens) if self.linked else self.decode_tokens
        return tokens / self.at[-1] if self.at[-1] else None

    @property
    def verified(self) -> list[Line]:
        return [line for line in self.steps if by_target(line)]

    @property
    def passes(self) -> int:
        return len([line for line in self.steps[1:] if by_target(line)])

    @property
    def tokens_per_pass(self) -> float | None:
        return self.decode_tokens / self.passes if self.passes else None

    @property
    def tokens_per_step(self) -> float | None:
        return self.decode_tokens / (len(self.steps) - 1) if len(self.steps) > 1 else None

    @property
    def drafted(self) -> int:
        return sum(len(line["draft"]) for line in self.verified)

    @property
    def all_drafted(self) -> int:
        return sum(len(line["draft"]) for line in self.steps)

    @property
    def accepted(self) -> int:
        return sum(len(line["accepted"]) for line in self.verified)

    @property
    def unverified(self) -> int:
        return sum(len(line["tokens"]) for line in self.steps if not by_target(line))

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @cached_property
    def positions(self) -> list[tuple[int, int]]:
        counts: dict[int, list[int]] = {}
        for line in self.verified:
            for node, beta in enumerate(line["beta"]):
                if beta is not None:
                    count = counts.setdefault(depth_of(line, node), [0, 0])
                    count[0] += node in line["accepted"]
                    count[1] += 1
        return [(counts[depth][0], counts[depth][1]) for depth in sorted(counts)]

    @property
    def alpha(self) -> float | None:
        tested = sum(count for _, count in self.positions)
        return sum(count for count, _ in self.positions) / tested if tested else None

    @property
    def overlap(self) -> float | None:
        betas = [beta for line in self.steps for beta in line["beta"] if beta is not None]
        return statistics.fmean(betas) if betas else None

    @property
    def weights(self) -> float:
        return sum(self.header["environment"].get(name) or 0 for name in ("target_bytes", "drafter_bytes"))

    def memory(self, name: str) -> float | None:
        return next(
            (use for line in reversed(self.steps) if (use := line.get("memory", {}).get(name)) is not None), None
        )


def by_target(line: Line) -> bool:
    """Return True if the target verified the draft of a step."""
    link = line.get("remote")
    return not link or bool(link.get("escalated")) and not link.get("provisional")


def depth_of(line: Line, node: int) -> int:
    depth = 0
    while node >= 0:
        node = line["parents"][node]
        depth += 1
    return depth


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run with several lanes, the baseline in lane `ar`."""

    lanes: Mapping[str, LaneFigures]

    @classmethod
    def of(cls, lines: Iterable[Line]) -> RunFigures:
        traces: list[tuple[Line, list[Line]]] = []
        for line in lines:
            if "specdemo" in line:
                traces.append((line, []))
            elif "i" in line:
                traces[-1][1].append(line)
        linked = any((header["recipe"].get("cloud") or {}).get("mode") for header, _ in traces)
        lanes: dict[str, LaneFigures] = {}
        others = iter(("spec", "third", "fourth"))
        for header, steps in traces:
            baseline = header["recipe"]["method"] == "ar" and "ar" not in lanes
            lanes["ar" if baseline else next(others)] = LaneFigures(header, steps, linked)
        return cls({name: lanes[name] for name in ("spec", "ar", "third", "fourth") if name in lanes})

    @property
    def first(self) -> LaneFigures:
        return next(iter(self.lanes.values()))

    @property
    def plain(self) -> LaneFigures | None:
        return self.lanes.get("ar")

    @property
    def compared(self) -> bool:
        return len(self.lanes) > 1 and "ar" in self.lanes

    def equal(self, name: str) -> int:
        """Number of equal tokens at the start of a lane and the baseline."""
        pairs = zip(self.lanes[name].tokens, self.plain.tokens if self.plain else [], strict=False)
        return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])

    @property
    def end(self) -> float:
        return max(lane.at[-1] for lane in self.lanes.values())

    def ratio(self, name: str = "spec") -> float | None:
        """Measured speed of a lane relative to the baseline, possible or not."""
        if self.plain is None or name not in self.lanes or not (self.lanes[name].speed and self.plain.speed):
            return None
        return self.lanes[name].speed / self.plain.speed

    @cached_property
    def pass_times(self) -> tuple[int, float, float] | None:
        """Rows of the most frequent pass over several, and the median seconds of one over 1 row and of it."""
        if self.plain is None or "spec" not in self.lanes or self.first.linked:
            return None
        drafts = [line for line in self.first.steps[1:] if line["draft"] and line["verify_s"]]
        single = [line["verify_s"] for line in self.plain.steps[1:] if line["verify_s"]]
        if not drafts or not single:
            return None
        length = Counter(len(line["draft"]) for line in drafts).most_common(1)[0][0]
        several = statistics.median(line["verify_s"] for line in drafts if len(line["draft"]) == length)
        return length + 1, statistics.median(single), several

    def withheld(self, name: str = "spec") -> bool:
        """Return True if the times of a lane contradict its passes: its speed-up must not be shown as a result."""
        ratio, plain = self.ratio(name), self.plain
        if ratio is None or plain is None or self.first.linked:
            return False
        if name == "spec" and self.pass_times and self.pass_times[2] < LEAST_PASS * self.pass_times[1]:
            return True
        lane = self.lanes[name]
        same = all(lane.recipe.get(option) == plain.recipe.get(option) for option in TARGET_OPTIONS)
        return bool(same and lane.tokens_per_pass and ratio > MOST_PER_PASS * lane.tokens_per_pass)

    def speedup(self, name: str = "spec") -> float | None:
        return None if self.withheld(name) else self.ratio(name)

    def step_cost(self, part: str | None = None) -> float | None:
        """Seconds of a step, or of a part of it, in those of a step of the baseline."""
        if self.plain is None or not self.plain.decode_s:
            return None
        unit = self.plain.decode_s / (len(self.plain.steps) - 1) * (len(self.first.steps) - 1)
        return (self.first.total(part) if part else self.first.decode_s) / unit


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
