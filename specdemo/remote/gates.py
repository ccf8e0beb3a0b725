"""Gates: verify only uncertain drafts (practice guide, section 4); verdicts without the target. Both are lossy."""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specdemo.core.decode import DraftLengthPolicy, Verifier
from specdemo.core.link_stats import LinkStats, Source
from specdemo.core.step import Draft, Step, Verdict

Variance = Callable[[Sequence[int], Draft], list[float]]
PASSES = 4  # of the drafter with dropout, for gate `variance`
_CONTEXT_TOKENS = 8  # decoded before a draft, for rules about words
_WORD = re.compile(r"[^\W\d_]+")


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


class AlwaysVerify:
    """Rules for text that requires verification: numbers, names, rare words."""

    def __init__(self, rules: Sequence[str], documents: Counter[str] | None = None, rare_below: int = 3) -> None:
        """`documents` counts the files that contain each word; below `rare_below` a word is rare."""
        self._rules, self._documents, self._rare_below = rules, documents or Counter(), rare_below

    def __call__(self, text: str) -> bool:
        words = _WORD.findall(text)
        return (
            ("numbers" in self._rules and any(map(str.isdigit, text)))
            or ("names" in self._rules and any(word[0].isupper() for word in words))
            or ("rare" in self._rules and any(self._documents[word.lower()] < self._rare_below for word in words))
        )


def document_frequency(texts: Iterable[str]) -> Counter[str]:
    return Counter(word for text in texts for word in {word.lower() for word in _WORD.findall(text)})


def word_rules(tokenizer: Any, rules: Sequence[str]) -> Callable[[Sequence[int], Draft], bool]:
    """Return a test of drafts by rules about words."""
    always = AlwaysVerify(rules, _library() if "rare" in rules else None)

    def needs_verification(tokens: Sequence[int], draft: Draft) -> bool:
        tail = tokens[-_CONTEXT_TOKENS:]
        before = tokenizer.decode(tail)
        return always(tokenizer.decode([*tail, *draft.tokens])[len(before) :])

    return needs_verification


@cache
def _library() -> Counter[str]:
    """Count files per word in Python's standard library, the bundled pair's training data."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return document_frequency(path.read_text("utf-8", errors="replace") for path in files)


class GatedVerifier:
    """Verify drafts with more than `max_hard` hard tokens (share); commit the others."""

    def __init__(
        self,
        inner: MaskedVerifier,
        recorder: RecordingPolicy,
        thresholds: Mapping[str, float],
        max_hard: float,
        *,
        always: Callable[[Sequence[int], Draft], bool] | None = None,
        variance: Variance | None = None,
    ) -> None:
        self._inner, self._recorder, self._thresholds, self._max_hard = inner, recorder, thresholds, max_hard
        self._always, self._variance = always, variance

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        if not draft.tokens:
            return self._inner.verify(tokens, draft)
        values = signals(self._recorder.log_probs, draft)
        if self._variance is not None:
            values["variance"] = self._variance(tokens, draft)
        mask = hard_tokens(values, self._thresholds) or [0] * len(draft)
        hard_ratio = sum(mask) / len(mask)
        required = self._always is not None and self._always(tokens, draft)
        if hard_ratio > self._max_hard or required:
            verdict = self._inner.verify(tokens, draft, mask)
            return replace(verdict, link=replace(verdict.link or LinkStats(), hard_ratio=hard_ratio))
        return unverified_verdict(draft, tuple(range(len(draft))), Source.GATE, LinkStats(hard_ratio=hard_ratio))


class EdgeVerifier:
    """Verdicts of a drafter that decodes alone."""

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner

    def verify(self, tokens: Sequence[int], draft: Draft, link: LinkStats = LinkStats()) -> Verdict:  # noqa: B008
        if draft.tokens:
            return unverified_verdict(draft, first_path(draft), Source.ALONE, link)
        return replace(self._inner.verify(tokens, draft), source=Source.ALONE, request_sent=False, link=link)


def unverified_verdict(
    draft: Draft, accepted: tuple[int, ...], source: Source, link: LinkStats, request_sent: bool = False
) -> Verdict:
    """Commit draft tokens without the target."""
    unknown = (None,) * len(draft)
    return Verdict(accepted, None, unknown, unknown, unknown, source=source, request_sent=request_sent, link=link)


def provisional_verdict(draft: Draft, link: LinkStats, request_sent: bool) -> Verdict:
    """Commit the first draft token (practice guide, section 8)."""
    return unverified_verdict(draft, (0,), Source.PROVISIONAL, link, request_sent)


def first_path(draft: Draft) -> tuple[int, ...]:
    children, path, node = draft.children(), [], -1
    while node in children:
        node = children[node][0]
        path.append(node)
    return tuple(path)


def verdict_from_tokens(draft: Draft, tokens: Sequence[int], link: LinkStats) -> Verdict:
    """Accept the path of `draft` that matches the target's `tokens`, plus a token."""
    path = draft.follow(tokens[:-1])
    return replace(unverified_verdict(draft, path, Source.LATE, link), token=tokens[len(path)])
