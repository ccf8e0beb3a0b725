"""Drafts of texts that share passes: lengths from the cost of the batch, computed by hand."""

import pytest

from specdemo.core.batch_limit import BatchLimit
from specdemo.core.policies import CostModel, Fixed
from specdemo.core.step import Draft, Step, Verdict
from specdemo.shared_passes import PassLoad

ROW = 0.2
COSTS = CostModel({1: 1.0, 6: 1 + 5 * ROW})


def step(drafted: int, accepted: int) -> Step:
    verdict = Verdict(tuple(range(accepted)), 1)
    return Step(1, (1,), Draft.chain((7,) * drafted), verdict, drafted, draft_s=0.0, verify_s=1.0, host_s=0.0, t=0.0)


def load(texts: int, work: float = 0.0) -> PassLoad | None:
    """Return a pass over two rows per text, and `work` between passes per text; None for a single text.

    The unit of time is a pass over one row.
    """
    rows = 2 * texts
    return None if texts == 1 else PassLoad(texts, rows, 1 + (rows - 1) * ROW, work * texts)


def limited(texts: int, work: float = 0.0, rounds: int = 200, accepted: int = 4) -> BatchLimit:
    """Return the limit of four tokens after steps of a single text, each with `accepted` accepted tokens."""
    current = None
    policy = BatchLimit(Fixed(4), COSTS, lambda: current, 4)
    for _ in range(rounds):
        policy.observe(step(4, accepted))
    current = load(texts, work)
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


@pytest.mark.parametrize(("work", "length"), [(0.0, 0), (0.1, 1), (0.2, 2), (0.4, 3), (1.0, 4)])
def test_drafts_are_longer_if_work_between_passes_costs_more(work: float, length: int) -> None:
    """At 32 texts a token costs 0.2 / (0.225 + work): 0.89, 0.62, 0.47, 0.32, 0.16."""
    assert limited(32, work, rounds=0).gamma == length
