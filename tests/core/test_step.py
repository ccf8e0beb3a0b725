"""Paths in forests, and steps that end early."""

import os.path
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specdemo.core.explain import reason_of
from specdemo.core.link_stats import Source
from specdemo.core.step import Draft, Outcome, Step, TokenLogprob, TopTokens, Verdict, common_prefix
from specdemo.core.unread_draft import UnreadDraft

FOREST = Draft((5, 6, 5, 7, 8, 7, 9), (-1, -1, -1, 0, 2, 2, 5))


def random_forest(rng: random.Random) -> Draft:
    count = rng.randrange(1, 9)
    return Draft(tuple(rng.randrange(3) for _ in range(count)), tuple(rng.randrange(-1, i) for i in range(count)))


def text_of(draft: Draft, path: tuple[int, ...]) -> list[int]:
    return [draft.tokens[node] for node in path]


def test_follow_returns_the_longest_path_that_begins_the_text() -> None:
    """Against all paths of random forests, whose siblings often have equal tokens."""
    rng = random.Random(0)
    partial = 0
    for _ in range(300):
        draft, text = random_forest(rng), [rng.randrange(3) for _ in range(rng.randrange(5))]
        paths = [tuple(draft.path(node)) for node in range(-1, len(draft))]
        assert draft.node_depths == [len(path) for path in paths[1:]] and draft.depth == max(map(len, paths))
        matching = [path for path in paths if text_of(draft, path) == text[: len(path)]]
        followed = draft.follow(text)
        assert followed in matching and len(followed) == max(map(len, matching))
        partial += 0 < len(followed) < len(text)
    assert partial > 20


@pytest.mark.parametrize("kind", [tuple, list, str])
def test_common_prefix_is_that_of_a_scan(kind: type) -> None:
    rng = random.Random(1)
    for _ in range(300):
        pair = ["".join(rng.choice("ab") for _ in range(rng.randrange(7))) for _ in range(2)]
        assert common_prefix(*map(kind, pair)) == len(os.path.commonprefix(pair))


def step_of(draft: Draft, verdict: Verdict, tokens: tuple[int, ...]) -> Step:
    return Step(1, tokens, draft, verdict, 4, 0.5, 0.25, 0.125, t=1.0)


def test_a_cut_verdict_keeps_accepted_tokens_and_the_tests_up_to_their_depth() -> None:
    top = TopTokens(0.5, ((1, 0.5),))
    logprobs = tuple(TokenLogprob(-float(i)) for i in range(4))
    verdict = Verdict(
        (2, 5, 6),
        4,
        p=(0.1, 0.2, 0.3, None, 0.5, 0.6, 0.7),
        draw=(0.9, 0.8, 0.1, None, 0.7, 0.2, 0.3),
        beta=(0.4, 0.4, 0.4, None, 0.5, 0.5, 0.6),
        choices=((1,),) * 8,
        bound=(0.2, 0.3, 0.4, None, 0.5, 0.6, 0.7),
        token_top=top,
        logprobs=logprobs,
    )
    cut = verdict.cut(FOREST, 2)
    assert cut == replace(
        verdict,
        accepted=(2, 5),
        token=None,
        draw=(0.9, 0.8, 0.1, None, 0.7, 0.2, None),
        beta=(0.4, 0.4, 0.4, None, 0.5, 0.5, None),
        bound=(0.2, 0.3, 0.4, None, 0.5, 0.6, None),
        token_top=None,
        logprobs=logprobs[:2],
    )
    step = step_of(FOREST, verdict, (5, 7, 9, 4))
    assert step.cut(2) == step_of(FOREST, cut, (5, 7))
    assert step.cut(4) is step and step.cut(5) is step
    assert step.cut(3).verdict.token is None and step.cut(3).tokens == (5, 7, 9)


def test_a_cut_step_of_a_beam_search_has_no_pending_tokens() -> None:
    step = step_of(Draft(), Verdict((), None, committed=(1, 2, 3), pending=(4,)), (1, 2, 3))
    assert step.cut(2) == step_of(Draft(), Verdict((), None, committed=(1, 2)), (1, 2))
    accepted_first = Verdict((0, 1), 7, beta=(0.5, 0.5), committed=(5, 6))
    assert accepted_first.cut(Draft.chain((3, 4)), 3).target_tokens == (5,)


def test_outcomes_of_a_forest() -> None:
    verdict = Verdict((2, 5), 4, beta=(0.5, 0.5, 0.5, None, 0.5, 0.5, 0.5))
    step = step_of(FOREST, verdict, (5, 7, 4))
    outcomes = [step.outcome(node) for node in range(7)]
    rejected, accepted, ignored = Outcome.REJECTED, Outcome.ACCEPTED, Outcome.IGNORED
    assert outcomes == [rejected, rejected, accepted, ignored, rejected, accepted, rejected]
    assert step.outcome(None) is step.kind is Outcome.CORRECTION  # node 6 continues the path and was rejected
    assert [outcome.committed for outcome in outcomes] == [False, False, True, False, False, True, False]
    assert step.depths == ([1, 1, 1, 2, 2, 3], [1, 2]) and step.tested == 6 and step.accepted == 2
    alone = replace(step, verdict=replace(verdict, source=Source.ALONE))
    assert alone.outcome(2) is Outcome.UNVERIFIED and alone.outcome(0) is Outcome.REJECTED and alone.accepted == 0


class CountedParents(tuple[int, ...]):
    """Parents of a chain; counts the numbers that are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()


def test_steps_are_explained_in_linear_time() -> None:
    count = 1000
    parents = CountedParents(range(-1, count - 1))
    draft = Draft((0,) * count, parents)
    step = step_of(
        draft,
        Verdict((*range(count),), 0, p=(1.0,) * count, beta=(1.0,) * count, draw=(0.5,) * count, bound=(1.0,) * count),
        (0,) * (count + 1),
    )
    assert step.tested == count
    for node in range(count):
        reason_of(step, node, {"temperature": 1.0, "rule": "rejection", "method": "draft"})
    assert parents.read < 20 * count


def test_depths_of_a_chain_with_undisclosed_tokens() -> None:
    """An engine reports the accepted tokens only; the first of the others was rejected, unless the text ended."""
    draft, verdict = replace(Draft.chain((1, 2)), undisclosed=2), Verdict((0, 1), 9)
    assert step_of(draft, verdict, (1, 2, 9)).depths == ([1, 2, 3], [1, 2])
    assert step_of(draft, replace(verdict, token=None), (1, 2)).depths == ([1, 2], [1, 2])
    assert step_of(replace(draft, undisclosed=0), verdict, (1, 2, 9)).depths == ([1, 2], [1, 2])


def test_the_truth_of_an_unread_draft_does_not_wait_for_its_device() -> None:
    """Tensors that cannot be read stand for a device."""
    unreadable: Any = object()
    draft = UnreadDraft(unreadable, unreadable, unreadable, unreadable, unreadable, unreadable)
    assert draft
    draft.known = Draft()
    assert not draft
