"""Figures that rules and verifier record, the position of the sample, and the choice of rules by name."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fakes.tiny_models import TableModel
from torch import Tensor

from specdemo.core.distributions import DenseProbs
from specdemo.core.errors import UserError
from specdemo.core.rules import DEFAULT_RULE, RULES, DecidedBy, check_rule, reproducing_rule
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Verdict
from specdemo.core.verifier import ModelVerifier, committed_logprobs, configured_rule, position_tokens, with_top_tokens

VOCAB, START = 7, 40
CHAIN, FOREST_PARENTS = (-1, 0, 1), (-1, -1, -1, 0, 0, 3)


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
    for parents in ((), CHAIN, *(() if RULES[name].chains_only else (FOREST_PARENTS,)))
    for sampled in (False, True)
    if parents or not sampled
]


@pytest.mark.parametrize(("name", "parents", "sampled"), CASES)
def test_records_of_a_verdict(name: str, parents: tuple[int, ...], sampled: bool) -> None:
    """p of each node; the overlap of p and q of each tested node; a path of nodes; the sample follows the path."""
    block = RULES[name].chains_only
    lengths = set()
    for seed in range(15):
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


# --- of the model's verifier ------------------------------------------------------------------------------------------


TARGET, SMALL = TableModel(VOCAB, 1), TableModel(VOCAB, 2)
TEXT = (3, 1)
FOREST = Draft((5, 6, 2, 5), (-1, -1, 0, 1))


def verifier_of(sampling: SamplingParams, seed: int, rule: str = "rejection", **options: Any) -> ModelVerifier:
    accept, correct = Noise(seed, "accept"), Noise(seed, "correct")
    return ModelVerifier(TARGET.score, sampling, RULES[rule].apply, accept, correct, **options)


def sampled_chain(seed: int, length: int = 3) -> Draft:
    rng, tokens, rows = torch.Generator().manual_seed(seed), list(TEXT), []
    for _ in range(length):
        rows.append(SMALL.logits(tokens).softmax(-1))
        tokens.append(int(torch.multinomial(rows[-1], 1, generator=rng)))
    chosen = tuple(tokens[len(TEXT) :])
    probs = tuple(float(row[token]) for row, token in zip(rows, chosen, strict=True))
    return Draft.chain(chosen, probs, DenseProbs(torch.stack(rows)))


def target_probs(draft: Draft, row: int, temperature: float) -> Tensor:
    """Return the target's distribution in a row of a verification."""
    path = [*TEXT, *(draft.tokens[node] for node in draft.path(row - 1))]
    return (TARGET.logits(path) / (temperature or 1)).softmax(-1)


def sorted_tokens(values: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda token: -values[token])[:count]


@pytest.mark.parametrize("count", [0, 2, 100])
@pytest.mark.parametrize("seed", range(6))
def test_logprobs_are_those_of_the_raw_logits_along_the_committed_path(seed: int, count: int) -> None:
    sampling = SamplingParams(temperature=0.5, top_k=3)
    draft = sampled_chain(seed) if seed % 2 else FOREST
    verdict = verifier_of(sampling, seed, logprobs=count).verify(TEXT, draft)
    text = [*(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens]
    assert len(verdict.logprobs) == len(text) == len(verdict.accepted) + 1
    path = list(TEXT)
    for token, logprob in zip(text, verdict.logprobs, strict=True):
        expected = TARGET.logits(path).log_softmax(-1).tolist()
        assert logprob.logprob == pytest.approx(expected[token], abs=1e-6)
        listed = sorted_tokens(expected, count)
        assert [token for token, _ in logprob.top] == listed
        assert [value for _, value in logprob.top] == pytest.approx([expected[token] for token in listed], abs=1e-6)
        path.append(token)


def test_logprobs_of_a_search() -> None:
    logits = TARGET.score(TEXT, FOREST)
    verdict = Verdict((1, 3), None, committed=(2, 4))  # both tokens follow the last accepted node
    expected = logits.log_softmax(-1)
    rows_and_tokens = [(0, 6), (2, 5), (4, 2), (4, 4)]
    values = [item.logprob for item in committed_logprobs(logits, FOREST, verdict, 1)]
    assert values == pytest.approx([float(expected[pair]) for pair in rows_and_tokens], abs=1e-6)


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "rejection"), (0.7, "rejection"), (0.7, "block")])
def test_tops_are_recorded_for_target_draft_and_residual(temperature: float, rule: str) -> None:
    """At temperature 0 the softmax is recorded; residuals exist after a rejection only."""
    corrections = 0
    for seed in range(12):
        draft = sampled_chain(seed)
        verdict = verifier_of(SamplingParams(temperature), seed, rule, top=2).verify(TEXT, draft)
        tokens = position_tokens(draft, verdict.token, verdict.accepted)
        for row, top in enumerate(verdict.target_top):
            p = target_probs(draft, row, temperature)
            wanted = tokens[row] | set(sorted_tokens(p.tolist(), 2))
            if row < len(draft):
                wanted |= set(sorted_tokens(draft.probs.row(row).tolist(), 2))
            assert dict(top.top).keys() == wanted
            assert list(top.top) == sorted(top.top, key=lambda pair: -pair[1])
            assert top.entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-5)
        for node, top in enumerate(verdict.draft_top):
            assert dict(top.top).keys() == dict(verdict.target_top[node].top).keys()
        assert len(verdict.target_top) == len(draft) + 1 and len(verdict.draft_top) == len(draft)
        corrected = temperature > 0 and len(verdict.accepted) < len(draft)
        assert (verdict.token_top is not None) == corrected
        if corrected:
            row = len(verdict.accepted)
            q, p = draft.probs.row(row), target_probs(draft, row, temperature)
            weight = 1.0
            for node in verdict.accepted if rule == "block" else ():
                weight = min(1.0, weight * verdict.p[node] / draft.token_probs[node])
            excess = (weight * p - q).clamp_min(0)
            expected = excess / excess.sum()
            shown = dict(verdict.token_top.top)
            assert {verdict.token, draft.tokens[row]} | set(sorted_tokens(p.tolist(), 2)) <= shown.keys()
            assert shown == pytest.approx({token: float(expected[token]) for token in shown}, abs=1e-5)
            corrections += 1
    assert corrections or not temperature


@pytest.mark.parametrize("change", [Tensor.contiguous, Tensor.double, lambda p: torch.cat([p, p], 1)[:, :VOCAB]])
def test_ranks_of_any_distributions_count_larger_probabilities(change: Callable[[Tensor], Tensor]) -> None:
    """Compiled, without the compiled engine, and in rows that are not contiguous."""
    draft = Draft((5, 6, 2, 5, 5), (-1, -1, 0, 1, 3))
    for seed in range(5):
        p = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed)).softmax(1)
        p[0, 5] = p[0, 3]
        rows = [p[parent + 1].tolist() for parent in draft.parents]
        larger = [sum(value > row[token] for value in row) for token, row in zip(draft.tokens, rows, strict=True)]
        assert with_top_tokens(Verdict((), 0), draft, change(p), 1).rank == tuple(1 + count for count in larger)
