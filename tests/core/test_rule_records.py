"""Figures that every acceptance rule records, the position of its sample, and the choice of rules by name."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from specdemo.core.distributions import DenseProbs
from specdemo.core.errors import UserError
from specdemo.core.rules import (
    DEFAULT_RULE,
    RULES,
    DecidedBy,
    RuleTraits,
    check_rule,
    reproducing_rule,
    rule_traits,
)
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Verdict
from specdemo.core.verifier import configured_rule

VOCAB, START = 6, 40
CHAIN, FOREST = (-1, 0, 1), (-1, -1, -1, 0, 0, 3)


class Recorder:
    """Sampler that records positions."""

    def __init__(self, seed: int) -> None:
        self.noise, self.positions = Noise(seed, "correct"), list[int]()

    def sample(self, probs: Tensor, position: int) -> int:
        self.positions.append(position)
        return self.noise.sample(probs, position)


def rows_of(seed: int, count: int) -> Tensor:
    return (torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5).softmax(-1)


def draft_of(seed: int, parents: tuple[int, ...], sampled: bool) -> Draft:
    """Random draft; siblings have different tokens, and later ones a q without the earlier."""
    q, generator = rows_of(seed + 1000, len(parents)), torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        for elder in range(node):
            if parents[elder] == parent:
                q[node, tokens[elder]] = 0.0
        q[node] /= q[node].sum()
        tokens.append(int(torch.multinomial(q[node], 1, generator=generator)))
    if not sampled:
        return Draft(tuple(tokens), parents)
    return Draft(tuple(tokens), parents, tuple(q[range(len(tokens)), tokens].tolist()), DenseProbs(q))


def verify(name: str, draft: Draft, p: Tensor, seed: int) -> tuple[Verdict, list[int]]:
    recorder = Recorder(seed)
    return configured_rule(name)(draft, p, Noise(seed, "accept"), recorder, START), recorder.positions


def overlap(draft: Draft, p: Tensor, node: int) -> float:
    row = p[draft.parents[node] + 1]
    if draft.probs is None:
        return float(row[draft.tokens[node]])
    return float(torch.minimum(row, draft.probs.row(node)).sum())


CASES = [
    (name, parents, sampled)
    for name in RULES
    for parents in ((), CHAIN, *(() if RULES[name].chains_only else (FOREST,)))
    for sampled in (False, True)
    if parents or not sampled
]


@pytest.mark.parametrize(("name", "parents", "sampled"), CASES)
def test_records_of_a_verdict(name: str, parents: tuple[int, ...], sampled: bool) -> None:
    """p of each node; the overlap of p and q of each tested node; a path of nodes; the sample follows the path."""
    block = RULES[name].chains_only
    lengths = set()
    for seed in range(30):
        draft, p = draft_of(seed, parents, sampled), rows_of(seed, len(parents) + 1)
        verdict, positions = verify(name, draft, p, seed)
        path, children = verdict.accepted, draft.children()
        assert list(path) == (draft.path(path[-1]) if path else [])
        chosen = [p[draft.parents[node] + 1, token] for node, token in enumerate(draft.tokens)]
        assert list(verdict.p) == pytest.approx([float(value) for value in chosen], abs=1e-6)
        tested = set(range(len(draft))) if block else set()
        for node in () if block else (-1, *path):
            siblings = children.get(node, [])
            accepted = [i for i, child in enumerate(siblings) if child in path]
            whole = RULES[name].decided_by in (DecidedBy.SAMPLE, DecidedBy.SHARED_DRAW)
            tested |= set(siblings if whole or not accepted else siblings[: accepted[0] + 1])
        for node, beta in enumerate(verdict.beta):
            assert beta == (pytest.approx(overlap(draft, p, node), abs=1e-6) if node in tested else None)
        assert len(verdict.beta) == len(verdict.draw) == len(draft)
        assert RULES[name].needs_rows or verdict.residual is None
        if RULES[name].decided_by in (DecidedBy.SAMPLE, DecidedBy.SHARED_DRAW):
            assert positions == list(range(START, START + len(path) + 1))
            assert set(verdict.draw) <= {None} and verdict.bound == ()
        else:
            assert positions == [START + len(path)]
            assert len(verdict.bound) == len(draft)
        for node in tested if verdict.bound and not block else ():
            draw, bound = verdict.draw[node], verdict.bound[node]
            if draw is not None:
                assert (node in path) == (draw < bound)
            elif bound is not None:
                assert (node in path) == (verdict.p[node] >= bound)
        assert isinstance(verdict.token, int) and float(p[path[-1] + 1 if path else 0, verdict.token]) > 0
        lengths.add(len(path))
    assert len(lengths) > 1 or not parents


def test_the_largest_of_ties_decides_top1() -> None:
    p = torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4], [0.0, 0.0, 1.0]])
    assert verify("top1", Draft.chain((0, 1)), p, 0)[0].accepted == (0, 1)
    assert verify("top1", Draft.chain((1, 1)), p, 0)[0].accepted == ()


def test_equality_with_a_bound_is_enough_except_for_typical_acceptance() -> None:
    """Of a uniform distribution, whose exp(-entropy) is p, and of a certain token."""

    def verdict(name: str, threshold: float, p: Tensor) -> Verdict:
        noise = Noise(0, "accept")
        return configured_rule(name, threshold=threshold)(Draft((2,), (-1,)), p, noise, noise, START)

    uniform, certain = torch.full((2, 4), 0.25), torch.tensor([[0.0, 0.0, 1.0, 0.0]] * 2)
    for name in ("threshold", "ratio"):
        assert verdict(name, 0.25, uniform).accepted == (0,) and verdict(name, 0.26, uniform).accepted == ()
        assert verdict(name, 0.25, uniform).bound == (0.25,)
    assert verdict("typical", 1.0, certain).accepted == () and verdict("typical", 0.81, certain).accepted == (0,)
    assert [verdict("typical", value, certain).bound[0] for value in (0.81, 0.04)] == pytest.approx([0.81, 0.04])
    assert [verdict("typical", value, uniform).bound[0] for value in (0.25, 0.04)] == pytest.approx([0.125, 0.04])


def test_the_rule_that_reproduces_ar_text() -> None:
    assert [reproducing_rule(temperature) for temperature in (0.0, 0.5)] == [DEFAULT_RULE, "coupled"]
    assert reproducing_rule(0.0, "top1") == "top1" and reproducing_rule(0.7, "coupled") == "coupled"
    for temperature, name, cause in (
        (0.0, "lenient", "lossy at every temperature: choose rejection"),
        (0.7, "rejection", "at temperature 0 only: add --temperature 0"),
    ):
        with pytest.raises(UserError, match=cause):
            reproducing_rule(temperature, name)


def test_rules_that_cannot_skip_the_adjustment_or_verify_forests() -> None:
    for name, rule in RULES.items():
        check_rule(name, adjust=True, forest=False)
        with nullcontext() if rule.adjusts else pytest.raises(UserError, match="no sample adjustment.*rejection"):
            check_rule(name, adjust=False, forest=False)
        with nullcontext() if name != "block" else pytest.raises(UserError, match="not forests: choose .*match"):
            check_rule(name, adjust=True, forest=True)


def test_exactness_of_the_rules() -> None:
    exact = {t: {name for name, rule in RULES.items() if rule.exact(SamplingParams(t))} for t in (0.0, 0.7)}
    assert exact[0.7] == {"rejection", "block", "match", "coupled"} and exact[0.0] == RULES.keys() - {"lenient"}
    assert rule_traits({"rule": "of another version"}) == RuleTraits() and rule_traits({}) is RULES["rejection"]
