"""Paths in forests, steps that end early, metrics of steps, and reasons of outcomes."""

import os.path
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specdemo.core.explain import Reason, explain, reason_of
from specdemo.core.metrics import Metrics, interval, ratio_interval
from specdemo.core.sampling import UnreadDraft
from specdemo.core.step import Draft, LinkStats, Outcome, Source, Step, TokenLogprob, TopTokens, Verdict, common_prefix

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


def test_steps_are_explained_in_linear_time() -> None:
    count, read = 1000, 0

    class CountedParents(tuple[int, ...]):
        """Parents of a chain; counts the numbers that are read."""

        def __getitem__(self, index: Any) -> Any:
            nonlocal read
            read += 1
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[int]:
            nonlocal read
            read += len(self)
            return super().__iter__()

    draft, ones = Draft((0,) * count, CountedParents(range(-1, count - 1))), (1.0,) * count
    verdict = Verdict((*range(count),), 0, p=ones, beta=ones, draw=(0.5,) * count, bound=ones)
    step = step_of(draft, verdict, (0,) * (count + 1))
    assert step.tested == count
    for node in range(count):
        reason_of(step, node, {"temperature": 1.0, "rule": "rejection", "method": "draft"})
    assert read < 20 * count


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


# --- metrics of steps -------------------------------------------------------------------------------------------------


def step(i: int, tokens: int, draft: Draft, verdict: Verdict, seconds: float | None = 0.0, t: float = 0.0) -> Step:
    """Drafting takes `seconds`, verification twice and the rest three times as long."""
    times = [None if seconds is None else seconds * part for part in (1, 2, 3)]
    return Step(i, (7,) * tokens, draft, verdict, 4, *times, t)


PREFILL = step(0, 1, Draft(), Verdict((), 7), 8.0, t=0.5)
CHAIN = step(1, 3, Draft.chain((1, 2, 3, 4)), Verdict((0, 1), 7, beta=(0.5, 1.0, 0.25, None)), 1.0, t=1.0)
TREE = step(  # 1 or 2, then 3 or 4 after 2; 4 is accepted after a test of 3
    2, 3, Draft((1, 2, 3, 4), (-1, -1, 1, 1)), Verdict((1, 3), 7, beta=(0.5, 0.5, 0.0, 1.0)), 2.0, t=2.5
)
PLAIN = step(3, 1, Draft(), Verdict((), 7), 4.0, t=3.0)


@pytest.mark.parametrize("unknown", ["draft_s", "verify_s", "host_s"])
def test_an_engine_without_durations_is_timed_between_its_tokens(unknown: str) -> None:
    done = Metrics.of([PREFILL, CHAIN, replace(TREE, **{unknown: None}), PLAIN])
    assert getattr(done, unknown) is None and (done.ttft_s, done.last_s) == (0.5, 3.0)
    assert done.decode_s == 2.5 and done.tokens_per_second == 7 / 2.5
    assert Metrics(draft_s=None, last_s=2.0).decode_s == 2.0


def linked(source: Source, **measures: float) -> Step:
    verdict = Verdict((), 7, source=source, link=LinkStats(**measures))  # type: ignore[arg-type]
    return step(1, 1, Draft(), verdict)


def test_measures_of_a_link_are_totals_and_shares_of_steps() -> None:
    steps = [
        linked(Source.TARGET, cloud_s=0.5, hard_ratio=0.5),
        linked(Source.PROVISIONAL, cloud_s=0.25, sent=2),
        PLAIN,
        linked(Source.GATE, hard_ratio=0.25),
    ]
    metrics = Metrics.of(steps)
    assert metrics.remote == {"escalated": 2.0, "provisional": 1.0, "cloud_s": 0.75, "sent": 2.0, "hard_ratio": 0.75}
    assert metrics.as_dict()["remote"] == {
        "escalated": 2.0, "provisional": 1.0, "cloud_s": 0.75, "sent": 2.0,
        "cloud_call_share": 2 / 4, "provisional_share": 1 / 4, "mean_hard_ratio": 0.75 / 4,
    }  # fmt: skip
    assert Metrics.of([linked(Source.TARGET)]).as_dict()["remote"] == {"escalated": 1.0, "cloud_call_share": 1.0}


def test_the_bootstrap_interval_of_a_median_follows_from_the_binomial_distribution() -> None:
    """The median of 11 draws is at most the k-th value if 6 draws are: 0.8 % for k = 2, and 5.3 % for k = 3."""
    values = [*map(float, range(1, 12))]
    assert interval(values) == (3.0, 9.0)


def test_the_bootstrap_interval_of_totals_weighs_pairs_by_their_size() -> None:
    """Of 20 pairs k are (20, 10), others (1, 1): (20 k + 20 - k) / (10 k + 20 - k), with k from 6 to 14 at 95 %."""
    pairs = [(1.0, 1.0), (20.0, 10.0)] * 10
    ratios = [(20 + 19 * k) / (20 + 9 * k) for k in range(21)]
    low, high = ratio_interval(pairs)
    assert low in ratios[5:8] and high in ratios[13:16]
    assert ratio_interval([(3.0, 2.0)] * 4) == (1.5, 1.5)


# --- reasons of outcomes, from verdicts by hand -----------------------------------------------------------------------


SAMPLED = {"method": "draft", "temperature": 0.7, "rule": "rejection"}
GREEDY = SAMPLED | {"temperature": 0}
DRAFTED = Draft.chain((1, 2, 3), (0.5, 0.25, 0.125))
SIBLINGS = Draft((1, 2, 3), (-1, -1, 1), (0.5, 0.5, 0.5))  # 1 or 2, and 3 after 2
FIRST = Verdict(  # the first token is accepted, the second is rejected
    (0,), 9, p=(0.25, 0.0625, 0.5), draw=(0.125, 0.75, None), beta=(0.5, 0.5, None), bound=(0.5, 0.25, None)
)
SECOND = replace(FIRST, accepted=(1,), draw=(0.75, 0.125, None), bound=(0.5, 0.75, None))


def rule(name: str, temperature: float = 0.7) -> dict[str, Any]:
    return SAMPLED | {"rule": name, "temperature": temperature}


def decided(draft: Draft = DRAFTED, verdict: Verdict = FIRST, **changes: Any) -> Step:
    return Step(1, (1, 9), draft, replace(verdict, **changes), 3, 0.0, 0.0, 0.0, 0.0)


def unknown(draft: Draft = DRAFTED, **changes: Any) -> Step:
    """Step without a test of its tokens."""
    nothing = (None,) * len(draft)
    return decided(draft, **{"p": nothing, "draw": nothing, "beta": nothing, "bound": nothing} | changes)


TOPS = tuple(TopTokens(1.0, ((token, 0.5), (8, 0.25), (token + 1, 0.125))) for token in (1, 1, 4, 9))
RANKED = {"rank": (1, 4, 3), "target_top": TOPS}
BLOCK = {"draw": (0.75, 0.125, 0.75), "beta": (0.5,) * 3, "bound": (0.5, 0.25, 0.25), "accepted": (0, 1)}


@pytest.mark.parametrize(
    ("done", "recipe", "reasons"),  # of the first, second and third draft token
    [
        (decided(), SAMPLED, (Reason.BELOW, Reason.ABOVE, Reason.NOT_TESTED)),
        (decided(bound=(1, 0, None)), SAMPLED, (Reason.CERTAIN, Reason.IMPOSSIBLE, Reason.NOT_TESTED)),
        (decided(bound=()), SAMPLED, (Reason.BELOW, Reason.ABOVE, Reason.NOT_TESTED)),
        (decided(draw=(None,) * 3), SAMPLED, (Reason.RULE_ACCEPTED, Reason.RULE_REJECTED, Reason.NOT_TESTED)),
        (decided(), rule("match"), (Reason.MATCHED, Reason.MISMATCHED, Reason.NOT_TESTED)),
        (decided(), rule("coupled"), (Reason.COUPLED, Reason.DECOUPLED, Reason.NOT_TESTED)),
        (decided(), GREEDY, (Reason.TOP, Reason.NOT_TOP, Reason.NOT_TESTED)),
        (decided(**RANKED), rule("top1"), (Reason.TOP, Reason.NOT_TOP_RANKED, Reason.NOT_TESTED)),
        (
            decided(accepted=(), beta=(0.5,) * 3, p=(0.0,) * 3, **RANKED),  # 3 is not among the top tokens
            GREEDY,
            (Reason.NOT_TOP_RANKED, Reason.NOT_TOP_RANKED, Reason.NOT_TOP),
        ),
        (decided(), rule("lenient"), (Reason.LENIENT_BELOW, Reason.LENIENT_ABOVE, Reason.NOT_TESTED)),
        (decided(), rule("lenient", 0), (Reason.LENIENT_NEAR, Reason.LENIENT_FAR, Reason.NOT_TESTED)),
        (decided(p=(1.0, 0.5, None)), rule("lenient", 0), (Reason.TOP, Reason.LENIENT_FAR, Reason.LATE_REJECTED)),
        (decided(**BLOCK), rule("block"), (Reason.BLOCK_RESCUED, Reason.BLOCK_ACCEPTED, Reason.BLOCK_REJECTED)),
        (
            decided(**BLOCK | {"draw": (None, 0.25, 0.75)}),  # not below an equal bound
            rule("block"),
            (Reason.BLOCK_RESCUED, Reason.BLOCK_RESCUED, Reason.BLOCK_REJECTED),
        ),
        (decided(SIBLINGS), SAMPLED, (Reason.BELOW, Reason.SIBLING_REJECTED, Reason.NOT_TESTED)),
        (decided(SIBLINGS, SECOND), SAMPLED, (Reason.ABOVE, Reason.SIBLING_ACCEPTED, Reason.AFTER_END)),
        (
            decided(SIBLINGS, SECOND, beta=(None, 0.5, None)),
            SAMPLED,
            (Reason.NOT_NEEDED, Reason.BELOW, Reason.AFTER_END),
        ),
        (unknown(), SAMPLED, (Reason.LATE_ACCEPTED, Reason.LATE_REJECTED, Reason.LATE_REJECTED)),
        (decided(beta=(None,) * 3, accepted=()), SAMPLED, (Reason.AFTER_END,) * 3),
        *(
            (unknown(source=source), SAMPLED, (reason, Reason.DROPPED, Reason.DROPPED))
            for source, reason in (
                (Source.PROVISIONAL, Reason.PROVISIONAL),
                (Source.GATE, Reason.GATE),
                (Source.ALONE, Reason.ALONE),
            )
        ),
        (unknown(replace(DRAFTED, undisclosed=0), accepted=(0, 1, 2)), SAMPLED, (Reason.REPORTED_ACCEPTED,) * 3),
    ],
)
def test_reasons_of_draft_tokens(done: Step, recipe: dict[str, Any], reasons: tuple[Reason, ...]) -> None:
    assert tuple(reason_of(done, node, recipe) for node in range(3)) == reasons


@pytest.mark.parametrize(
    ("done", "recipe", "reason"),
    [
        (decided(), SAMPLED, Reason.RESIDUAL),
        (decided(SIBLINGS, accepted=()), SAMPLED, Reason.SIBLINGS_RESIDUAL),
        (decided(), GREEDY, Reason.CORRECTION),
        (decided(), SAMPLED | {"skip_sample_adjustment": True}, Reason.CORRECTION),
        (decided(), rule("block"), Reason.BLOCK_RESIDUAL),
        (decided(), rule("lenient"), Reason.LENIENT_RESIDUAL),
        (decided(accepted=(0, 1, 2)), SAMPLED, Reason.BONUS),
        (decided(Draft(), Verdict((), 9)), SAMPLED, Reason.PLAIN),
        (decided(Draft(), Verdict((), None)), SAMPLED, Reason.SEARCHED),
        (unknown(replace(DRAFTED, undisclosed=1), accepted=(0, 1, 2)), SAMPLED, Reason.CORRECTION),
        (unknown(source=Source.UNREPORTED), SAMPLED, Reason.UNREPORTED),
        (unknown(source=Source.GATE), SAMPLED, Reason.GATE),
        (decided(), SAMPLED | {"cloud": {"mode": "edge_only"}}, Reason.EDGE_ONLY),
        (unknown(source=Source.ALONE), SAMPLED | {"cloud": {"mode": "edge_only"}}, Reason.EDGE_ONLY),
    ],
)
def test_reasons_of_the_token_of_the_target(done: Step, recipe: dict[str, Any], reason: Reason) -> None:
    assert reason_of(done, None, recipe) is reason
    assert explain(done, None, recipe) == reason.value
