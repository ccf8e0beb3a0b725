"""Suffixes, lookups and the two together."""

from __future__ import annotations

import random

import pytest
import torch
from fakes.tiny_models import up_to
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specdemo.core.decode import EmptyDrafter
from specdemo.core.origin import Origin
from specdemo.core.step import Draft, Step
from specdemo.drafters.hybrid import HybridDrafter
from specdemo.drafters.lookup import LookupDrafter
from specdemo.drafters.prediction import PredictedText, PredictionDrafter
from specdemo.drafters.suffix import SuffixDrafter, SuffixStore


def longest_match(text: list[int]) -> int:
    """Longest suffix with an earlier occurrence, by brute force."""
    return max(
        (
            size
            for size in range(len(text))
            if any(text[end - size : end] == text[len(text) - size :] for end in range(size, len(text)))
        ),
        default=0,
    )


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 10])
def test_the_longest_repeated_suffix_is_found(vocabulary: int) -> None:
    """Compare with brute force after every token; each draft must have followed an occurrence of that suffix."""
    rng = random.Random(vocabulary)
    text = [rng.randrange(vocabulary) for _ in range(120)]
    store = SuffixStore()
    for end in range(1, len(text) + 1):
        store.add(text[end - 1])
        seen = text[:end]
        assert store.matched == longest_match(seen)
        drafted = store.continuation(5)
        assert bool(drafted) == bool(store.matched)
        if drafted:
            ending = seen[end - store.matched :]
            places = [place for place in range(store.matched, end) if seen[place - store.matched : place] == ending]
            assert any((seen + drafted)[place : place + 5] == drafted for place in places)
    assert len(store) <= 2 * len(text)


def test_a_loop_is_drafted_periodically() -> None:
    assert SuffixDrafter().propose([1, 2, 3, 1, 2, 3, 1], up_to(9)).tokens == (2, 3, 1, 2, 3, 1, 2, 3)


def test_the_match_sets_the_length() -> None:
    assert SuffixDrafter(factor=1.0).propose([5, 6, 7, 8, 9, 1, 5, 6], up_to(9)).tokens == (7, 8)
    assert SuffixDrafter(factor=2.0).propose([5, 6, 7, 8, 9, 1, 5, 6], up_to(9)).tokens == (7, 8, 9, 1)
    assert SuffixDrafter(factor=2.0).propose([5, 6, 7, 8, 9, 1, 5, 6], up_to(1)).tokens == (7,)
    assert SuffixDrafter().propose([1, 2, 3], up_to(9)).tokens == ()


def test_the_latest_occurrence_wins() -> None:
    assert SuffixDrafter().propose([1, 2, 8, 1, 2, 9, 1, 2], up_to(1)).tokens == (9,)


def test_an_earlier_text_is_continued_but_matches_end_at_its_border() -> None:
    first = SuffixDrafter()
    first.propose([1, 2, 3, 4], up_to(4))
    second = SuffixDrafter(store=first.store)
    assert second.propose([9, 2, 3], up_to(4)).tokens == (4,)  # where the former text ended
    assert second.store.matched == 2


def test_tokens_may_be_added_singly_or_together() -> None:
    rng = random.Random(7)
    text = [rng.randrange(4) for _ in range(80)]
    grown = SuffixDrafter()
    for end in range(1, len(text) + 1):
        step_by_step = grown.propose(text[:end], up_to(6))
        assert step_by_step == SuffixDrafter().propose(text[:end], up_to(6))


def test_origins_point_to_the_copied_tokens() -> None:
    """A token copied from a periodic continuation originates in the text; positions of former texts are not given."""
    text = [5, 1, 2, 3, 1, 2]
    for drafter, matched in ((SuffixDrafter(), 2), (LookupDrafter(2), 2)):
        draft = drafter.propose(text, up_to(4))
        assert draft.tokens and [text[one.position] for one in draft.origin] == list(draft.tokens)
        assert {(one.source, one.matched) for one in draft.origin} == {("text", matched)}
    later = SuffixDrafter(store=SuffixDrafter().store)
    later.propose([1, 2, 3, 4], up_to(0))
    assert SuffixDrafter(store=later.store).propose([9, 2, 3], up_to(1)).origin == (Origin("store", matched=2),)


def test_lookup_equals_that_of_transformers() -> None:
    rng = random.Random(5)
    theirs = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=2, max_length=10_000)
    drafted = 0
    for _ in range(200):
        text = [rng.randrange(6) for _ in range(rng.randrange(2, 40))]
        expected = theirs.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
        found = LookupDrafter(2).propose(text, up_to(4)).tokens
        assert list(found) == expected, text
        drafted += len(found)
    assert drafted > 100


def test_hybrid_trusts_long_matches_only() -> None:
    class Model:
        asked = observed = 0

        def propose(self, tokens, budget) -> Draft:
            Model.asked += 1
            return Draft.chain((0,))

        def observe(self, step: Step) -> None:
            Model.observed += 1

    hybrid = HybridDrafter(SuffixDrafter(), Model(), trusted=3)
    assert hybrid.propose([1, 2, 3, 4, 1, 2], up_to(4)).tokens == (0,) and Model.asked == 1
    assert hybrid.propose([1, 2, 3, 4, 1, 2, 3], up_to(4)).tokens == (4, 1, 2, 3) and Model.asked == 1
    hybrid.observe(None)  # type: ignore[arg-type]
    assert Model.observed == 1


def test_the_store_of_a_prediction_includes_that_of_its_fallback() -> None:
    fallback, text = SuffixDrafter(source=range(100)), PredictedText((1, 2), (3, 4), 4)
    alone = PredictionDrafter(text, EmptyDrafter()).store_bytes
    assert PredictionDrafter(text, fallback).store_bytes == alone + fallback.store_bytes > fallback.store_bytes
