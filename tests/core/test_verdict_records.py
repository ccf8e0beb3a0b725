"""Recorded figures of a verdict explain its outcomes: bounds, ranks, residuals, and distributions."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from specdemo.core.distributions import DenseProbs, residual, without
from specdemo.core.rules import RULES
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Verdict
from specdemo.core.verifier import ModelVerifier

VOCAB, TOP = 12, 2
SHAPES = {"chain": (-1, 0, 1, 2), "tree": (-1, -1, -1, 0, 0, 1, 3)}
THRESHOLDS = {"ratio": 0.5, "threshold": 0.1, "typical": 0.09}


def random_draft(shape: str, sampled: bool, seed: int) -> Draft:
    """Draft with random distributions; the q of a later sibling excludes earlier siblings."""
    generator, parents = torch.Generator().manual_seed(seed), SHAPES[shape]
    rows, tokens = [], []
    for node, parent in enumerate(parents):
        q = torch.randn(VOCAB, generator=generator).mul(2).softmax(-1)
        for elder in range(node):
            if parents[elder] == parent:
                q = without(rows[elder], tokens[elder])
        rows.append(q)
        tokens.append(int(torch.multinomial(q, 1, generator=generator)))
    if not sampled:
        return Draft(tuple(tokens), parents)
    token_probs = tuple(float(q[token]) for q, token in zip(rows, tokens, strict=True))
    return Draft(tuple(tokens), parents, token_probs, DenseProbs(torch.stack(rows)))


def verify(shape: str, rule: str, sampled: bool, temperature: float, seed: int) -> tuple[Draft, Tensor, Verdict]:
    draft = random_draft(shape, sampled, seed)
    logits = torch.randn(len(draft) + 1, VOCAB, generator=torch.Generator().manual_seed(seed + 1000)) * 2
    sampling = SamplingParams(temperature=temperature)
    apply = RULES[rule].apply
    if rule in THRESHOLDS:
        apply = lambda *args: RULES[rule].apply(*args, threshold=THRESHOLDS[rule])  # noqa: E731
    verifier = ModelVerifier(
        lambda tokens, draft: logits, sampling, apply, Noise(seed, "accept"), Noise(seed, "correct"), top=TOP
    )
    p = sampling.logits_to_probs(logits) if temperature else logits.softmax(-1)
    return draft, p, verifier.verify([1, 2], draft)


CASES = list(product(SHAPES, ("rejection", "top1", "ratio", "threshold", "typical"), (True, False)))


@pytest.mark.parametrize(("shape", "rule", "sampled"), CASES)
def test_draw_or_p_and_bound_decide_every_tested_node(shape: str, rule: str, sampled: bool) -> None:
    decided = 0
    for seed in range(40):
        draft, p, verdict = verify(shape, rule, sampled, 1.0, seed)
        for node, beta in enumerate(verdict.beta):
            if beta is None:
                assert verdict.bound[node] is None and verdict.draw[node] is None
                continue
            decided += 1
            accepted, bound, draw = node in verdict.accepted, verdict.bound[node], verdict.draw[node]
            if rule == "rejection":
                assert accepted == (draw < bound)
            elif rule == "top1":
                assert bound is None and accepted == (verdict.rank[node] == 1)
            else:
                assert draw is None and accepted == (verdict.p[node] >= bound)
    assert decided >= 40


@pytest.mark.parametrize("sampled", [True, False])
def test_bound_of_a_sibling_uses_the_residual_of_its_elders(sampled: bool) -> None:
    compared = 0
    for seed in range(40):
        draft, p, verdict = verify("tree", "rejection", sampled, 1.0, seed)
        for node, parent in enumerate(draft.parents):
            if verdict.beta[node] is None:
                continue
            row, token = p[parent + 1], draft.tokens[node]
            for elder in range(node):
                if draft.parents[elder] == parent:
                    row = residual(row, draft.probs.row(elder)) if sampled else without(row, draft.tokens[elder])
                    compared += 1
            q = draft.token_probs[node] if sampled else 1.0
            assert verdict.bound[node] == pytest.approx(min(1.0, float(row[token]) / q), abs=1e-6)
    assert compared > 20


@pytest.mark.parametrize(("shape", "sampled"), list(product(SHAPES, (True, False))))
def test_recorded_residual_is_the_distribution_of_the_correction(shape: str, sampled: bool) -> None:
    corrections = 0
    for seed in range(40):
        draft, p, verdict = verify(shape, "rejection", sampled, 1.0, seed)
        last = verdict.accepted[-1] if verdict.accepted else -1
        children = [node for node, parent in enumerate(draft.parents) if parent == last]
        assert (verdict.token_top is not None) == bool(children) and verdict.residual is None
        if not children:
            continue
        corrections += 1
        row = p[last + 1]
        for node in children:
            row = residual(row, draft.probs.row(node)) if sampled else without(row, draft.tokens[node])
        recorded = dict(verdict.token_top.top)
        assert recorded == pytest.approx({token: float(row[token]) for token in recorded}, abs=1e-6)
        assert verdict.token in recorded and recorded[verdict.token] > 0
    assert corrections
