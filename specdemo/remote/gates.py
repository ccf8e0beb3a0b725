"""Gates: is this draft worth asking the cloud about? (practice guide, section 4)

What the drafter was unsure of is hard; a draft of which too much is hard goes to the cloud, and so does one with words
in it that are better not guessed. What stays at the edge is the drafter's text, not the target's: lossy. Knows laws,
and text through a function; knows no models and no wire.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from specdemo.core.decode import DraftLengthPolicy
from specdemo.core.step import Draft, Step, Verdict
from specdemo.remote.fallback import unverified

Variance = Callable[[Sequence[int], Draft], list[float]]
WORD = re.compile(r"[^\W\d_]+")


class ClosableVerifier(Protocol):
    """A judge that can be told which tokens were hard."""

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        """The verdict on `draft` as a continuation of `tokens`."""

    def close(self) -> None:
        """Hang up."""


class RecordingPolicy:
    """A draft-length policy that keeps the drafter's raw laws as they pass: before temperature, top-k and top-p."""

    needs_logits = True

    def __init__(self, inner: DraftLengthPolicy) -> None:
        self._inner = inner
        self.logs: list[Tensor] = []  # log-probabilities `[vocab]`, one for each token drafted since the last round

    @property
    def gamma(self) -> int:
        """The inner one's."""
        return self._inner.gamma

    @property
    def notes(self) -> Mapping[str, float]:
        """The inner one's."""
        return self._inner.notes

    def may_extend(self, n: int, logits: Any) -> bool:
        """What the inner one says."""
        if n == 0:
            self.logs = []
        grows = self._inner.may_extend(n, logits)
        if grows and logits is not None:
            self.logs[n:] = [logits.float().log_softmax(-1)]
        return grows

    def observe(self, step: Step) -> None:
        """For the inner one."""
        self._inner.observe(step)


def signals(logs: Sequence[Tensor], draft: Draft) -> dict[str, list[float]]:
    """Per drafted token: -log q (nats), the entropy of q (bits), and the margin of its first choice."""
    rows = torch.stack(list(logs))  # [n, vocab]
    chosen = rows.gather(-1, torch.tensor(draft.tokens, device=rows.device)[:, None])[:, 0]
    probs = rows.exp()
    best = probs.topk(2).values
    return {
        "nll": (-chosen).tolist(),
        "entropy": (torch.special.entr(probs).sum(-1) / math.log(2)).tolist(),
        "margin": (best[:, 0] - best[:, 1]).tolist(),
    }


def hard(values: Mapping[str, Sequence[float]], thresholds: Mapping[str, float]) -> list[int]:
    """1 for each token that any watched signal calls hard: above its threshold, or below it for the margin."""
    verdicts = [
        [value < limit if name == "margin" else value > limit for value in values[name]]
        for name, limit in thresholds.items()
    ]
    return [int(any(column)) for column in zip(*verdicts, strict=True)]


def mc_dropout(scores: Sequence[Callable[[Sequence[int], Draft], Tensor]]) -> Variance:
    """The variance of each drafted token's probability over models that differ by dropout alone (1506.02142)."""

    def variance(tokens: Sequence[int], draft: Draft) -> list[float]:
        chosen = torch.tensor(draft.tokens)
        seen = Draft.chain(draft.tokens[:-1])  # the last token's law follows the one before it
        distributions = [score(tokens, seen).float().softmax(-1).cpu() for score in scores]
        return (
            torch.stack([probs.gather(-1, chosen[:, None])[:, 0] for probs in distributions])
            .var(0, correction=0)
            .tolist()
        )

    return variance


class AlwaysVerify:
    """Whether a text has words in it that always call for the cloud: numbers, names, rare words."""

    def __init__(self, rules: Sequence[str], documents: Counter[str] | None = None, rare_below: int = 3) -> None:
        """`documents`: in how many files each word was seen; rare is a word in fewer than `rare_below`."""
        self._rules, self._documents, self._rare_below = rules, documents or Counter(), rare_below

    def __call__(self, text: str) -> bool:
        """Whether any of the rules does."""
        words = WORD.findall(text)
        return (
            ("numbers" in self._rules and any(map(str.isdigit, text)))
            or ("names" in self._rules and any(word[0].isupper() for word in words))
            or ("rare" in self._rules and any(self._documents[word.lower()] < self._rare_below for word in words))
        )


def document_frequency(texts: Iterable[str]) -> Counter[str]:
    """In how many of the texts each word stands."""
    return Counter(word for text in texts for word in {word.lower() for word in WORD.findall(text)})


class GatedVerifier:
    """A judge that asks `inner` about hard drafts only and takes the others as they are."""

    def __init__(
        self,
        inner: ClosableVerifier,
        gauge: RecordingPolicy,
        thresholds: Mapping[str, float],
        most_hard: float,
        *,
        always: Callable[[Sequence[int], Draft], bool] | None = None,
        variance: Variance | None = None,
    ) -> None:
        self._inner, self._gauge, self._thresholds, self._most_hard = inner, gauge, thresholds, most_hard
        self._always, self._variance = always, variance

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        """The cloud's verdict, or all of the draft. Without a draft there is nothing to take: the cloud is asked."""
        if not draft.tokens:
            return self._inner.verify(tokens, draft)
        values = signals(self._gauge.logs, draft)
        if self._variance is not None:
            values["variance"] = self._variance(tokens, draft)
        mask = hard(values, self._thresholds) or [0] * len(draft)
        notes = {"hard_ratio": sum(mask) / len(mask)}
        ruled = self._always is not None and self._always(tokens, draft)
        if notes["hard_ratio"] > self._most_hard or ruled:
            verdict = self._inner.verify(tokens, draft, mask)
            return replace(verdict, notes={**verdict.notes, **notes})
        return unverified(draft, tuple(range(len(draft))), {**notes, "escalated": 0.0})

    def close(self) -> None:
        """Hang up."""
        self._inner.close()
