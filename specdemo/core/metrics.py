"""Figures of a run, folded over its steps, and bootstrap intervals.

`acceptance_rate` is accepted / drafted over verified drafts and falls with gamma; `alpha` is accepted / tested and
estimates Leviathan's E[beta], as does `mean_beta` with lower variance. Rule `block` tests all drafted tokens, so its
`alpha` estimates no E[beta] and is not displayed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, zip_longest
from typing import Any

from specdemo.core.step import Step


@dataclass(frozen=True, slots=True)
class Metrics:
    """Sums over the steps of a run. Speeds exclude the prefill, which is timed by `ttft_s`.

    Durations are None if another engine does not report them.
    """

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    unverified: int = 0  # tokens committed without the target
    unverified_drafted: int = 0  # draft tokens of unverified steps
    target_passes: int = 0  # passes after the prefill
    beta: float = 0.0
    overlaps: int = 0  # tested positions with a known sum min(p, q)
    accepted_by_position: tuple[int, ...] = ()
    tested_by_position: tuple[int, ...] = ()
    ttft_s: float | None = None
    decode_tokens: int = 0
    draft_s: float | None = 0.0
    verify_s: float | None = 0.0
    host_s: float | None = 0.0
    last_s: float = 0.0  # time of the last step
    remote: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Metrics:
        return reduce(cls.plus, steps, cls())

    def plus(self, step: Step) -> Metrics:
        remote, first = step.verdict.remote, self.ttft_s is None
        drafted, betas = step.draft.size, step.betas
        unverified = step.unverified
        tested, accepted = step.depths
        return Metrics(
            tokens=self.tokens + len(step.tokens),
            steps=self.steps + 1,
            drafted=self.drafted + drafted,
            accepted=self.accepted + (0 if unverified else len(step.verdict.accepted)),
            unverified=self.unverified + (len(step.tokens) if unverified else 0),
            unverified_drafted=self.unverified_drafted + (drafted if unverified else 0),
            target_passes=self.target_passes + (0 if first else step.target_passes),
            beta=self.beta + sum(betas),
            overlaps=self.overlaps + len(betas),
            tested_by_position=_counted(self.tested_by_position, tested),
            accepted_by_position=_counted(self.accepted_by_position, accepted, max(tested, default=0)),
            ttft_s=step.t if first else self.ttft_s,
            decode_tokens=self.decode_tokens + (0 if first else len(step.tokens)),
            draft_s=_sum(self.draft_s, step.draft_s, first),
            verify_s=_sum(self.verify_s, step.verify_s, first),
            host_s=_sum(self.host_s, step.host_s, first),
            last_s=step.t,
            remote=_added(self.remote, remote),
        )

    @property
    def tested(self) -> int:
        return sum(self.tested_by_position)

    @property
    def acceptance_rate(self) -> float | None:
        return _ratio(self.accepted, self.drafted - self.unverified_drafted)

    @property
    def alpha(self) -> float | None:
        return _ratio(sum(self.accepted_by_position), self.tested)

    @property
    def mean_beta(self) -> float | None:
        return _ratio(self.beta, self.overlaps)

    @property
    def decode_steps(self) -> int:
        """Steps after the prefill."""
        return max(self.steps - 1, 0)

    @property
    def tokens_per_step(self) -> float | None:
        return _ratio(self.decode_tokens, self.decode_steps)

    @property
    def tokens_per_target_pass(self) -> float | None:
        return _ratio(self.decode_tokens, self.target_passes)

    @property
    def decode_s(self) -> float:
        """Seconds spent by this run after the prefill, excluding other runs and the page.

        For another engine, the observed seconds between its first and its last token.
        """
        if self.draft_s is None or self.verify_s is None or self.host_s is None:
            return self.last_s - (self.ttft_s or 0.0)
        return self.draft_s + self.verify_s + self.host_s

    @property
    def tokens_per_second(self) -> float | None:
        return _ratio(self.decode_tokens, self.decode_s)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name; None where a denominator is 0."""
        names = (
            "tokens", "steps", "target_passes", "drafted", "tested", "accepted", "unverified", "acceptance_rate",
            "alpha", "mean_beta", "tokens_per_step", "tokens_per_target_pass", "ttft_s", "decode_s",
            "tokens_per_second", "draft_s", "verify_s", "host_s",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "accepted_by_position": list(self.accepted_by_position),
            "tested_by_position": list(self.tested_by_position),
            **({"remote": self._remote()} if self.remote else {}),
        }

    def _remote(self) -> dict[str, float]:
        shares = {"escalated": "cloud_call_share", "provisional": "provisional_share", "hard_ratio": "mean_hard_ratio"}
        means = {to: self.remote[name] / self.steps for name, to in shares.items() if name in self.remote}
        return {**{name: total for name, total in self.remote.items() if name != "hard_ratio"}, **means}


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None


def _sum(total: float | None, value: float | None, first: bool) -> float | None:
    """Add the duration of a step, except that of the first; None if it is unknown."""
    return None if total is None or value is None else total if first else total + value


def _added(totals: Mapping[str, float], values: Mapping[str, float]) -> Mapping[str, float]:
    if not values:
        return totals
    return {name: totals.get(name, 0.0) + values.get(name, 0.0) for name in {**totals, **values}}


def _counted(counts: tuple[int, ...], depths: list[int], length: int = 0) -> tuple[int, ...]:
    if not depths and length <= len(counts):
        return counts
    added = [depths.count(depth) for depth in range(1, max([length, *depths]) + 1)]
    return tuple(a + b for a, b in zip_longest(counts, added, fillvalue=0))


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value at rank `share` (0 to 1)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def central_range(samples: Iterable[float]) -> tuple[float, float]:
    """Return the limits of the central 95 % of `samples`."""
    ordered = sorted(samples)
    return ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered))]


def interval(ratios: Sequence[float], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of `ratios`."""
    return cluster_interval([(ratio,) for ratio in ratios], seed, draws)


def cluster_interval(clusters: Sequence[Sequence[float]], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of all values; `clusters` are resampled."""
    rng = random.Random(seed)
    samples = (rng.choices(clusters, k=len(clusters)) for _ in range(draws))
    return central_range(statistics.median(chain.from_iterable(sample)) for sample in samples)


def ratio_interval(pairs: Sequence[tuple[float, float]], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of total / total."""
    rng = random.Random(seed)
    samples = (zip(*rng.choices(pairs, k=len(pairs)), strict=True) for _ in range(draws))
    return central_range(sum(a) / sum(b) for a, b in samples)
