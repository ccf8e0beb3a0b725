"""Gates: verify only uncertain drafts (practice guide, section 4); verdicts without the target. Both are lossy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from specdemo.core.decode import DraftLengthPolicy, Verifier
from specdemo.core.step import Draft, LinkStats, Source, Step, Verdict

Variance = Callable[[Sequence[int], Draft], list[float]]
PASSES = 4  # drafter passes with dropout, for gate `variance`


class MaskedVerifier(Protocol):
    """Verifier that receives a mask of uncertain draft tokens, `hard_mask`."""

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict: ...


class RecordingPolicy:
    """Draft-length policy that records raw draft distributions, before temperature, top-k and top-p."""

    needs_logits = True

    def __init__(self, inner: DraftLengthPolicy) -> None:
        self._inner = inner
        self.log_probs: list[Tensor] = []  # `[vocab]` for each token of the current draft

    @property
    def gamma(self) -> int:
        return self._inner.gamma

    @property
    def path_limits(self) -> Sequence[float] | None:
        """Return limits of pauses only: logits are recorded."""
        limits = self._inner.path_limits
        return limits if limits and limits[0] > 1 else None

    @property
    def notes(self) -> Mapping[str, float]:
        return self._inner.notes

    def may_extend(self, n: int, logits: Any) -> bool:
        if n == 0:
            self.log_probs = []
        extend = self._inner.may_extend(n, logits)
        if extend and logits is not None:
            self.log_probs[n:] = [logits.float().log_softmax(-1)]
        return extend

    def observe(self, step: Step) -> None:
        self._inner.observe(step)


def signals(log_probs: Sequence[Tensor], draft: Draft) -> dict[str, list[float]]:
    """Compute -log q (nats), entropy (bits) and top-2 margin per draft token."""
    rows = torch.stack(list(log_probs))  # [n, vocab]
    chosen = rows.gather(-1, torch.tensor(draft.tokens, device=rows.device)[:, None])[:, 0]
    probs = rows.exp()
    best = probs.topk(2).values
    return {
        "nll": (-chosen).tolist(),
        "entropy": (torch.special.entr(probs).sum(-1) / math.log(2)).tolist(),
        "margin": (best[:, 0] - best[:, 1]).tolist(),
    }


def hard_tokens(values: Mapping[str, Sequence[float]], thresholds: Mapping[str, float]) -> list[int]:
    """Mark tokens with a signal above its threshold (margin: below)."""
    columns = [
        [value < limit if name == "margin" else value > limit for value in values[name]]
        for name, limit in thresholds.items()
    ]
    return [int(any(row)) for row in zip(*columns, strict=True)]


def mc_dropout(scores: Sequence[Callable[[Sequence[int], Draft], Tensor]]) -> Variance:
    """Variance of draft token probabilities under dropout (arXiv 1506.02142)."""

    def variance(tokens: Sequence[int], draft: Draft) -> list[float]:
        chosen = torch.tensor(draft.tokens)
        prefix = Draft.chain(draft.tokens[:-1])
        distributions = [score(tokens, prefix).float().softmax(-1).cpu() for score in scores]
        token_probs = [probs.gather(-1, chosen[:, None])[:, 0] for probs in distributions]
        return torch.stack(token_probs).var(0, correction=0).tolist()

    return variance


@dataclass(frozen=True, eq=False)
class GatedVerifier:
    """Verify drafts with more than `max_hard` hard tokens (share); commit the others."""

    inner: MaskedVerifier
    recorder: RecordingPolicy
    thresholds: Mapping[str, float]
    max_hard: float
    always: Callable[[Sequence[int], Draft], bool] | None = None
    variance: Variance | None = None

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        if not draft.tokens:
            return self.inner.verify(tokens, draft)
        mask = self._hard_mask(tokens, draft)
        hard_ratio = sum(mask) / len(mask)
        required = self.always is not None and self.always(tokens, draft)
        if hard_ratio > self.max_hard or required:
            verdict = self.inner.verify(tokens, draft, mask)
            return replace(verdict, link=replace(verdict.link or LinkStats(), hard_ratio=hard_ratio))
        return unverified_verdict(draft, tuple(range(len(draft))), Source.GATE, LinkStats(hard_ratio=hard_ratio))

    def _hard_mask(self, tokens: Sequence[int], draft: Draft) -> list[int]:
        if len(self.recorder.log_probs) != len(draft):  # copied text has no signals
            return [int(bool(self.thresholds))] * len(draft)
        values = signals(self.recorder.log_probs, draft)
        if self.variance is not None:
            values["variance"] = self.variance(tokens, draft)
        return hard_tokens(values, self.thresholds) or [0] * len(draft)


@dataclass(frozen=True, eq=False)
class EdgeVerifier:
    """Verdicts of a drafter that decodes alone."""

    inner: Verifier

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        if draft.tokens:
            return unverified_verdict(draft, first_path(draft), Source.ALONE, LinkStats())
        return replace(self.inner.verify(tokens, draft), source=Source.ALONE, request_sent=False, link=LinkStats())


def unverified_verdict(
    draft: Draft,
    accepted: tuple[int, ...],
    source: Source,
    link: LinkStats | None = None,
    request_sent: bool = False,
) -> Verdict:
    """Commit draft tokens without the target."""
    unknown = (None,) * len(draft)
    return Verdict(accepted, None, unknown, unknown, unknown, source=source, request_sent=request_sent, link=link)


def first_path(draft: Draft) -> tuple[int, ...]:
    children = draft.children()
    path: list[int] = []
    node = -1
    while node in children:
        node = children[node][0]
        path.append(node)
    return tuple(path)


def verdict_from_tokens(draft: Draft, tokens: Sequence[int]) -> Verdict:
    """Accept the path of `draft` that matches the target's `tokens`, plus a token."""
    path = draft.follow(tokens[:-1])
    return replace(unverified_verdict(draft, path, Source.LATE), token=tokens[len(path)])
