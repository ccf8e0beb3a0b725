"""Lookahead decoding: shape of the comb, collected n-grams, and unchanged text."""

import pytest
from fakes.tiny_models import up_to

from specdemo.core.step import Draft, Step, Verdict
from specdemo.drafters.lookahead import LookaheadDrafter


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
