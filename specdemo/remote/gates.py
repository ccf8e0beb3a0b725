"""Gates: verify only uncertain drafts, or those with certain words; verdicts without the target. All are lossy.

See section 4 of the practice guide. Amounts in words (package `text2num`) and months are English. Rare words have a
small count in a frequency list.
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specdemo.core.decode import DraftLengthPolicy, Verifier
from specdemo.core.errors import UserError
from specdemo.core.step import Draft, LinkStats, Source, Step, Verdict
from specdemo.remote.config import CloudConfig

Variance = Callable[[Sequence[int], Draft], list[float]]
PASSES = 4  # drafter passes with dropout, for gate `variance`
IsName = Callable[[str], bool]  # True for a text that contains a name
_CONTEXT_TOKENS = 8  # tokens that are decoded before a draft
_MAX_FILE_BYTES = 64 << 20
_WORD = re.compile(r"[^\W\d_]+")
_MONTH = re.compile(
    r"\b(January|February|March|April|May|June|July|August|September|October|November|December)\b"
)  # capitalised: march and may are also verbs


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


def contains_amount(text: str) -> bool:
    """Return True for a number in words. Raises `UserError` without the package."""
    try:
        from text_to_num import alpha2digit
    except ImportError:
        raise UserError("gate amounts needs the package text2num: pip install text2num, or remove the gate") from None
    plain = re.sub(r"\d", " ", text)
    return any(map(str.isdigit, alpha2digit(plain, "en")))


def document_frequency(texts: Iterable[str]) -> Counter[str]:
    return Counter(word for text in texts for word in {word.lower() for word in _WORD.findall(text)})


def word_counts(path: Path) -> Counter[str]:
    """Read lines of a word and its count."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MB: shorten the list of words")
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no readable list of words ({error}): give a UTF-8 file") from error
    counts = Counter[str]()
    for number, line in enumerate(lines, 1):
        word, _, count = line.strip().replace("\t", " ").replace(",", " ").rpartition(" ")
        if line.strip() and not (word and count.isdecimal() and len(count) < 16):
            raise UserError(f"line {number} of {path} is no word and count: write lines such as: house 1234")
        if word:
            counts[word.strip().lower()] += int(count)
    return counts


def word_rules(
    tokenizer: Any, cloud: CloudConfig, is_name: IsName | None = None
) -> Callable[[Sequence[int], Draft], bool]:
    """Return a test of drafts. Raises `UserError`."""
    counts = Counter[str]()
    if "rare" in cloud.always:
        counts = word_counts(Path(cloud.word_frequencies)) if cloud.word_frequencies else _library()
    if "amounts" in cloud.always:
        contains_amount("")  # raise before the run without the package
    tests: dict[str, Callable[[str], bool]] = {
        "numbers": lambda text: any(map(str.isdigit, text)),
        "amounts": contains_amount,
        "months": lambda text: _MONTH.search(text) is not None,
        "names": is_name or (lambda text: any(word[0].isupper() for word in _WORD.findall(text))),
        "rare": lambda text: any(counts[word.lower()] < cloud.gate_rare for word in _WORD.findall(text)),
    }

    def needs_verification(tokens: Sequence[int], draft: Draft) -> bool:
        tail = tokens[-_CONTEXT_TOKENS:]
        before = tokenizer.decode(tail)
        text = tokenizer.decode([*tail, *draft.tokens])[len(before) :]
        return any(tests[rule](text) for rule in cloud.always)

    return needs_verification


@cache
def _library() -> Counter[str]:
    """Count files per word in Python's standard library, the bundled pair's training data."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return document_frequency(path.read_text("utf-8", errors="replace") for path in files)
