"""Figures of a run: a fold over its steps.

Two acceptance rates, never to be mixed: `acceptance_rate` is accepted / drafted and falls with gamma; `alpha` is
accepted / tested and estimates Leviathan's E[beta]; `mean_beta` estimates the same with less variance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdemo.core.step import Step


@dataclass
class Metrics:
    """What the steps so far add up to. Speeds leave out the prefill, whose time is `ttft_s`."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    beta: float = 0.0
    accepted_by_position: list[int] = field(default_factory=list)
    tested_by_position: list[int] = field(default_factory=list)
    ttft_s: float | None = None
    decode_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    remote: dict[str, float] = field(default_factory=dict)  # sums of what a judge that asks a cloud had to say

    def add(self, step: Step) -> None:
        """Count one step in."""
        draft, verdict = step.draft, step.verdict
        self.tokens += len(step.tokens)
        self.steps += 1
        self.drafted += len(draft)
        self.accepted += len(verdict.accepted)
        for node, beta in enumerate(verdict.beta):
            if beta is not None:
                self.tested += 1
                self.beta += beta
                depth = len(draft.path(node))
                while len(self.tested_by_position) < depth:
                    self.tested_by_position.append(0)
                    self.accepted_by_position.append(0)
                self.tested_by_position[depth - 1] += 1
                self.accepted_by_position[depth - 1] += node in verdict.accepted
        for name, value in verdict.notes.items():
            self.remote[name] = self.remote.get(name, 0.0) + value
        if self.ttft_s is None:
            self.ttft_s = step.t
        else:
            self.decode_tokens += len(step.tokens)
            self.draft_s += step.draft_s
            self.verify_s += step.verify_s
            self.host_s += step.host_s

    def add_record(self, line: Mapping[str, Any]) -> None:
        """Count in one step's line of a trace."""
        self.add(Step.from_json(line))

    @property
    def decode_s(self) -> float:
        """Seconds this run itself spent after the prefill; what other runs and the page took is not in it."""
        return self.draft_s + self.verify_s + self.host_s

    def as_dict(self) -> dict[str, Any]:
        """The figures by their names; None where there is nothing to divide by."""

        def ratio(part: float, whole: float) -> float | None:
            return part / whole if whole else None

        passes = max(self.steps - 1, 0)  # the prefill has no round to win
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "tested": self.tested,
            "accepted": self.accepted,
            "acceptance_rate": ratio(self.accepted, self.drafted),
            "alpha": ratio(self.accepted, self.tested),
            "mean_beta": ratio(self.beta, self.tested),
            "tokens_per_target_pass": ratio(self.decode_tokens, passes),
            "accepted_by_position": list(self.accepted_by_position),
            "tested_by_position": list(self.tested_by_position),
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "tokens_per_second": ratio(self.decode_tokens, self.decode_s),
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "host_s": self.host_s,
            **({"remote": self._remote()} if self.remote else {}),
        }

    def _remote(self) -> dict[str, float]:
        """The practice guide's measures of the link (its section 9): sums, and shares of the rounds."""
        shares = {"escalated": "cloud_call_share", "provisional": "provisional_share", "hard_ratio": "mean_hard_ratio"}
        means = {to: self.remote[name] / self.steps for name, to in shares.items() if name in self.remote}
        return {**{name: total for name, total in self.remote.items() if name != "hard_ratio"}, **means}
