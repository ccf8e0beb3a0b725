"""Drafts from the counts of a corpus."""

import pytest
import torch

from specdemo.core.step import Draft
from specdemo.drafters.corpus import CorpusCounts

TEXTS = [[0, 1, 0, 1, 0, 2], [3, 0, 1]]
VOCAB = 5


def probs(order: int, *tokens: int) -> torch.Tensor:
    return CorpusCounts(TEXTS, VOCAB, order).score(tokens, Draft()).softmax(-1)[0]


def test_order_0_is_uniform() -> None:
    assert probs(0, 1).tolist() == pytest.approx([1 / VOCAB] * VOCAB)


def test_order_1_counts_tokens_and_one_more_for_all() -> None:
    assert probs(1, 2).tolist() == pytest.approx([(count + 0.2) / 10 for count in (4, 3, 1, 1, 0)])


def test_order_2_counts_followers_within_a_text_and_one_more_like_unigrams() -> None:
    unigrams = probs(1)
    assert torch.allclose(probs(2, 1, 0), (torch.tensor([0, 3, 1, 0, 0]) + unigrams) / 5)
    assert torch.allclose(probs(2, 2), unigrams)  # ends a text
    assert torch.allclose(probs(2), unigrams)
