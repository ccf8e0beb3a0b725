"""Drafts of texts that share passes: lengths from the cost of the batch, computed by hand."""

from __future__ import annotations

import pytest

from specdemo.core.batch_limit import BatchLimit
from specdemo.core.policies import CostModel, Fixed, PathProbability
from specdemo.core.step import Draft, Step, Verdict

ROW = 0.2
COSTS = CostModel({1: 1.0, 6: 1 + 5 * ROW})


def step(drafted: int, accepted: int) -> Step:
    verdict = Verdict(tuple(range(accepted)), 1)
    return Step(1, (1,), Draft.chain((7,) * drafted), verdict, drafted, draft_s=0.0, verify_s=1.0, host_s=0.0, t=0.0)


def limited(texts: int, rounds: int = 200, accepted: int = 4) -> BatchLimit:
    """Return the limit of four tokens after steps of a single text, each with `accepted` accepted tokens."""
    count = 1
    policy = BatchLimit(Fixed(4), COSTS, lambda: count)
    for _ in range(rounds):
        policy.observe(step(4, accepted))
    count = texts
    return policy


@pytest.mark.parametrize("texts", [1, 2, 8, 32])
def test_tokens_that_are_always_accepted_are_always_drafted(texts: int) -> None:
    assert limited(texts).gamma == 4


@pytest.mark.parametrize(("texts", "length"), [(1, 4), (2, 3), (4, 1), (8, 1), (32, 0)])
def test_drafts_are_shorter_the_more_texts_share_a_pass(texts: int, length: int) -> None:
    """Without observations each token is accepted with probability 0.7: 0.7, 0.49, 0.34, 0.24.

    A token costs t r / (1 + (t - 1) r) with r = 0.2: 0.33 at two texts, 0.5 at four, 0.67 at eight, 0.89 at 32.
    """
    policy = limited(texts, rounds=0)
    assert policy.gamma == length
    assert policy.notes == ({"texts": texts} if texts > 1 else {})


def test_the_length_maximises_the_tokens_per_cost_of_the_batch() -> None:
    """Other texts decode autoregressively: with k drafts a pass costs 1 + (t + k - 1) r and yields t + sum a^i."""
    policy = limited(4, rounds=0)
    shares = [0.7**i for i in range(1, 5)]
    gains = [sum(shares[:k]) - k * 4 * ROW / (1 + 3 * ROW) for k in range(5)]
    assert policy.gamma == max(range(5), key=gains.__getitem__)


def test_without_drafts_acceptance_is_tested_again() -> None:
    policy = limited(32, accepted=0)
    lengths = []
    for _ in range(40):
        lengths.append(policy.gamma)
        policy.observe(step(lengths[-1], 0))
    assert set(lengths) == {0, 1} and 2 <= sum(lengths) <= 3
    for _ in range(100):
        policy.observe(step(1, 1))
    assert policy.gamma >= 1


def test_paths_end_at_the_cost_of_the_batch() -> None:
    count = 1
    policy = BatchLimit(PathProbability(4, 0, threshold=0.3), CostModel(COSTS.passes, token=0.1), lambda: count)
    assert policy.path_threshold == 0.3 and policy.needs_logits
    count = 4
    assert policy.path_threshold == pytest.approx(4 * 0.3 / 1.6)
    assert BatchLimit(Fixed(4), COSTS, lambda: 4).path_threshold is None
