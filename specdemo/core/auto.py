"""The draft-length policy that measures as it runs.

Knows steps, their times and what costs were known beforehand; knows nothing of models, text or devices.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdemo.core.step import Step


@dataclass(frozen=True)
class Prices:
    """What is known of costs before a run, in passes of the target over one row."""

    passes: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})  # v(n): a pass over n rows, for some n
    token: float = 0.0  # c: a drafted token, as a first guess

    def verify(self, rows: int) -> float:
        """v(rows), on a line between what is known, and beyond it as the last line goes on.

        More rows never cost less, and whatever disturbs a measurement makes it longer: so the lower one is believed.
        """
        known = sorted(self.passes.items())
        right = [(n, max(1.0, min(cost for _, cost in known[i:]))) for i, (n, _) in enumerate(known)]
        if len(right) == 1:
            return right[0][1]
        pairs = list(zip(right, right[1:], strict=False))
        (a, low), (b, high) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return low + (high - low) * (rows - a) / (b - a)


@dataclass
class Auto:
    """The gamma with the most expected tokens per second, from acceptance by position and times measured as it runs.

    Expected tokens of a draft of k are 1 + a_1 + a_1 a_2 + ..., a_i the acceptance at position i; the time is k drafted
    tokens and a pass over k + 1 rows. How that pass compares with a plain one is a property of model and machine and
    comes with the prices; what a drafted token costs is the median of the latest rounds, as one slow round says
    nothing. Acceptance is that of all positions until a position has been seen often enough, and a guess until any has;
    it fades, so it follows the text. Where no draft pays clearly it drafts nothing, and looks again now and then.
    """

    looks = False

    most: int
    prices: Prices = field(default_factory=Prices)
    guess: float = 0.7  # acceptance before anything is known
    trust: float = 12.0  # tests that weigh as much as what was believed before them
    fade: float = 0.95  # what an earlier test of that position still weighs after the next one
    gain: float = 1.06  # what drafting must promise over plain decoding: a try costs more than it tells
    rest: tuple[int, int] = (64, 256)  # plain rounds before it looks again: at first, and at most

    def __post_init__(self) -> None:
        self._verify = [self.prices.verify(rows) for rows in range(1, self.most + 2)]
        self._tested, self._accepted = [0.0] * self.most, [0.0] * self.most
        self._draft_s: deque[float] = deque(maxlen=15)  # seconds of a drafted token,
        self._plain_s: deque[float] = deque(maxlen=15)  # and of a plain pass, by round
        self._begun = False
        self._idle, self._wait = 0, self.rest[0]
        self.gamma = self._best()

    @property
    def notes(self) -> dict[str, float]:
        """Acceptance at the first position and the cost of a drafted token, as they are believed."""
        return {"auto_a1": self._acceptances()[0], "auto_c": self._c}

    def more(self, n: int, logits: Any) -> bool:
        """Up to the best gamma."""
        return n < self.gamma

    def observe(self, step: Step) -> None:
        """Learn from the round, then choose for the next one."""
        if step.i == 0:
            return  # the prefill: its time says nothing of a round's
        drafted, kept = len(step.draft), len(step.verdict.accepted)
        self._plain_s.append(step.verify_s / self._verify[min(drafted, self.most)])
        if drafted:
            if self._begun:  # a drafter reads the prompt in its first round
                self._draft_s.append(step.draft_s / drafted)
            self._begun = True
        for i in range(min(self.most, kept + (step.kind == "correction"))):
            self._tested[i] = self.fade * self._tested[i] + 1
            self._accepted[i] = self.fade * self._accepted[i] + _chance(step, i)
        self._idle = 0 if drafted else self._idle + 1
        self.gamma = self._best()
        if self.gamma:
            self._wait = self.rest[0]
        elif self._idle >= self._wait:
            self.gamma, self._wait = 1, min(2 * self._wait, self.rest[1])

    @property
    def _c(self) -> float:
        """A drafted token's time over a plain pass's."""
        if not self._draft_s:
            return self.prices.token
        return statistics.median(self._draft_s) / max(statistics.median(self._plain_s), 1e-9)

    def _acceptances(self) -> list[float]:
        """By position."""
        trust = self.trust
        overall = (sum(self._accepted) + trust * self.guess) / (sum(self._tested) + trust)
        return [
            (accepted + trust * overall) / (tested + trust)
            for tested, accepted in zip(self._tested, self._accepted, strict=True)
        ]

    def _best(self) -> int:
        """The draft length with the most expected tokens per second."""
        c = self._c
        best, most = 0, self.gain / self._verify[0]
        expected, path = 1.0, 1.0
        for k, acceptance in enumerate(self._acceptances(), 1):
            path *= acceptance
            expected += path
            rate = expected / (self._verify[k] + c * k)
            if rate > most:
                best, most = k, rate
        return best


def _chance(step: Step, position: int) -> float:
    """Whether something was accepted there; where a coin was thrown for it, how likely that was, which says more."""
    verdict = step.verdict
    if step.draft.is_chain and verdict.draw and verdict.draw[position] is not None:
        return verdict.beta[position] or 0.0
    return float(position < len(verdict.accepted))
