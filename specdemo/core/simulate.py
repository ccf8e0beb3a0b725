"""Simulation without models: texts under a rule from fixed p and q, and other draft lengths for a recorded run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdemo.core.rules import RULES
from specdemo.core.sampling import Noise, SharedNoise
from specdemo.core.step import Draft, Step
from specdemo.core.verifier import configured_rule


@dataclass(frozen=True)
class Trial:
    tokens: tuple[int, ...]
    rounds: int
    tested: int
    accepted: int

    def shares(self, vocab: int) -> list[float]:
        """Relative frequency of each token, `[vocab]`."""
        counts = torch.bincount(torch.tensor(self.tokens), minlength=vocab)
        return (counts.double() / len(self.tokens)).tolist()


def trial(rule: str, p: Tensor, q: Tensor, gamma: int, count: int, seed: int, *, adjust: bool = True) -> Trial:
    """Sample `count` tokens in steps of `gamma` >= 1 drafts from `q` `[vocab]`, verified against `p` `[vocab]`.

    `rule` is a key of `RULES`. `adjust=False` samples corrections from p if the rule supports it.
    """
    entry = RULES[rule]
    apply = configured_rule(rule, adjust=adjust or not entry.adjusts)
    accept = Noise(seed, "accept")
    shared = SharedNoise(seed)
    draw, correct = (shared, shared) if entry.shares_noise else (Noise(seed, "draft"), Noise(seed, "correct"))
    distributions, rows, probs = q.expand(gamma, -1), p.expand(gamma + 1, -1), q.tolist()
    tokens: list[int] = []
    rounds = tested = accepted = 0
    while len(tokens) < count:
        start = len(tokens)
        drafted = tuple(draw.sample(q, start + i) for i in range(gamma))
        draft = Draft.chain(drafted, tuple(probs[token] for token in drafted), distributions)
        verdict = apply(draft, rows, accept, correct, start)
        tokens += [*(drafted[node] for node in verdict.accepted), *verdict.target_tokens]
        rounds += 1
        tested += sum(beta is not None for beta in verdict.beta)
        accepted += len(verdict.accepted)
    return Trial(tuple(tokens[:count]), rounds, tested, accepted)


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Total variation distance, 1/2 sum |a - b|."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 2


def chance_distance(p: Sequence[float], count: int) -> float:
    """Expected `distance` between p and the relative frequencies of `count` samples from p.

    Half the sum of binomial mean absolute deviations (De Moivre):
    E|X - np| = 2 m C(n, m) p^m (1 - p)^(n - m + 1) with m = floor(np) + 1.
    """
    return sum(_mean_deviation(x, count) for x in p) / (2 * count)


def _mean_deviation(p: float, n: int) -> float:
    if not 0 < p < 1:
        return 0.0
    m = math.floor(n * p) + 1
    choose = math.lgamma(n + 1) - math.lgamma(m + 1) - math.lgamma(n - m + 1)
    return 2 * math.exp(math.log(m) + choose + m * math.log(p) + (n - m + 1) * math.log1p(-p))


def rare_distance(p: Sequence[float], count: int, odds: float = 1e-3) -> float:
    """Bound on `distance` exceeded by samples from p with probability at most `odds`.

    McDiarmid's inequality: changing a token changes the distance by at most 1 / count.
    """
    return chance_distance(p, count) + math.sqrt(math.log(1 / odds) / (2 * count))


def acceptance_probs(steps: Iterable[Step]) -> list[float]:
    """Acceptance probability of a draft for each token committed after the prefill.

    Untested tokens (bonus, AR) get the mean of the others; if all are untested, the list is empty. Raise `ValueError`
    for drafts other than chains.
    """
    betas: list[float | None] = []
    for step in steps:
        if step.i == 0:
            continue
        if not step.draft.is_chain:
            raise ValueError("other draft lengths can be estimated for chains only")
        tested = [beta for beta in step.verdict.beta if beta is not None]
        betas += [*tested, *[None] * len(step.tokens)][: len(step.tokens)]
    known = [beta for beta in betas if beta is not None]
    if not known:
        return []
    mean = statistics.fmean(known)
    return [mean if beta is None else beta for beta in betas]


def expected_steps(probs: Sequence[float], gamma: int) -> float:
    """Expected number of steps with drafts of `gamma` for a text with these acceptance probabilities.

    Propagate the probability that a step starts at each position; a step commits accepted drafts and a target token.
    """
    starts = [1.0, *[0.0] * (len(probs) + gamma)]
    for position in range(len(probs)):
        path = starts[position]
        for depth in range(gamma):
            if position + depth >= len(probs):
                break
            beta = probs[position + depth]
            starts[position + depth + 1] += path * (1 - beta)
            path *= beta
        else:
            depth = gamma
        starts[position + depth + 1] += path
    return sum(starts[: len(probs)])


@dataclass(frozen=True)
class GammaEstimate:
    gamma: int
    tokens_per_pass: float
    tokens_per_second: float


def other_gammas(
    steps: Sequence[Step], gammas: Iterable[int], pass_cost: Callable[[float], float]
) -> list[GammaEstimate]:
    """Estimate tokens per pass and per second for each of `gammas` (0: AR decoding) on the text of `steps`.

    `pass_cost(rows)` is v in AR steps, scaled to the run's verification times; draft and host times are the run's.
    """
    probs, decoding = acceptance_probs(steps), [step for step in steps if step.i > 0]
    drafted = sum(len(step.draft) for step in decoding)
    if not probs or not drafted:
        return []
    verify = sum(step.verify_s for step in decoding) / sum(pass_cost(len(step.draft) + 1) for step in decoding)
    draft = sum(step.draft_s for step in decoding) / drafted
    host = sum(step.host_s for step in decoding) / len(decoding)
    estimates = []
    for gamma in gammas:
        count = expected_steps(probs, gamma)
        seconds = count * (verify * pass_cost(gamma + 1) + gamma * draft + host)
        estimates.append(GammaEstimate(gamma, len(probs) / count, len(probs) / seconds))
    return estimates
