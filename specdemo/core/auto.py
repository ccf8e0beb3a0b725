"""The draft-length policy that measures as it runs.

Knows steps and their times; knows nothing of models, text or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdemo.core.step import Step


@dataclass
class Average:
    """A mean that forgets."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float | None:
        """The mean; None before anything was added."""
        return self.total / self.weight if self.weight else None

    def add(self, x: float, fade: float) -> None:
        """Count x in, and everything before it for less."""
        self.total, self.weight = fade * self.total + x, fade * self.weight + 1


@dataclass
class Auto:
    """The gamma with the most expected tokens per second, from acceptance by position and times measured as it runs.

    Expected tokens of a draft of k are 1 + a_1 + a_1 a_2 + ..., a_i the acceptance at position i; its time is a pass
    over one row, k drafted tokens and what k more rows cost. All of them fade, so it follows the text. Where no draft
    pays it drafts nothing, and looks again now and then.
    """

    looks = False

    most: int
    gamma: int = 3
    fade: float = 0.9
    probe_every: int = 16
    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    draft_s: Average = field(default_factory=Average)
    rounds_s: dict[int, Average] = field(default_factory=dict)  # verifying and the rest, by length of the draft
    idle: int = 0

    def __post_init__(self) -> None:
        # Half a token of each kind: before anything is known, a draft is worth a try.
        self.tested, self.accepted = [1.0] * self.most, [0.5] * self.most

    @property
    def notes(self) -> dict[str, float]:
        """Acceptance at the first position as it is believed."""
        return {"auto_a1": self.accepted[0] / self.tested[0]}

    def more(self, n: int, logits: Any) -> bool:
        """Up to the best gamma."""
        return n < self.gamma

    def observe(self, step: Step) -> None:
        """Learn from the round, then choose for the next one."""
        if step.i == 0:
            return  # the prefill: its time says nothing of a round's
        drafted = len(step.draft)
        self.rounds_s.setdefault(drafted, Average()).add(step.verify_s, self.fade)
        if drafted:
            self.draft_s.add(step.draft_s / drafted, self.fade)
            kept = len(step.verdict.accepted)
            for i in range(min(self.most, drafted)):
                if i > kept:
                    break
                self.tested[i] = self.fade * self.tested[i] + 1
                self.accepted[i] = self.fade * self.accepted[i] + (i < kept)
        self.idle = 0 if drafted else self.idle + 1
        self.gamma = max(range(self.most + 1), key=self._rate)
        if self.gamma == 0 and self.idle >= self.probe_every:
            self.gamma, self.idle = 1, 0

    def _rate(self, k: int) -> float:
        """Expected tokens per second of drafts of k tokens."""
        expected, path = 1.0, 1.0
        for i in range(k):
            path *= self.accepted[i] / self.tested[i]
            expected += path
        return expected / (self._round_s(k) + k * (self.draft_s.value or 0.0))

    def _round_s(self, k: int) -> float:
        """Seconds of a pass that verifies k tokens: as measured, or on the line through what was measured."""
        known = sorted(self.rounds_s)
        if k in self.rounds_s:
            return self.rounds_s[k].value or 0.0
        low = max((n for n in known if n < k), default=known[0])
        high = min((n for n in known if n > k), default=known[-1])
        a, b = (self.rounds_s[n].value or 0.0 for n in (low, high))
        if low == high:
            return a
        return a + (b - a) * (k - low) / (high - low)
