"""Simulation without models: texts under a rule from fixed p and q, and other draft lengths for a recorded run."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, takewhile

import torch
from torch import Tensor

from specdemo.core.distributions import DenseProbs
from specdemo.core.metrics import central_range
from specdemo.core.rules import RULES
from specdemo.core.sampling import Noise, SharedNoise
from specdemo.core.step import Draft, Step, Verdict
from specdemo.core.theory import (
    LEAST_COST,
    ExpectedSteps,
    LengthEstimate,
    StepCost,
    acceptance_along_text,
    estimate,
)
from specdemo.core.verifier import configured_rule

_SIMULATED_STEPS = 30_000  # bounds the time of an estimate
_LEAST_DRAWS = 40  # simulated runs
_MOST_DRAWS = 120


@dataclass(frozen=True)
class SimulatedText:
    """Tokens of a simulated text and counts of its steps."""

    tokens: tuple[int, ...]
    rounds: int
    tested: int
    accepted: int

    def shares(self, vocab: int) -> list[float]:
        counts = torch.bincount(torch.tensor(self.tokens), minlength=vocab)
        return (counts.double() / len(self.tokens)).tolist()


def simulated_text(
    rule: str, p: Tensor, q: Tensor, gamma: int, count: int, seed: int, *, adjust: bool = True, scalar: bool = False
) -> SimulatedText:
    """Sample `count` tokens in steps of `gamma` >= 1 drafts from `q` `[vocab]`, verified against `p` `[vocab]`.

    `rule` is a key of `RULES`. `adjust=False` samples corrections from p if the rule supports it. `scalar`: residuals
    contain q of the drafted token only, max(p(v) - [v = y] q(y), 0).
    """
    entry = RULES[rule]
    apply = configured_rule(rule, adjust=adjust or not entry.adjusts)
    accept = Noise(seed, "accept")
    shared = SharedNoise(seed)
    draw, correct = (shared, shared) if entry.shares_noise else (Noise(seed, "draft"), Noise(seed, "correct"))
    rows = p.expand(gamma + 1, -1)
    tokens: list[int] = []
    rounds = tested = accepted = 0
    while len(tokens) < count:
        start = len(tokens)
        draft = _sampled_chain(q, gamma, draw, start)
        if scalar:
            draft = replace(draft, probs=None)  # a rejected token has p < q: its residual is 0 for any greater q
        verdict = apply(draft, rows, accept, correct, start)
        tokens += [*(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens]
        rounds += 1
        tested += sum(beta is not None for beta in verdict.beta)
        accepted += len(verdict.accepted)
    return SimulatedText(tuple(tokens[:count]), rounds, tested, accepted)


def compared_verdicts(rules: Sequence[str], p: Tensor, q: Tensor, gamma: int, seed: int) -> tuple[Draft, list[Verdict]]:
    """Verify a draft from `q` `[vocab]` with several rules and the same random numbers."""
    draft, rows = _sampled_chain(q, gamma, Noise(seed, "draft"), 0), p.expand(gamma + 1, -1)
    streams = "accept", "correct"
    return draft, [
        configured_rule(name)(draft, rows, *(Noise(seed, stream) for stream in streams), 0) for name in rules
    ]


def _sampled_chain(q: Tensor, gamma: int, noise: Noise | SharedNoise, start: int) -> Draft:
    tokens = [noise.sample(q, start + i) for i in range(gamma)]
    return Draft.chain(tuple(tokens), tuple(q[tokens].tolist()), DenseProbs(q.expand(gamma, -1)))


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Total variation distance, 1/2 sum |a - b|."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 2


def chance_distance(p: Sequence[float], count: int) -> float:
    """Expected `distance` between p and the relative frequencies of `count` samples from p.

    Half the sum of binomial deviations E|X - np| = 2 m C(n, m) p^m (1 - p)^(n - m + 1) with m = floor(np) + 1.
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


@dataclass(frozen=True)
class RecordedStep:
    """Times and acceptance of a recorded step."""

    betas: tuple[float | None, ...]  # beta of the committed tokens, None if not tested
    draft: int
    ended: bool  # True if the draft ended before its limit
    draft_s: float
    verify_s: float
    host_s: float


def recorded_steps(steps: Iterable[Step], *, counted: bool = False) -> list[RecordedStep]:
    """Convert the steps after the prefill, without the drafter's prompt pass, or raise `ValueError` for forests.

    `counted` replaces probabilities by outcomes.
    """
    decoding = [step for step in steps if step.i > 0]
    if not all(step.draft.is_chain for step in decoding):
        raise ValueError("other draft lengths can be estimated for chains only")
    token_s = [step.seconds.draft / len(step.draft) for step in decoding if step.draft.tokens]
    recorded, opened = [], False
    for step in decoding:
        tested = [float(i < step.accepted) if counted else beta for i, beta in enumerate(step.betas)]
        betas = tuple([*tested, *[None] * len(step.tokens)][: len(step.tokens)])
        drafted, seconds = len(step.draft), step.seconds
        draft_s = seconds.draft
        if drafted and not opened:
            draft_s, opened = min(draft_s, drafted * statistics.median(token_s)), True
        recorded.append(RecordedStep(betas, drafted, drafted < step.gamma, draft_s, seconds.verify, seconds.host))
    return recorded


def measured_costs(
    steps: Sequence[RecordedStep], pass_cost: Callable[[float], float], plain_s: float | None
) -> StepCost:
    """Return mean costs in seconds; passes after drafts scale `pass_cost`, `plain_s` is used without empty drafts."""
    rows = sum(pass_cost(step.draft + 1) for step in steps if step.draft) or math.inf
    scale = sum(step.verify_s for step in steps if step.draft) / rows
    empty = [step.verify_s for step in steps if not step.draft]
    plain = statistics.fmean(empty) if empty else scale * pass_cost(1) if plain_s is None else plain_s
    token = sum(step.draft_s for step in steps) / max(1, sum(step.draft for step in steps))
    host = statistics.fmean(step.host_s for step in steps)
    return StepCost(lambda rows: scale * pass_cost(rows), token, host, plain + host)


def other_gammas(
    texts: Sequence[Sequence[Step]],
    gammas: Iterable[int],
    pass_cost: Callable[[float], float],
    baseline: Sequence[Step] = (),
    *,
    counted: bool = False,
) -> list[LengthEstimate]:
    """Estimate other draft lengths on the texts of recorded runs; `pass_cost(rows)` is v.

    Gamma 0 is the AR run `baseline`, if any. Ranges come from simulated runs of resampled texts, or steps of one text.
    """
    recorded = [recorded_steps(steps, counted=counted) for steps in texts]
    steps, lengths = list(chain.from_iterable(recorded)), sorted(gammas)
    tested = any(beta is not None for step in steps for beta in step.betas)
    decode_s = _duration(step for text in texts for step in text if step.i > 0)
    if not tested or decode_s <= LEAST_COST:
        return []
    plain = [step for step in baseline if step.i > 0]
    opening = decode_s - sum(step.draft_s + step.verify_s + step.host_s for step in steps)
    plain_s = statistics.fmean(step.seconds.verify for step in plain) if plain else None
    pass_cost = cache(pass_cost)
    rng = random.Random(0)
    draws = max(_LEAST_DRAWS, min(_MOST_DRAWS, _SIMULATED_STEPS // len(steps)))
    units = recorded if len(recorded) > 1 else [[step] for step in steps]
    samples = [list(chain.from_iterable(rng.choices(units, k=len(units)))) for _ in range(draws)]
    simulated = [
        (draft_chances(sample, lengths[-1]), measured_costs(sample, pass_cost, plain_s))
        for sample in samples
        if any(step.draft for step in sample)
    ]
    text, cost = draft_chances(steps, lengths[-1]), measured_costs(steps, pass_cost, plain_s)
    estimates = []
    for expected in estimate(acceptance_along_text(text), cost, lengths, opening):
        if expected.gamma == 0 and plain:
            estimates.append(_of_baseline(plain, rng, draws))
            continue
        runs = ((_simulated(chances, expected.gamma, rng), costs) for chances, costs in simulated)
        rates = [run.tokens / max(LEAST_COST, opening + run.cost(costs)) for run, costs in runs]
        low, high = central_range(rates)
        estimates.append(replace(expected, low=low, high=high))
    return estimates


def draft_chances(steps: Sequence[RecordedStep], longest: int) -> list[list[float]]:
    """Acceptance probabilities of the longest possible draft at each position.

    The end of a draft is no rejection (censoring): untested tokens have the mean of the tested ones.
    """
    known = [beta for step in steps for beta in step.betas if beta is not None]
    mean = statistics.fmean(known) if known else 0.0
    probs = [mean if beta is None else beta for step in steps for beta in step.betas]
    limits = [min(longest, step.draft) if step.ended else longest for step in steps for _ in step.betas]
    return [probs[i : i + limit] for i, limit in enumerate(limits)]


def _simulated(chances: Sequence[Sequence[float]], gamma: int, rng: random.Random) -> ExpectedSteps:
    """Draw the outcomes of the drafts of one run."""
    lengths: Counter[int] = Counter()
    position = 0
    while position < len(chances):
        draft = chances[position][: min(gamma, len(chances) - 1 - position)]
        lengths[len(draft)] += 1
        accepted = takewhile(lambda chance: rng.random() < chance, draft)
        position += 1 + sum(1 for _ in accepted)
    return ExpectedSteps(len(chances), [(count, drafted) for drafted, count in lengths.items()])


def _of_baseline(steps: Sequence[Step], rng: random.Random, draws: int) -> LengthEstimate:
    def speed(sample: Sequence[Step]) -> float:
        return sum(len(step.tokens) for step in sample) / max(LEAST_COST, _duration(sample))

    rates = [speed(rng.choices(steps, k=len(steps))) for _ in range(draws)]
    return LengthEstimate(0, 1.0, speed(steps), *central_range(rates))


def _duration(steps: Iterable[Step]) -> float:
    return sum(sum(step.seconds) for step in steps)
