"""Block verification (2403.10444): distribution and expected acceptance by enumeration, in double precision."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from fakes.enumeration import distance
from fakes.tiny_models import Explorer, TableModel
from torch import Tensor

from specdemo.core import rules
from specdemo.core.distributions import DenseProbs, PointMass, PointMasses, SparseProbs, excess, residual
from specdemo.core.rules import RULES, Rule
from specdemo.core.sampling import Noise
from specdemo.core.step import Draft, Verdict
from specdemo.native import sampling as native

BLOCK, TOKEN = RULES["block"], RULES["rejection"]
GAMMA, ROUNDING = 3, 1e-15
Path = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Distributions of the target and of a drafted chain, by prefix."""

    p: Callable[[Path], Any]
    q: Callable[[Path], Any]


def table(seed: int, vocab: int = 3, temperature: float = 1.0) -> Callable[[Path], Tensor]:
    model = TableModel(vocab, seed)
    return cache(lambda prefix: (model.logits(prefix).double() / temperature).softmax(-1))


def masses(q: Callable[[Path], Any], vocab: int = 3) -> Callable[[Path], PointMass]:
    return lambda prefix: PointMass((sum(prefix) + len(prefix)) % vocab)


def alternating(q: Callable[[Path], Any], first: int) -> Callable[[Path], Any]:
    """Every second draft token is a point mass."""
    return lambda prefix: (masses(q) if len(prefix) % 2 == first else q)(prefix)


def greedy(p: Callable[[Path], Tensor]) -> Callable[[Path], PointMass]:
    return lambda prefix: PointMass(int(p(prefix).argmax()))


_P, _Q = (torch.tensor(row, dtype=torch.float64) for row in ([0.2, 0.3, 0.5], [0.5, 0.3, 0.2]))
CASES = {
    "example": Case(lambda prefix: _P, lambda prefix: _Q),
    **{f"random {seed}": Case(table(seed), table(seed + 50)) for seed in range(6)},
    "peaked": Case(table(1, temperature=0.3), table(51, temperature=0.3)),
    "equal": Case(table(1), table(1)),
    "point masses": Case(table(2), masses(table(52))),
    "mixed": Case(table(3), alternating(table(53), 0)),
    "mixed, sampled first": Case(table(4), alternating(table(54), 1)),
    "greedy": Case(greedy(table(5)), greedy(table(55))),
    "greedy target": Case(greedy(table(6)), table(56)),
}


class Rows:
    """Distributions of a mixed chain; rows may be point masses."""

    device = torch.device("cpu")

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def row(self, node: int) -> Any:
        return self.rows[node]

    def compare(self, p: Any, tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[float], list[float]]:
        dense = [as_tensor(row) for row in p]
        pairs = zip(dense, map(as_tensor, self.rows), strict=False)
        return [float(row[t]) for row, t in zip(dense, tokens, strict=False)], [
            float(torch.minimum(a, b).sum()) for a, b in pairs
        ]


def as_tensor(row: Any, vocab: int = 3) -> Tensor:
    if not isinstance(row, PointMass):
        return row
    return torch.eye(vocab, dtype=torch.float64)[row.token]


def drawn(row: Any, explorer: Explorer) -> int:
    return row.token if isinstance(row, PointMass) else explorer.sample(row)


def judged(case: Case, rule: Callable[..., Verdict], explorer: Any, gamma: int = GAMMA) -> tuple[Path, Verdict]:
    """Draft a chain and verify it; return the committed tokens."""
    drafted: list[int] = []
    rows = []
    for _ in range(gamma):
        rows.append(case.q(tuple(drafted)))
        drafted.append(drawn(rows[-1], explorer))
    p = [case.p(tuple(drafted[:i])) for i in range(gamma + 1)]
    q = tuple(float(as_tensor(row)[token]) for row, token in zip(rows, drafted, strict=True))
    verdict = rule(Draft.chain(tuple(drafted), q, Rows(rows)), p, explorer, explorer, 0)
    return (*(drafted[node] for node in verdict.accepted), verdict.token), verdict


def text_error(case: Case, rule: Callable[..., Verdict], gamma: int = GAMMA) -> float:
    """Distance of the first gamma + 1 tokens from the target's distribution; AR decoding follows the step."""
    explorer = Explorer()

    def once() -> Path:
        text, _ = judged(case, rule, explorer, gamma)
        while len(text) < gamma + 1:
            text = (*text, drawn(case.p(text), explorer))
        return text

    probs = explorer.distribution(once)
    truth = {
        text: float(torch.stack([as_tensor(case.p(text[:i]))[token] for i, token in enumerate(text)]).prod())
        for text in product(range(3), repeat=gamma + 1)
    }
    return distance(probs, truth)


def accepted_lengths(case: Case, rule: Callable[..., Verdict], gamma: int = GAMMA) -> dict[int, float]:
    explorer = Explorer()
    return explorer.distribution(lambda: len(judged(case, rule, explorer, gamma)[1].accepted))


def mean(lengths: dict[int, float]) -> float:
    return sum(n * mass for n, mass in lengths.items())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gamma", [1, 2, GAMMA])
def test_block_verification_is_exact(name: str, gamma: int) -> None:
    """Joint distribution of gamma + 1 tokens: the error is that of double precision."""
    assert text_error(CASES[name], BLOCK.apply, gamma) < ROUNDING


@pytest.mark.parametrize("name", CASES)
def test_expected_acceptance_is_at_least_that_of_the_token_rule(name: str) -> None:
    block, token = (mean(accepted_lengths(CASES[name], rule.apply)) for rule in (BLOCK, TOKEN))
    assert block >= token - ROUNDING
    if name.startswith(("example", "random", "peaked")):
        assert block > token + 1e-5


def test_expected_acceptance_is_the_sum_of_mean_weights() -> None:
    """P(at least i accepted | x) = w_i = min(1, w p / q), so E = sum of E[w_i] (2403.10444, appendix)."""
    for name, case in CASES.items():
        expected = 0.0
        for draft in product(range(3), repeat=GAMMA):
            rows = [(case.p(draft[:i]), case.q(draft[:i]), token) for i, token in enumerate(draft)]
            ps, qs = ([float(as_tensor(row[k])[row[2]]) for row in rows] for k in (0, 1))
            mass = float(torch.tensor(qs, dtype=torch.float64).prod())
            if mass:
                weights = accumulate(zip(ps, qs, strict=True), lambda w, pq: min(1.0, w * pq[0] / pq[1]), initial=1.0)
                expected += mass * sum(list(weights)[1:])
        assert mean(accepted_lengths(case, BLOCK.apply)) == pytest.approx(expected, abs=ROUNDING), name


def test_gain_on_a_worked_example() -> None:
    """The same p and q at every position: 1.695 of three tokens instead of 1.533."""
    block, token = (mean(accepted_lengths(CASES["example"], rule.apply)) for rule in (BLOCK, TOKEN))
    assert token == pytest.approx(0.7 + 0.7**2 + 0.7**3)
    assert block == pytest.approx(1.695)


@pytest.mark.parametrize(("name", "gamma"), [("random 0", 1), ("point masses", 2), ("point masses", 3), ("greedy", 3)])
def test_one_token_and_point_masses_are_accepted_as_by_the_token_rule(name: str, gamma: int) -> None:
    block, token = (accepted_lengths(CASES[name], rule.apply, gamma) for rule in (BLOCK, TOKEN))
    assert distance(block, token) < ROUNDING


def test_all_positions_are_tested_and_the_last_success_decides() -> None:
    rescued = 0
    for seed in range(200):
        explorer = Noise(seed, "test")
        _, verdict = judged(CASES["random 3"], BLOCK.apply, explorer)
        passed = [u < h for u, h in zip(verdict.draw, verdict.bound, strict=True)]
        last = max((i for i, ok in enumerate(passed) if ok), default=-1)
        assert verdict.accepted == tuple(range(last + 1))
        assert None not in verdict.beta and all(0 <= h <= 1 for h in verdict.bound)
        rescued += not all(passed[: last + 1])
    assert rescued > 10


@pytest.mark.parametrize(
    ("rule", "p", "q"),
    [
        (BLOCK, [0.0, 1.0], [0.5, 0.5]),
        (BLOCK, [0.5, 0.5], [0.0, 1.0]),
        (TOKEN, [0.0, 1.0], [0.5, 0.5]),
        (TOKEN, [0.0, 1.0], [0.0, 1.0]),
    ],
)
def test_an_impossible_token_is_rejected_for_draw_zero(rule: Rule, p: list[float], q: list[float]) -> None:
    class Zero:
        def test(self, probability: float) -> tuple[bool, float]:
            return 0.0 < probability, 0.0

        def sample(self, probs: Tensor, position: int) -> int:
            return int(probs.argmax())

    draft = Draft.chain((0, 1), (q[0], q[1]), DenseProbs(torch.tensor([q, q])))
    verdict = rule.apply(draft, torch.tensor([p] * 3), Zero(), Zero(), 1)
    assert verdict.accepted == () and p[verdict.token] > 0
    assert verdict.bound == ((0.0, 0.0) if rule is BLOCK else (0.0, None))


# --- mutants ------------------------------------------------------------------------------------------------------


def test_mutant_product_of_ratios_as_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version shipped by vllm-ascend until #7808: the weight is the bound, and corrections ignore it."""
    monkeypatch.setattr(rules, "excess", lambda p, q, weight: weight)  # h = w / (w + 1 - w)
    assert text_error(CASES["example"], BLOCK.apply) > 0.005
    monkeypatch.setattr(rules, "residual", lambda p, q, weight: residual(p, q))
    assert text_error(CASES["example"], BLOCK.apply) > 0.005


def test_mutant_residual_of_the_token_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "residual", lambda p, q, weight: residual(p, q))
    assert text_error(CASES["random 5"], BLOCK.apply) > 0.002


def test_mutant_first_failure_ends_the_block() -> None:
    class Ending:
        """Acceptance test that fails after a failure."""

        def __init__(self, source: Explorer) -> None:
            self.source, self.failed = source, False

        def test(self, probability: float) -> tuple[bool, float]:
            passed, draw = self.source.test(probability)
            self.failed |= not passed
            return not self.failed, draw

    def rule(draft: Draft, p: Any, accept: Explorer, correct: Explorer, start: int) -> Verdict:
        return BLOCK.apply(draft, p, Ending(accept), correct, start)

    assert text_error(CASES["example"], rule) > 0.005


# --- engines and rows -----------------------------------------------------------------------------------------------


def test_compiled_decisions_equal_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random chains of a large vocabulary: equal verdicts, bounds within rounding."""

    def verdicts() -> list[Verdict]:
        generator = torch.Generator().manual_seed(5)
        results = []
        for seed in range(60):
            q = torch.randn(5, 1003, generator=generator).mul_(2).softmax(-1)
            p = torch.cat([q, q[:1]]) * torch.rand(6, 1003, generator=generator).add_(0.3)
            p /= p.sum(-1, keepdim=True)
            tokens = tuple(Noise(seed, "draft").sample(row.double()) for row in q)
            draft = Draft.chain(tokens, tuple(q[range(5), tokens].tolist()), DenseProbs(q))
            results.append(BLOCK.apply(draft, p, Noise(seed, "accept"), Noise(seed, "correct"), 1))
        return results

    compiled = verdicts()
    monkeypatch.setattr(native, "supports", lambda *tensors: False)
    for ours, theirs in zip(compiled, verdicts(), strict=True):
        assert (ours.accepted, ours.token, ours.draw) == (theirs.accepted, theirs.token, theirs.draw)
        assert ours.bound == pytest.approx(theirs.bound, abs=1e-5)
    lengths = {len(verdict.accepted) for verdict in compiled}
    assert lengths == set(range(6))


@pytest.mark.parametrize("weight", [0.25, 0.9, 1.0])
def test_excess_and_residual_of_all_kinds_of_rows(weight: float) -> None:
    rng = torch.Generator().manual_seed(3)
    p = torch.randn(40, generator=rng).softmax(-1)
    ids, values = torch.randperm(40, generator=rng)[:6], torch.randn(6, generator=rng).softmax(-1)
    sparse = SparseProbs(ids, values[None], 40)
    mass = PointMasses((int(ids[2]),))
    one_hot = torch.zeros(40).index_fill_(0, ids[2:3], 1.0)
    for row, dense in ((sparse.row(0), sparse.dense()[0]), (mass.row(0), one_hot), (p, p)):
        expected = (weight * p.double() - dense.double()).clamp_(min=0)
        assert excess(p, row, weight) == pytest.approx(float(expected.sum()), abs=1e-6)
        if float(expected.sum()) > 1e-3:
            torch.testing.assert_close(residual(p, row, weight).double(), expected / expected.sum(), atol=1e-6, rtol=0)
    assert excess(PointMass(int(ids[0])), sparse.row(0), weight) == pytest.approx(max(0.0, weight - float(values[0])))
