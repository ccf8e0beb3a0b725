"""What a round costs: found again where it is known, on whatever the drafts are worth."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from specdemo.core.step import Draft
from specdemo.preflight import BASELINE_RUNS, StepCosts, measure_costs, prompt_cost

TEXT = tuple(range(100, 200))


@dataclass
class Machine:
    """Costs that are known: a plain pass 1, every row more 0.25, a drafted token 0.5; reading a prompt takes long.

    The pass after a draft, and the one after that, cost 0.1 more: the drafter's weights have pushed the target's out.
    """

    right: int  # drafted tokens that the text confirms
    most: int = 99  # tokens that there ever are to propose
    now: float = 0.0
    cold: int = 0  # passes that will find the caches full of something else
    held: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)  # rows of each pass

    def propose(self, tokens: Any, budget: Any) -> Draft:
        count = 0
        while count < self.most and budget.may_extend(count, None):
            count += 1
        self.now += 0.5 * count
        self.cold = 2 if count else self.cold
        after = TEXT[len(tokens) : len(tokens) + self.right]
        return Draft.chain((*after, *(0,) * count)[:count])

    def verify(self, tokens: Any, draft: Draft) -> None:
        whole = [*tokens, *draft.tokens]
        shared = 0
        while shared < min(len(self.held), len(tokens)) and self.held[shared] == tokens[shared]:
            shared += 1
        self.fed.append(len(whole) - shared)
        self.now += 50.0 if not self.held else 0.75 + 0.25 * (len(whole) - shared) + 0.1 * (self.cold > 0)
        self.cold -= 1
        self.held = whole


@pytest.mark.parametrize("right", [0, 2, 9])
@pytest.mark.parametrize("most", [0, 2, 99])
def test_known_costs_are_found_again(right: int, most: int) -> None:
    machine = Machine(right, most)

    def pipeline() -> Any:
        machine.held = []
        return SimpleNamespace(drafter=machine, verifier=machine, caches=(SimpleNamespace(vocab_size=1000),))

    found = measure_costs(pipeline, [(TEXT, 5), (TEXT[:8], 5)], 4, rounds=7, clock=lambda: machine.now)
    assert found.plain_s == 1.0 and found.c == pytest.approx(0.5 if most else 0.0)
    cold = 0.1 if most else 0.0  # plain decoding never is
    assert found.v == pytest.approx([1.0, 1.25 + cold, 1.5 + cold, 1.75 + cold, 2.0 + cold])
    assert len(machine.fed) > 5 * 7


def test_each_pass_is_fed_its_draft_and_one_token_more() -> None:
    """Whatever was right is held, as it is in decoding; the prompt is read before anything is timed."""
    machine = Machine(1)
    measure_costs(
        lambda: SimpleNamespace(drafter=machine, verifier=machine, caches=(SimpleNamespace(vocab_size=1000),)),
        [(TEXT, 5)],
        2,
        rounds=3,
        clock=lambda: machine.now,
    )
    assert machine.fed[0] == 5 and machine.fed[1:] == [*[1] * BASELINE_RUNS, 2, 3] * 3


def test_reading_a_prompt_is_what_the_first_draft_takes_beyond_its_tokens() -> None:
    machine = Machine(0)
    pipeline: Any = SimpleNamespace(drafter=SimpleNamespace(propose=lambda tokens, more: machine.propose(tokens, more)))
    assert prompt_cost(pipeline, (TEXT, 5), StepCosts(1.0, 0.2, ()), clock=lambda: machine.now) == pytest.approx(0.3)
    assert prompt_cost(pipeline, (TEXT, 5), StepCosts(1.0, 0.9, ()), clock=lambda: machine.now) == 0.0
