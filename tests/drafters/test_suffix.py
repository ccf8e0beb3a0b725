"""Suffixes, lookups and the two together."""

import random
from collections.abc import Sequence

import pytest
import torch
from fakes.tiny_models import up_to
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specdemo.core.decode import DraftBudget, EmptyDrafter
from specdemo.core.step import Draft, Origin, Step, Verdict
from specdemo.drafters.suffix import HybridDrafter, LookupDrafter, PredictionDrafter, SuffixDrafter, SuffixStore

STEP = Step(1, (0,), Draft(), Verdict((), 0), 1, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 10])
def test_the_longest_suffix_in_any_text_is_continued_up_to_a_border(vocabulary: int) -> None:
    """Brute force over the texts that were added; tokens after a border are never drafted."""
    rng, store = random.Random(11), SuffixStore()
    texts: list[list[int]] = [[]]
    crossed = 0
    for _ in range(250):
        if rng.random() < 0.1:
            store.begin()
            texts.append([])
        texts[-1].append(rng.randrange(vocabulary))
        store.add(texts[-1][-1])
        earlier, text = texts[:-1], texts[-1]
        sizes = range(len(text), 0, -1)
        ends = (
            (size, end) for size in sizes for end in range(size, len(text)) if text[end - size : end] == text[-size:]
        )
        own_size, _ = next(ends, (0, 0))
        other_size = next((size for size in sizes if any(occurs(text[-size:], other) for other in earlier)), 0)
        assert store.matched == max(own_size, other_size)
        drafted = store.continuation(4)
        assert all(token >= 0 for token in drafted)
        if own_size > other_size:
            places = [end for end in occurrences(text[-own_size:], text) if end < len(text)]
            assert drafted and any((text + drafted)[end : end + 4] == drafted for end in places)
        elif other_size > own_size:
            crossed += 1
            longest = text[-other_size:]
            followers = [other[end:] for other in earlier for end in occurrences(longest, other)]
            assert any(drafted == follower[:4] for follower in followers)
    assert crossed > 20
    assert len(store) <= 2 * sum(map(len, texts)) + 2 * len(texts)


def occurrences(part: list[int], text: list[int]) -> list[int]:
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def occurs(part: list[int], text: list[int]) -> bool:
    return bool(occurrences(part, text))


def test_the_source_is_continued_and_drafts_start_after_its_border() -> None:
    drafter = SuffixDrafter(source=(1, 2, 3))
    assert drafter.propose([2], up_to(4)) == Draft.chain((3,), origin=(Origin("store", matched=1),))
    assert drafter.propose([2, 3], up_to(4)).tokens == ()  # the source ends
    draft = drafter.propose([2, 3, 9, 2], up_to(1))
    assert draft == Draft.chain((3,), origin=(Origin("text", 1, 1),))
    assert SuffixDrafter(source=(5,)).propose([5], up_to(4)) == Draft()  # a border after a single token, too
    bare = SuffixDrafter(source=(), store=SuffixStore())
    assert bare.propose([5, 6, 5], up_to(1)).origin == (Origin("text", 1, 1),)


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


class Fallback(EmptyDrafter):
    """Drafts zeros up to the budget and records the texts and steps."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.steps: list[Step] = []

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        self.texts.append(list(tokens))
        count = 0
        while budget.may_extend(count, None):
            count += 1
        return Draft.chain((0,) * count)

    def observe(self, step: Step) -> None:
        self.steps.append(step)


def test_hybrid_trusts_long_matches_only() -> None:
    fallback = Fallback()
    hybrid = HybridDrafter(SuffixDrafter(), fallback, trusted=3)
    assert hybrid.propose([1, 2, 3, 4, 1, 2], up_to(4)).tokens == (0, 0, 0, 0)
    assert hybrid.propose([1, 2, 3, 4, 1, 2, 3], up_to(4)).tokens == (4, 1, 2, 3)
    assert fallback.texts == [[1, 2, 3, 4, 1, 2]]
    hybrid.observe(STEP)
    assert fallback.steps == [STEP]
    suffixes_only = HybridDrafter(SuffixDrafter(), None)
    assert suffixes_only.propose([1, 2, 1], up_to(1)).tokens == (2,)


@pytest.mark.parametrize("length", [1, 3, 16, 17, 40])
def test_a_prediction_is_drafted_after_the_prompt(length: int) -> None:
    """The match is the end of the prompt, of which 16 tokens precede the prediction; drafts are twice as long."""
    prompt, answer, fallback = [*range(100, 100 + length)], [*range(1, 60)], Fallback()
    drafter = PredictionDrafter(prompt, answer, fallback, 2)
    draft = drafter.propose(prompt, up_to(50))
    if length == 1:  # a single matched token is not trusted
        assert draft.tokens == (0, 0) and fallback.texts == [prompt]
        return
    matched = min(length, 16)
    assert draft.tokens == tuple(answer[: 2 * matched]) and fallback.texts == []
    assert set(draft.origin) == {Origin("prediction", matched=matched)} and len(draft.origin) == len(draft)
    assert drafter.propose([*prompt, 1, 2, 99], up_to(5)).tokens == (0, 0)
    assert fallback.texts == [[*prompt, 1, 2, 99]]


@pytest.mark.parametrize("length", [3, 40])
def test_the_answer_may_return_to_the_prediction_or_repeat_itself(length: int) -> None:
    prompt, fallback = [*range(100, 100 + length)], Fallback()
    drafter = PredictionDrafter(prompt, [1, 2, 3, 4, 5], fallback, 2)
    answer = [*prompt, 1, 99, 3, 4]
    assert drafter.propose(answer, up_to(9)) == Draft.chain((5,), origin=(Origin("prediction", matched=2),))
    assert drafter.propose([*answer, 5], up_to(9)).tokens == (0, 0)  # the prediction ends
    repeated = [*answer, 5, 70, 71, 72, 70, 71]
    draft = drafter.propose(repeated, up_to(1))
    assert draft.tokens == (72,) and draft.origin == (Origin("text", len(answer) + 3, 2),)
    assert repeated[len(answer) + 3] == 72
    drafter.observe(STEP)
    assert fallback.steps == [STEP] and len(fallback.texts) == 1
