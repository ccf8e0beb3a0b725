"""Lookahead decoding: shape of the comb, collected n-grams, and unchanged text."""

from __future__ import annotations

import pytest
from fakes.tiny_models import committed, run, tiny_model, up_to

from specdemo.core.decode import EmptyDrafter
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Step, Verdict
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.lookahead import LookaheadDrafter
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel


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


def test_near_the_end_only_guesses_that_fit_are_drafted() -> None:
    drafter = LookaheadDrafter(window=3, n=3, guesses=2)
    drafter.observe(answered(drafter.propose([5], up_to(9)), {5: 9}))
    draft = drafter.propose([5], up_to(1))
    assert draft.tokens == (5,) and draft.parents == (-1,)
    drafter.observe(answered(draft, {}))  # no comb in the draft, so no n-grams to collect
    assert not LookaheadDrafter().propose([5], up_to(0)).tokens


def test_a_step_without_target_choices_collects_nothing() -> None:
    drafter = LookaheadDrafter(window=3, n=3, guesses=2)
    comb = drafter.propose([5], up_to(9))
    unverified = Verdict((0,), None, beta=(None,) * len(comb))
    drafter.observe(Step(1, (5,), comb, unverified, 9, draft_s=0, verify_s=0, host_s=0, t=0))
    assert drafter.propose([5], up_to(9)).tokens == comb.tokens


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 4, 5), (2, 2, 1), (1, 5, 3)])
def test_greedy_text_is_unchanged_and_guesses_are_accepted(shape: tuple[int, int, int]) -> None:
    model = LlamaWeights(tiny_model("llama"))
    greedy, noise = SamplingParams(temperature=0), Noise(0, "unused when greedy")
    accepted = 0
    for start in range(10):
        prompt = [start, 3, 2 * start]

        def steps(drafter: object, prompt: list[int] = prompt) -> list[Step]:
            verifier = ModelVerifier(CachedModel(model).score, greedy, rejection, noise, noise)
            return run(prompt, verifier, drafter, Fixed(shape[0] + shape[1]), 50)  # type: ignore[arg-type]

        ours = steps(LookaheadDrafter(*shape))
        assert committed(ours) == committed(steps(EmptyDrafter()))
        accepted += sum(len(step.verdict.accepted) for step in ours)
    assert accepted > 0
