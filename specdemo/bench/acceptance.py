"""Acceptance of draft tokens by position in the draft, length of the text and confidence of the drafter."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from itertools import pairwise

from specdemo.core.step import Step

_TEXT_LENGTHS = (64, 128, 256, 512, 1024)  # tokens before the draft token
_CONFIDENCES = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class AcceptanceCount:
    """Tested and accepted draft tokens, and the sum of their confidences."""

    tested: int = 0
    accepted: int = 0
    confidence: float = 0.0

    def __add__(self, other: AcceptanceCount) -> AcceptanceCount:
        return AcceptanceCount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def share(self) -> float:
        return self.accepted / self.tested


Counts = Mapping[int, AcceptanceCount]  # keys: draft position from 1, or index of an interval


@dataclass(frozen=True)
class Acceptance:
    """Counts of tested tokens; the confidence of a token is the drafter's estimate, otherwise q."""

    position: Counts = field(default_factory=dict)
    text_length: Counts = field(default_factory=dict)
    confidence: Counts = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Iterable[Step], prompt_length: int) -> Acceptance:
        return cls.total(_of_token(*token) for token in _tested(steps, prompt_length))

    @classmethod
    def total(cls, parts: Iterable[Acceptance]) -> Acceptance:
        sums: tuple[dict[int, AcceptanceCount], ...] = ({}, {}, {})
        for part in parts:
            for total, counts in zip(sums, (part.position, part.text_length, part.confidence), strict=True):
                for key, count in counts.items():
                    total[key] = total.get(key, AcceptanceCount()) + count
        return cls(*(dict(sorted(total.items())) for total in sums))


def _tested(steps: Iterable[Step], length: int) -> Iterator[tuple[int, int, bool, float | None]]:
    """Yield draft position, text length, outcome and confidence of each tested token."""
    for step in steps:
        draft = step.draft
        if draft.undisclosed is not None:
            yield from ((depth, length + depth - 1, depth <= step.accepted, None) for depth in step.depths[0])
        for node, beta in enumerate(step.verdict.beta):
            if beta is not None and not step.unverified:
                depth = len(draft.path(node))
                estimate = draft.origin[node].confidence if draft.origin else None
                q = draft.token_probs[node] if draft.token_probs else None
                confidence = q if estimate is None else estimate
                yield depth, length + depth - 1, node in step.verdict.accepted, confidence
        length += len(step.tokens)


def _of_token(position: int, length: int, accepted: bool, confidence: float | None) -> Acceptance:
    count = AcceptanceCount(1, int(accepted), confidence or 0.0)
    known = {} if confidence is None else {bisect(_CONFIDENCES, confidence): count}
    return Acceptance({position: count}, {bisect(_TEXT_LENGTHS, length): count}, known)


def acceptance_tables(lanes: Mapping[str, Acceptance]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, heading and rows of each table that has rows: a row per lane, a column per position or interval."""
    for name, (title, labels) in _TABLES.items():
        counts: dict[str, Counts] = {lane: getattr(acceptance, name) for lane, acceptance in lanes.items()}
        keys = sorted({key for row in counts.values() for key in row})
        head = ["recipe", *(labels[key] if labels else str(key) for key in keys)]
        rows = [[lane, *(_cell(row.get(key), name) for key in keys)] for lane, row in counts.items() if row]
        if rows:
            yield title, head, rows


def _cell(count: AcceptanceCount | None, name: str) -> str:
    if count is None:
        return "-"
    estimate = f"{count.confidence / count.tested:.2f} → " if name == "confidence" else ""
    return f"{estimate}{count.share:.2f} of {count.tested:,}"


def _intervals(*edges: float) -> list[str]:
    return [*(f"{low:g} to {high:g}" for low, high in pairwise(edges)), f"from {edges[-1]:g}"]


_TABLES = {
    "position": ("Accepted / tested by position in the draft", None),
    "text_length": ("Accepted / tested by length of the text in tokens", _intervals(0, *_TEXT_LENGTHS)),
    "confidence": ("Mean confidence (or q) → accepted / tested, by confidence", _intervals(0, *_CONFIDENCES)),
}
