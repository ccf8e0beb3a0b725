"""Acceptance rules: verify a draft against the target's distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from specdemo.core.distributions import (
    DraftProbs,
    PointMass,
    PointMasses,
    ProbRows,
    Probs,
    TokenSampler,
    dense_or_none,
    entropy,
    excess,
    residual,
    sample_token,
    token_prob,
    top_token,
)
from specdemo.core.errors import UserError
from specdemo.core.step import Draft, Verdict

if TYPE_CHECKING:
    from specdemo.core.sampling import SamplingParams


class AcceptanceTest(Protocol):
    """Source of random decisions: `Noise` or an enumeration."""

    def test(self, probability: float) -> tuple[bool, float]:
        """Return True with this probability, and the random number."""


def rejection(
    draft: Draft, p: ProbRows, accept: AcceptanceTest, correct: TokenSampler, start: int, *, adjust: bool = True
) -> Verdict:
    """Speculative sampling for chains and forests, sampled or point-mass drafts; exact.

    Row 0 of `p` follows the last committed token, row i + 1 node i; `start` is the position of the token after row 0.
    Accept a child y with probability min(1, p(y) / q(y)); after a rejection, test its siblings against the residual
    (2211.17192 Algorithm 1; SpecInfer 2305.09781 Algorithm 3). `adjust=False` samples corrections from p, which is
    lossy.
    """

    def test(token: int, prob: float, q: float, row: Probs) -> tuple[bool, float, float]:
        bound = min(1.0, prob / q)
        return *accept.test(bound), bound

    return _walk(draft, p, correct, start, adjust, test)


def threshold_rule(least: Callable[[float, Probs, float], float], *, strict: bool = False) -> Callable[..., Verdict]:
    """Build a rule that accepts a child iff p reaches (`strict`: exceeds) `least(q, row of p, threshold)`."""

    def rule(
        draft: Draft,
        p: ProbRows,
        accept: AcceptanceTest,
        correct: TokenSampler,
        start: int,
        *,
        threshold: float,
    ) -> Verdict:
        def test(token: int, prob: float, q: float, row: Probs) -> tuple[bool, None, float]:
            bound = least(q, row, threshold)
            return prob > bound or (prob == bound and not strict), None, bound

        return _walk(draft, p, correct, start, False, test)

    return rule


def top1(draft: Draft, p: ProbRows, accept: AcceptanceTest, correct: TokenSampler, start: int) -> Verdict:
    """Accept the target's most probable token: NASD's verification."""
    return _walk(draft, p, correct, start, False, lambda token, prob, q, row: (token == top_token(row), None, None))


def lenient(
    draft: Draft,
    p: ProbRows,
    accept: AcceptanceTest,
    correct: TokenSampler,
    start: int,
    *,
    threshold: float,
    adjust: bool = True,
) -> Verdict:
    """Speculative sampling against l q with l = `threshold` (2211.17192, appendix A.5).

    At temperature 0 a child needs l times the largest probability of the softmax.
    """

    def test(token: int, prob: float, q: float, row: Probs) -> tuple[bool, float | None, float | None]:
        if isinstance(row, PointMass):
            return row.relative(token) >= threshold, None, None
        bound = min(1.0, prob / (threshold * q))
        return *accept.test(bound), bound

    return _walk(draft, p, correct, start, adjust, test, 1 / threshold)


# Engineering shortcuts, and Medusa's typical acceptance, p > min(e, sqrt(e) exp(-H(p))) (2401.10774, 2.3.1).
ratio = threshold_rule(lambda q, row, threshold: threshold * q)
threshold = threshold_rule(lambda q, row, threshold: threshold)
typical = threshold_rule(
    lambda q, row, threshold: min(threshold, math.sqrt(threshold) * math.exp(-entropy(row))), strict=True
)


def match(draft: Draft, p: ProbRows, accept: AcceptanceTest, correct: TokenSampler, start: int) -> Verdict:
    """Sample from p and accept the equal draft token; a sample not in the draft is the correction. Exact.

    With noise keyed by position and shared with the drafter this is the coupled rule (2408.07978).
    """
    children = draft.children()
    node_probs, overlap = _distributions(draft).compare(p, draft.tokens, draft.parents)
    betas: list[float | None] = [None] * len(draft)
    accepted: list[int] = []
    node: int | None = -1
    while node is not None:
        token = sample_token(p[node + 1], correct, start + len(accepted))
        siblings = children.get(node, ())
        for child in siblings:
            betas[child] = overlap[child]
        node = next((child for child in siblings if draft.tokens[child] == token), None)
        if node is not None:
            accepted.append(node)
    return Verdict(tuple(accepted), token, tuple(node_probs), (None,) * len(draft), tuple(betas))


def block(draft: Draft, p: ProbRows, accept: AcceptanceTest, correct: TokenSampler, start: int) -> Verdict:
    """Block verification of a chain (2403.10444, Algorithm 2): accept up to the last node that passes. Exact.

    Bounds: S / (S + 1 - w) with w = min(1, w p / q), S = sum max(w p - q, 0) at the next position; w at the end.
    """
    distributions, last = _distributions(draft), len(draft) - 1
    token_probs = draft.token_probs or (1.0,) * len(draft)
    node_probs, overlap = distributions.compare(p, draft.tokens, draft.parents)
    weight, end_weight = 1.0, 1.0
    end = -1
    draws: list[float] = []
    bounds: list[float] = []
    for node, (prob, q) in enumerate(zip(node_probs, token_probs, strict=True)):
        weight = min(1.0, weight * prob / q) if q > 0 else 0.0
        bound = weight
        if node < last and 0 < weight < 1:
            mass = excess(p[node + 1], distributions.row(node + 1), weight)
            bound = mass / (mass + 1 - weight)
        passed, draw = accept.test(bound)
        draws.append(draw)
        bounds.append(bound)
        if passed:
            end, end_weight = node, weight
    corrected = end < last
    row = residual(p[end + 1], distributions.row(end + 1), end_weight) if corrected else p[end + 1]
    return Verdict(
        tuple(range(end + 1)),
        sample_token(row, correct, start + end + 1),
        tuple(node_probs),
        tuple(draws),
        tuple(overlap),
        bound=tuple(bounds),
        residual=dense_or_none(row) if corrected else None,
    )


def _walk(
    draft: Draft,
    p: ProbRows,
    correct: TokenSampler,
    start: int,
    adjust: bool,
    test: Callable[[int, float, float, Probs], tuple[bool, float | None, float | None]],
    weight: float = 1.0,
) -> Verdict:
    """Descend to the first child that passes; sample a correction or bonus at the end.

    `test(token, p, q, row)` returns the decision, and random number and bound, or None. `weight`: factor of p in
    residuals.
    """
    distributions = _distributions(draft)
    node_probs, overlap = distributions.compare(p, draft.tokens, draft.parents)
    draws: list[float | None] = [None] * len(draft)
    betas: list[float | None] = [None] * len(draft)
    bounds: list[float | None] = [None] * len(draft)
    children = draft.children()
    accepted: list[int] = []
    node, row = -1, p[0]
    row_is_p = True
    while node in children:
        for child in children[node]:
            token = draft.tokens[child]
            prob = node_probs[child] if row_is_p else token_prob(row, token)
            q = 1.0 if draft.token_probs is None else draft.token_probs[child]
            passed, draws[child], bounds[child] = test(token, prob, q, row) if q > 0 else (False, None, 0.0)
            betas[child] = overlap[child]
            if passed:
                accepted.append(child)
                node, row = child, p[child + 1]
                row_is_p = True
                break
            if adjust and not isinstance(row, PointMass):
                row = residual(row, distributions.row(child), weight)
                row_is_p = False
        else:
            break
    token = sample_token(row, correct, start + len(accepted))
    changed = None if row_is_p else dense_or_none(row)
    return Verdict(
        tuple(accepted), token, tuple(node_probs), tuple(draws), tuple(betas), bound=tuple(bounds), residual=changed
    )


def _distributions(draft: Draft) -> DraftProbs:
    return PointMasses(draft.tokens) if draft.probs is None else draft.probs


class DecidedBy(Enum):
    """Quantity that decides about a draft token."""

    TOKEN_TEST = "p of each draft token, against q or a bound"
    TOP_TOKEN = "the target's most probable token"
    SAMPLE = "a sample of the target"
    SHARED_DRAW = "a sample of the target, with the noise of the drafter"
    BLOCK = "all tokens of a chain together"


@dataclass(frozen=True, kw_only=True)
class RuleTraits:
    """Properties for explanations, preflight and page. The defaults describe rules of other versions in traces."""

    decided_by: DecidedBy = DecidedBy.TOKEN_TEST
    threshold: float | None = None  # default threshold; None if the rule has no threshold
    adjusts: bool = False  # corrections come from the residual, or optionally from p
    needs_q: bool = False  # acceptance depends on the drafter's distribution
    overlaps: bool = False  # a sampled draft token is accepted with probability sum min(p, q)
    lenient: bool = False  # greedy decoding may accept tokens below the most probable

    @property
    def shares_noise(self) -> bool:
        return self.decided_by is DecidedBy.SHARED_DRAW

    @property
    def needs_rows(self) -> bool:
        """True if the distributions of a sampled draft are needed."""
        return self.adjusts or self.chains_only

    @property
    def chains_only(self) -> bool:
        return self.decided_by is DecidedBy.BLOCK


@dataclass(frozen=True)
class Rule(RuleTraits):
    """Registry entry of a rule; `exact(sampling)` is True if the output has the target's distribution."""

    apply: Callable[..., Verdict]
    title: str
    exact: Callable[[SamplingParams], bool]


def _always(sampling: SamplingParams) -> bool:
    return True


def _never(sampling: SamplingParams) -> bool:
    return False


def _when_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature == 0


DEFAULT_RULE = "rejection"
RULES = {
    DEFAULT_RULE: Rule(
        rejection,
        "accept with min(1, p/q), correct from the residual: exact",
        _always,
        adjusts=True,
        needs_q=True,
        overlaps=True,
    ),
    "block": Rule(
        block,
        "decide about all tokens of a chain together, at least as many as rejection: exact",
        _always,
        decided_by=DecidedBy.BLOCK,
        needs_q=True,
    ),
    "match": Rule(
        match, "sample from p, accept while the draft contains it: exact", _always, decided_by=DecidedBy.SAMPLE
    ),
    "coupled": Rule(
        match,
        "match, with noise shared with the drafter: exact, the text of AR decoding by this rule",
        _always,
        decided_by=DecidedBy.SHARED_DRAW,
    ),
    "top1": Rule(
        top1,
        "accept the most probable target token: exact at temperature 0, lossy above",
        _when_greedy,
        decided_by=DecidedBy.TOP_TOKEN,
    ),
    "ratio": Rule(
        ratio, "accept if p/q reaches a threshold: lossy above temperature 0", _when_greedy, threshold=0.5, needs_q=True
    ),
    "threshold": Rule(
        threshold, "accept if p reaches a threshold: lossy above temperature 0", _when_greedy, threshold=0.3
    ),
    "lenient": Rule(
        lenient,
        "accept with min(1, p/(l q)), l: the threshold, correct from max(p - l q, 0): lossy",
        _never,
        threshold=0.5,
        adjusts=True,
        needs_q=True,
        lenient=True,
    ),
    "typical": Rule(typical, "Medusa's typical acceptance: lossy above temperature 0", _when_greedy, threshold=0.09),
}


def rule_names(has: Callable[[Rule], object]) -> str:
    """Return the names of the rules with a property, separated by commas."""
    return ", ".join(name for name, rule in RULES.items() if has(rule))


def rule_traits(recipe: Mapping[str, Any]) -> RuleTraits:
    """Return the properties of a recorded recipe's rule."""
    return RULES.get(recipe.get("rule", DEFAULT_RULE), RuleTraits())


def reproducing_rule(temperature: float, chosen: str | None = None) -> str:
    """Return a rule that reproduces the text of AR decoding. Raises `UserError` if `chosen` does not."""
    if chosen is None:
        return next(name for name, rule in RULES.items() if rule.shares_noise) if temperature else DEFAULT_RULE
    if chosen in RULES and RULES[chosen].lenient:
        raise UserError(f"rule {chosen} is lossy at every temperature: choose {DEFAULT_RULE} at temperature 0")
    if temperature and chosen in RULES and not RULES[chosen].shares_noise:
        raise UserError(f"rule {chosen} reproduces the text at temperature 0 only: add --temperature 0")
    return chosen


def check_rule(name: str, *, adjust: bool, forest: bool) -> None:
    """Raise `UserError` if a rule cannot sample corrections from p (`adjust` False), or cannot verify forests."""
    if not (adjust or RULES[name].adjusts):
        choices = rule_names(lambda rule: rule.adjusts)
        raise UserError(f"rule {name} has no sample adjustment to skip: choose rule {choices}")
    if forest and RULES[name].chains_only:
        choices = rule_names(lambda rule: not rule.chains_only)
        raise UserError(f"rule {name} verifies chains, not forests: choose rule {choices}")
