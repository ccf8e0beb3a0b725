"""The draft-length policy that measures as it runs.

Knows steps and their times; knows nothing of models, text or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdemo.core.step import Step


@dataclass
class Line:
    """A straight line through points, the latest counting most."""

    fade: float
    sums: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)  # 1, x, xx, y, xy

    def add(self, x: float, y: float) -> None:
        """Count a point in, and everything before it for less."""
        self.sums = tuple(self.fade * old + new for old, new in zip(self.sums, (1, x, x * x, y, x * y), strict=True))

    def __call__(self, x: float) -> float:
        """Where the line stands at x; it never falls, and is flat while all points have one x."""
        n, sx, sxx, sy, sxy = self.sums
        spread = sxx / n - (sx / n) ** 2
        slope = max(0.0, (sxy / n - sx / n * sy / n) / spread) if spread > 1e-3 else 0.0
        return max(sy / n + slope * (x - sx / n), 1e-9)


@dataclass
class Auto:
    """The gamma with the most expected tokens per second, from acceptance by position and times measured as it runs.

    Expected tokens of a draft of k are 1 + a_1 + a_1 a_2 + ..., a_i the acceptance at position i, which is taken for
    that of the position before it until it has been seen often enough; the time is k drafted tokens and what a pass
    that verifies k of them takes. All of it fades, so it follows the text. Where no draft pays it drafts nothing, and
    looks again now and then.
    """

    looks = False

    most: int
    gamma: int = 3
    fade: float = 0.95
    trust: float = 4.0  # tests of a position that weigh as much as the position before it
    lift: float = 0.2  # of what a position lacks to 1 the next one has less: agreement comes in runs
    probe_every: int = 16
    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    drafted: float = 0.0
    draft_s: float = 0.0
    verify_s: Line = field(default_factory=lambda: Line(0.95))
    idle: int = 0

    def __post_init__(self) -> None:
        self.tested, self.accepted = [0.0] * self.most, [0.0] * self.most

    @property
    def notes(self) -> dict[str, float]:
        """Acceptance at the first position as it is believed."""
        return {"auto_a1": self._acceptances()[0]}

    def more(self, n: int, logits: Any) -> bool:
        """Up to the best gamma."""
        return n < self.gamma

    def observe(self, step: Step) -> None:
        """Learn from the round, then choose for the next one."""
        if step.i == 0:
            return  # the prefill: its time says nothing of a round's
        drafted, kept = len(step.draft), len(step.verdict.accepted)
        self.verify_s.add(drafted, step.verify_s)
        self.drafted = self.fade * self.drafted + drafted
        self.draft_s = self.fade * self.draft_s + step.draft_s
        for i in range(min(self.most, drafted, kept + 1)):
            self.tested[i] = self.fade * self.tested[i] + 1
            self.accepted[i] = self.fade * self.accepted[i] + (i < kept)
        self.idle = 0 if drafted else self.idle + 1
        self.gamma = self._best()
        if self.gamma == 0 and self.idle >= self.probe_every:
            self.gamma, self.idle = 1, 0

    def _acceptances(self) -> list[float]:
        """By position; before anything is known, a draft is worth a try."""
        found, expected = [], 0.6
        for tested, accepted in zip(self.tested, self.accepted, strict=True):
            found.append((accepted + self.trust * expected) / (tested + self.trust))
            expected = found[-1] + self.lift * (1 - found[-1])
        return found

    def _best(self) -> int:
        """The draft length with the most expected tokens per second."""
        c = self.draft_s / self.drafted if self.drafted else 0.0
        best, most = 0, 1 / self.verify_s(0)
        expected, path = 1.0, 1.0
        for k, acceptance in enumerate(self._acceptances(), 1):
            path *= acceptance
            expected += path
            rate = expected / (self.verify_s(k) + c * k)
            if rate > most:
                best, most = k, rate
        return best
