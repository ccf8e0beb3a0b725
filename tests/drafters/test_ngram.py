"""NASD's store and drafter, drafts from the counts of a corpus, and lookahead decoding."""

import random
from collections import Counter

import pytest
import torch
from fakes.tiny_models import up_to

from specdemo.core.step import Draft, Origin, Step, Verdict
from specdemo.drafters.lookahead import LookaheadDrafter
from specdemo.drafters.ngram import CorpusCounts, NGramDrafter


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


def test_probabilities_of_a_corpus_are_smoothed_counts() -> None:
    """Order 0: uniform. Order 1: tokens, and one more for all. Order 2: followers, and one more like order 1."""
    assert probs(0, 1).tolist() == pytest.approx([1 / VOCAB] * VOCAB)
    unigrams = probs(1, 2)
    assert unigrams.tolist() == pytest.approx([(count + 0.2) / 10 for count in (4, 3, 1, 1, 0)])
    assert torch.allclose(probs(2, 1, 0), (torch.tensor([0, 3, 1, 0, 0]) + unigrams) / 5)
    assert torch.allclose(probs(2, 2), unigrams)  # ends a text
    assert torch.allclose(probs(2), unigrams)


# --- lookahead decoding -----------------------------------------------------------------------------------------------


def answered(draft: Draft, choices: dict[int, int]) -> Step:
    """Step that accepted no token, given the target's first choice after each node."""
    rows = ((0,), *((choices.get(node, 0),) for node in range(len(draft))))
    return Step(1, (0,), draft, Verdict((), 0, choices=rows), 9, draft_s=0, verify_s=0, host_s=0, t=0)


def test_the_comb_and_its_update() -> None:
    drafter = LookaheadDrafter(window=3, n=3, guesses=2)
    first = drafter.propose([5], up_to(9))  # only token available as a guess
    assert first.tokens == (5,) * 6
    assert first.parents == (-1, 0, 1, 0, 1, 2)  # a spine of three, a tooth on each of its places
    drafter.observe(answered(first, {3: 7, 4: 8, 5: 9}))
    second = drafter.propose([5], up_to(9))
    guesses, comb = second.tokens[:-6], second.tokens[-6:]
    assert guesses == (5, 9, 8)  # the n-grams (5, 5, 9) and (5, 5, 8), the latest first, sharing their beginning
    assert second.parents[:3] == (-1, 0, 0)
    assert [origin.source for origin in second.origin] == ["pool"] * 3 + ["window"] * 6
    assert comb == (5, 5, 5, 7, 8, 9)  # the window moved up by one level
    assert drafter.propose([6], up_to(9)).tokens == comb  # no n-gram begins with 6


@pytest.mark.parametrize(("window", "n"), [(1, 2), (3, 3), (5, 4)])
def test_the_comb_needs_its_depth(window: int, n: int) -> None:
    """A spine of `window` positions; the tooth of each continues for n - 2 tokens."""
    text, depth = [*range(30)], window + n - 2
    assert LookaheadDrafter(window, n).propose(text, up_to(depth - 1)) == Draft()
    draft = LookaheadDrafter(window, n).propose(text, up_to(depth))
    assert len(draft) == window * (n - 1) and draft.depth == depth and set(draft.tokens) <= set(text)
    levels = [draft.parents[start : start + window] for start in range(0, len(draft), window)]
    assert levels[0] == tuple(range(-1, window - 1))
    assert levels[1:] == [tuple(range(start, start + window)) for start in range(0, len(draft) - window, window)]
    assert draft == LookaheadDrafter(window, n, seed=0).propose(text, up_to(depth))
    assert window == 1 or draft != LookaheadDrafter(window, n, seed=1).propose(text, up_to(depth))


def spine(drafter: LookaheadDrafter, ends: list[int]) -> None:
    """Propose after the text 5, 5, ..., and observe these tokens after the comb of depth 1."""
    draft = drafter.propose([5], up_to(9))
    first = len(draft) - len(ends)
    drafter.observe(answered(draft, dict(zip(range(first, len(draft)), ends, strict=True))))


def test_recent_n_grams_replace_older_ones() -> None:
    """With n = 2 an n-gram is a guess and its successor; a repeated n-gram counts as recent."""
    drafter = LookaheadDrafter(window=1, n=2, guesses=2)
    for end in (5, 5, 7):  # 5 -> 5, again, and 5 -> 7; the next guess is 7
        spine(drafter, [end])
    assert drafter.propose([5], up_to(1)).tokens == (7, 5, 7)  # n-grams and comb
    spine(drafter, [5])  # 7 -> 5
    spine(drafter, [5])  # 5 -> 5 is the latest again
    assert drafter.propose([5], up_to(1)).tokens == (5, 7, 5)
    spine(drafter, [8])  # 5 -> 8 replaces 5 -> 7
    assert drafter.propose([5], up_to(1)).tokens == (8, 5, 8)
    assert drafter.propose([7], up_to(1)).tokens == (5, 8)
    assert drafter.propose([5], up_to(0)) == Draft()


def test_only_a_verified_comb_is_collected() -> None:
    drafter = LookaheadDrafter(window=1, n=2, guesses=2)
    draft = drafter.propose([5], up_to(9))
    drafter.observe(answered(draft, {0: 7}))
    drafter.observe(answered(draft, {0: 8}))  # the comb was collected before
    assert drafter.propose([5], up_to(1)).tokens == (7, 7)  # n-gram and comb
    drafter = LookaheadDrafter(window=1, n=2, guesses=2)
    drafter.propose([5], up_to(9))
    drafter.observe(Step(1, (0,), Draft(), Verdict((), 0, choices=((0,),)), 9, 0.0, 0.0, 0.0, 0.0))
    assert drafter.propose([5], up_to(9)).tokens == (5,)  # no n-gram
