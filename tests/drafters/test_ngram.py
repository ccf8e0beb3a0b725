"""NASD's store and drafter, and drafts from the counts of a corpus."""

import random
from collections import Counter

import pytest
import torch
from fakes.tiny_models import up_to

from specdemo.core.origin import Origin
from specdemo.core.step import Draft, Step, Verdict
from specdemo.drafters.corpus import CorpusCounts
from specdemo.drafters.ngram import NGramDrafter


def propose(tokens: list[int], n: int = 4, levels: str = "multi", gamma: int = 5, **more: int) -> tuple[int, ...]:
    return NGramDrafter(n, levels, **more).propose(tokens, up_to(gamma)).tokens


def test_an_unknown_context_may_propose_random_tokens() -> None:
    tokens = propose([1, 2, 3, 4], random_below=7)
    assert len(tokens) == 5 and set(tokens) <= set(range(7)) and len(set(tokens)) > 1
    assert tokens == propose([1, 2, 3, 4], random_below=7) != propose([1, 2, 3, 4], random_below=7, seed=1)
    assert propose([1, 2, 1], random_below=7, gamma=1) == (2,)


@pytest.mark.parametrize("levels", ["multi", "one"])
def test_predictions_equal_counting_from_scratch(levels: str) -> None:
    """Independent count over the full history, after every token."""
    rng = random.Random(3)
    text = [rng.randrange(3) for _ in range(150)]
    drafter = NGramDrafter(4, levels)
    lengths = (3, 2, 1) if levels == "multi" else (3,)
    known = 0
    for end in range(1, len(text)):
        tokens = text[:end]
        expected = None
        for length in lengths:
            seen = [i for i in range(length, end) if tokens[i - length : i] == tokens[end - length :]]
            if length <= end and seen:
                counts = Counter(tokens[i] for i in seen)
                latest = {tokens[i]: i for i in seen}
                expected = max(counts, key=lambda token: (counts[token], latest[token]))
                break
        drafted = drafter.propose(tokens, up_to(1)).tokens
        assert drafted == (() if expected is None else (expected,))
        known += expected is not None
    assert known > 100


def step(tokens: tuple[int, ...], choices: tuple[tuple[int, ...], ...]) -> Step:
    return Step(0, tokens, Draft(), Verdict((), tokens[-1], choices=choices), 0, 0, 0, 0, 0)


def test_filler_never_outweighs_emitted_tokens() -> None:
    drafter = NGramDrafter(2, filler_top_k=3)
    drafter.propose([1], up_to(1))
    drafter.observe(step((4,), ((4, 5, 6),)))  # 4 followed 1; 5 and 6 were next in probability
    assert drafter.propose([1, 4], up_to(1)).tokens == ()
    drafter.observe(step((1,), ((7, 1, 8),)))  # 1 followed 4, though 7 was the first choice
    assert drafter.propose([1, 4, 1], up_to(2)).tokens == (4, 1)
    for _ in range(50):
        drafter.store.add([1], 5, seen=0.0, filler=1.0)
    assert drafter.propose([1, 4, 1], up_to(1)).tokens == (4,)


def test_origins_distinguish_counted_filled_and_random_tokens() -> None:
    drafter = NGramDrafter(3, filler_top_k=2, random_below=5)
    assert drafter.propose([1, 2, 1, 2, 1], up_to(1)).origin == (Origin("n-gram", order=3, count=1),)
    assert drafter.propose([1, 2, 1, 2, 1, 2], up_to(1)).origin == (Origin("n-gram", order=3, count=2),)
    drafter.store.add([3], 4, seen=0.0, filler=0.5)
    assert drafter.propose([1, 2, 1, 2, 1, 2, 3], up_to(2)).origin == (Origin("filler", order=2), Origin("random"))


def test_equal_fillers_count_like_emitted_tokens() -> None:
    """The document's store: the target's choices at a position have the weight of the emitted token."""
    ranked, equal = NGramDrafter(2, filler_top_k=3), NGramDrafter(2, filler_top_k=3, equal_filler=True)
    for drafter in (ranked, equal):
        drafter.propose([1], up_to(1))
        drafter.observe(step((4,), ((4, 5, 6),)))
        drafter.propose([1, 4], up_to(1))
        drafter.observe(step((1,), ((1, 5, 6),)))
        drafter.propose([1, 4, 1], up_to(1))
        drafter.observe(step((7,), ((7, 5, 8),)))  # 5 was a runner-up after 1 twice, 4 was emitted once
        drafter.propose([1, 4, 1, 7], up_to(1))
    assert ranked.store.predict([1]) == (7, Origin("n-gram", order=2, count=1))
    assert equal.store.predict([1]) == (5, Origin("n-gram", order=2, count=2))


def test_fillers_belong_to_the_positions_of_their_step() -> None:
    """Two steps: the first accepts a draft token of three siblings, then the target adds a token."""
    drafter = NGramDrafter(2, filler_top_k=2)
    drafter.propose([1], up_to(0))
    draft = Draft((7, 2, 8), (-1, -1, 1))
    choices = ((2, 20), (70, 71), (3, 30), (80, 81))
    drafter.observe(Step(1, (2, 3), draft, Verdict((1,), 3, choices=choices), 1, 0, 0, 0, 0))
    drafter.observe(step((4,), ((40, 4),)))
    drafter.propose([1, 2, 3, 4], up_to(0))
    weights = {context: dict(tokens) for context, tokens in drafter.store._weights.items()}
    assert weights == {
        (1,): {2: (1.0, 0.0), 20: (0.0, 0.5)},
        (2,): {3: (1.0, 0.0), 30: (0.0, 0.5)},
        (3,): {4: (1.0, 0.0), 40: (0.0, 1.0)},
    }


def test_the_source_is_counted_from_its_first_token() -> None:
    assert NGramDrafter(1, source=(7,)).store.predict([]) == (7, Origin("n-gram", order=1, count=1))
    assert NGramDrafter(2, source=(7, 8)).propose([7], up_to(3)).tokens == (8,)
    drafter = NGramDrafter(2, source=(7, 8))
    assert drafter.propose([7, 9, 7], up_to(1)).tokens == (9,)  # the text is counted, too
    assert drafter.store.predict([7]) == (9, Origin("n-gram", order=2, count=1))


def test_backoff_uses_shorter_contexts() -> None:
    tokens = [1, 2, 3, 9, 9, 2]  # "x x 2" does not occur before, "2" does
    assert propose(tokens, gamma=1) == (3,)
    assert propose(tokens, levels="one", gamma=1) == ()


# --- counts of a corpus -----------------------------------------------------------------------------------------------

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
