"""Reasons of outcomes from hand-written verdicts."""

from dataclasses import replace
from typing import Any

import pytest

from specdemo.core.explain import Reason, explain, reason_of
from specdemo.core.step import Draft, Source, Step, TopTokens, Verdict

SAMPLED = {"method": "draft", "temperature": 0.7, "rule": "rejection"}
GREEDY = SAMPLED | {"temperature": 0}
CHAIN = Draft.chain((1, 2, 3), (0.5, 0.25, 0.125))
SIBLINGS = Draft((1, 2, 3), (-1, -1, 1), (0.5, 0.5, 0.5))  # 1 or 2, and 3 after 2
FIRST = Verdict(  # the first token is accepted, the second is rejected
    (0,), 9, p=(0.25, 0.0625, 0.5), draw=(0.125, 0.75, None), beta=(0.5, 0.5, None), bound=(0.5, 0.25, None)
)
SECOND = replace(FIRST, accepted=(1,), draw=(0.75, 0.125, None), bound=(0.5, 0.75, None))


def rule(name: str, temperature: float = 0.7) -> dict[str, Any]:
    return SAMPLED | {"rule": name, "temperature": temperature}


def step(draft: Draft = CHAIN, verdict: Verdict = FIRST, **changes: Any) -> Step:
    return Step(1, (1, 9), draft, replace(verdict, **changes), 3, 0.0, 0.0, 0.0, 0.0)


def unknown(draft: Draft = CHAIN, **changes: Any) -> Step:
    """Step without a test of its tokens."""
    nothing = (None,) * len(draft)
    return step(draft, **{"p": nothing, "draw": nothing, "beta": nothing, "bound": nothing} | changes)


TOPS = tuple(TopTokens(1.0, ((token, 0.5), (8, 0.25), (token + 1, 0.125))) for token in (1, 1, 4, 9))
RANKED = {"rank": (1, 4, 3), "target_top": TOPS}
BLOCK = {"draw": (0.75, 0.125, 0.75), "beta": (0.5,) * 3, "bound": (0.5, 0.25, 0.25), "accepted": (0, 1)}


@pytest.mark.parametrize(
    ("done", "recipe", "reasons"),  # of the first, second and third draft token
    [
        (step(), SAMPLED, (Reason.BELOW, Reason.ABOVE, Reason.NOT_TESTED)),
        (step(bound=(1, 0, None)), SAMPLED, (Reason.CERTAIN, Reason.IMPOSSIBLE, Reason.NOT_TESTED)),
        (step(bound=()), SAMPLED, (Reason.BELOW, Reason.ABOVE, Reason.NOT_TESTED)),
        (step(draw=(None,) * 3), SAMPLED, (Reason.RULE_ACCEPTED, Reason.RULE_REJECTED, Reason.NOT_TESTED)),
        (step(), rule("match"), (Reason.MATCHED, Reason.MISMATCHED, Reason.NOT_TESTED)),
        (step(), rule("coupled"), (Reason.COUPLED, Reason.DECOUPLED, Reason.NOT_TESTED)),
        (step(), GREEDY, (Reason.TOP, Reason.NOT_TOP, Reason.NOT_TESTED)),
        (step(**RANKED), rule("top1"), (Reason.TOP, Reason.NOT_TOP_RANKED, Reason.NOT_TESTED)),
        (
            step(accepted=(), beta=(0.5,) * 3, p=(0.0,) * 3, **RANKED),  # 3 is not among the top tokens
            GREEDY,
            (Reason.NOT_TOP_RANKED, Reason.NOT_TOP_RANKED, Reason.NOT_TOP),
        ),
        (step(), rule("lenient"), (Reason.LENIENT_BELOW, Reason.LENIENT_ABOVE, Reason.NOT_TESTED)),
        (step(), rule("lenient", 0), (Reason.LENIENT_NEAR, Reason.LENIENT_FAR, Reason.NOT_TESTED)),
        (step(p=(1.0, 0.5, None)), rule("lenient", 0), (Reason.TOP, Reason.LENIENT_FAR, Reason.LATE_REJECTED)),
        (step(**BLOCK), rule("block"), (Reason.BLOCK_RESCUED, Reason.BLOCK_ACCEPTED, Reason.BLOCK_REJECTED)),
        (
            step(**BLOCK | {"draw": (None, 0.25, 0.75)}),  # not below an equal bound
            rule("block"),
            (Reason.BLOCK_RESCUED, Reason.BLOCK_RESCUED, Reason.BLOCK_REJECTED),
        ),
        (step(SIBLINGS), SAMPLED, (Reason.BELOW, Reason.SIBLING_REJECTED, Reason.NOT_TESTED)),
        (step(SIBLINGS, SECOND), SAMPLED, (Reason.ABOVE, Reason.SIBLING_ACCEPTED, Reason.AFTER_END)),
        (
            step(SIBLINGS, SECOND, beta=(None, 0.5, None)),
            SAMPLED,
            (Reason.NOT_NEEDED, Reason.BELOW, Reason.AFTER_END),
        ),
        (unknown(), SAMPLED, (Reason.LATE_ACCEPTED, Reason.LATE_REJECTED, Reason.LATE_REJECTED)),
        (step(beta=(None,) * 3, accepted=()), SAMPLED, (Reason.AFTER_END,) * 3),
        *(
            (unknown(source=source), SAMPLED, (reason, Reason.DROPPED, Reason.DROPPED))
            for source, reason in (
                (Source.PROVISIONAL, Reason.PROVISIONAL),
                (Source.GATE, Reason.GATE),
                (Source.ALONE, Reason.ALONE),
            )
        ),
        (unknown(replace(CHAIN, undisclosed=0), accepted=(0, 1, 2)), SAMPLED, (Reason.REPORTED_ACCEPTED,) * 3),
    ],
)
def test_reasons_of_draft_tokens(done: Step, recipe: dict[str, Any], reasons: tuple[Reason, ...]) -> None:
    assert tuple(reason_of(done, node, recipe) for node in range(3)) == reasons


@pytest.mark.parametrize(
    ("done", "recipe", "reason"),
    [
        (step(), SAMPLED, Reason.RESIDUAL),
        (step(SIBLINGS, accepted=()), SAMPLED, Reason.SIBLINGS_RESIDUAL),
        (step(), GREEDY, Reason.CORRECTION),
        (step(), SAMPLED | {"skip_sample_adjustment": True}, Reason.CORRECTION),
        (step(), rule("block"), Reason.BLOCK_RESIDUAL),
        (step(), rule("lenient"), Reason.LENIENT_RESIDUAL),
        (step(accepted=(0, 1, 2)), SAMPLED, Reason.BONUS),
        (step(Draft(), Verdict((), 9)), SAMPLED, Reason.PLAIN),
        (step(Draft(), Verdict((), None)), SAMPLED, Reason.SEARCHED),
        (unknown(replace(CHAIN, undisclosed=1), accepted=(0, 1, 2)), SAMPLED, Reason.CORRECTION),
        (unknown(source=Source.UNREPORTED), SAMPLED, Reason.UNREPORTED),
        (unknown(source=Source.GATE), SAMPLED, Reason.GATE),
        (step(), SAMPLED | {"cloud": {"mode": "edge_only"}}, Reason.EDGE_ONLY),
        (unknown(source=Source.ALONE), SAMPLED | {"cloud": {"mode": "edge_only"}}, Reason.EDGE_ONLY),
    ],
)
def test_reasons_of_the_token_of_the_target(done: Step, recipe: dict[str, Any], reason: Reason) -> None:
    assert reason_of(done, None, recipe) is reason
    assert explain(done, None, recipe) == reason.value
