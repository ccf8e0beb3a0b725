"""Does a rule keep the law? A text drawn under it from a p and a q that never change.

The program's own rules and noise, on laws instead of models: what comes out can be counted and held against p. Knows
laws and token ids.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdemo.core.rules import RULES
from specdemo.core.sampling import Noise, SharedNoise
from specdemo.core.step import Draft, Step


@dataclass(frozen=True)
class Trial:
    """What was drawn."""

    tokens: tuple[int, ...]
    rounds: int
    tested: int
    accepted: int

    def shares(self, vocab: int) -> list[float]:
        """How often each token came, `[vocab]`."""
        counts = torch.bincount(torch.tensor(self.tokens), minlength=vocab)
        return (counts.double() / len(self.tokens)).tolist()


def trial(rule: str, p: Tensor, q: Tensor, gamma: int, count: int, seed: int, *, adjust: bool = True) -> Trial:
    """A text of `count` tokens: rounds of `gamma` >= 1 tokens of `q` `[vocab]`, judged against `p` `[vocab]`.

    `rule` is a name in `RULES`; one with a threshold has its usual one. `adjust=False` draws corrections from p, where
    the rule can.
    """
    known = RULES[rule]
    options = {} if known.threshold is None else {"threshold": known.threshold}
    apply = partial(known.apply, **options, **({} if adjust or not known.adjusts else {"adjust": False}))
    accept = Noise(seed, "accept")
    shared = SharedNoise(seed)
    draw, correct = (shared, shared) if known.shares_noise else (Noise(seed, "draft"), Noise(seed, "correct"))
    distributions, rows, mass = q.expand(gamma, -1), p.expand(gamma + 1, -1), q.tolist()
    tokens: list[int] = []
    rounds = tested = accepted = 0
    while len(tokens) < count:
        place = len(tokens)
        drafted = tuple(draw.draw(q, place + i) for i in range(gamma))
        draft = Draft.chain(drafted, tuple(mass[token] for token in drafted), distributions)
        verdict = apply(draft, rows, accept, correct, place)
        tokens += [*(drafted[node] for node in verdict.accepted), *verdict.target_tokens]
        rounds += 1
        tested += sum(beta is not None for beta in verdict.beta)
        accepted += len(verdict.accepted)
    return Trial(tuple(tokens[:count]), rounds, tested, accepted)


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Total variation of two laws, 1/2 sum |a - b|."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 2


def chance_distance(p: Sequence[float], count: int) -> float:
    """The `distance` to be expected between p and the shares of `count` tokens that were drawn from p itself.

    Half the sum of the binomials' mean absolute deviations, by De Moivre's formula:
    E|X - np| = 2 m C(n, m) p^m (1 - p)^(n - m + 1) with m = floor(np) + 1.
    """
    return sum(_deviation(x, count) for x in p) / (2 * count)


def _deviation(p: float, n: int) -> float:
    if not 0 < p < 1:
        return 0.0
    m = math.floor(n * p) + 1
    choose = math.lgamma(n + 1) - math.lgamma(m + 1) - math.lgamma(n - m + 1)
    return 2 * math.exp(math.log(m) + choose + m * math.log(p) + (n - m + 1) * math.log1p(-p))


def rare_distance(p: Sequence[float], count: int, odds: float = 1e-3) -> float:
    """The `distance` that tokens drawn from p itself exceed with a chance of at most `odds`.

    A token more or less moves it by 1 / count at most: McDiarmid's inequality.
    """
    return chance_distance(p, count) + math.sqrt(math.log(1 / odds) / (2 * count))


def chances(steps: Iterable[Step]) -> list[float]:
    """For each token committed after the prefill, the chance that a draft of it is accepted.

    Where nothing was tested (a bonus, a plain token) it is taken for the mean of the others. Empty if nothing was
    tested at all. Raises `ValueError` for a draft that is no chain: its betas do not stand one behind the other.
    """
    found: list[float | None] = []
    for step in steps:
        if step.i == 0:
            continue
        if not step.draft.is_chain:
            raise ValueError("the drafts are no chains")
        tested = [beta for beta in step.verdict.beta if beta is not None]
        found += [*tested, *[None] * len(step.tokens)][: len(step.tokens)]
    known = [beta for beta in found if beta is not None]
    if not known:
        return []
    usual = statistics.fmean(known)
    return [usual if beta is None else beta for beta in found]


def rounds(chance: Sequence[float], gamma: int) -> float:
    """How many rounds drafts of `gamma` are expected to take for a text with these chances.

    A round that starts at a token commits the drafts that are accepted and one token of the target's own. Followed
    from every token at which a round may start, weighted by how likely it starts there.
    """
    starts = [1.0, *[0.0] * (len(chance) + gamma)]
    for place in range(len(chance)):
        path = starts[place]
        for depth in range(gamma):
            if place + depth >= len(chance):
                break
            beta = chance[place + depth]
            starts[place + depth + 1] += path * (1 - beta)
            path *= beta
        else:
            depth = gamma
        starts[place + depth + 1] += path
    return sum(starts[: len(chance)])


@dataclass(frozen=True)
class GammaEstimate:
    """One draft length: what it would have given."""

    gamma: int
    tokens_per_pass: float
    tokens_per_second: float


def other_gammas(
    steps: Sequence[Step], gammas: Iterable[int], pass_cost: Callable[[float], float]
) -> list[GammaEstimate]:
    """Tokens per pass and per second for each of `gammas` (0: plain decoding) on the text of `steps`.

    `pass_cost(rows)` is v, a pass over so many rows in plain steps; only its shape counts: it is scaled to what this
    run's own passes took, as are drafting and the rest of a round.
    """
    chance, after = chances(steps), [step for step in steps if step.i > 0]
    drafted = sum(len(step.draft) for step in after)
    if not chance or not drafted:
        return []
    verify = sum(step.verify_s for step in after) / sum(pass_cost(len(step.draft) + 1) for step in after)
    draft = sum(step.draft_s for step in after) / drafted
    host = sum(step.host_s for step in after) / len(after)
    found = []
    for gamma in gammas:
        count = rounds(chance, gamma)
        seconds = count * (verify * pass_cost(gamma + 1) + gamma * draft + host)
        found.append(GammaEstimate(gamma, len(chance) / count, len(chance) / seconds))
    return found
