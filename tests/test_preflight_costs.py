"""Cost measurement on a fake machine with known costs."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from specdemo.core.step import Draft
from specdemo.preflight import measure_costs

TEXT = tuple(range(100, 200))


@dataclass
class Machine:
    """AR pass 1, each further row 0.25, draft token 0.5, prefill 50.

    The two passes after a draft cost 0.1 more, since the drafter has evicted the target's weights from the CPU cache.
    """

    correct: int  # draft tokens that agree with the text
    available: int = 99  # maximum number of draft tokens
    now: float = 0.0
    cold: int = 0  # remaining passes with cold caches
    cached: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of each pass

    def propose(self, tokens: Any, budget: Any) -> Draft:
        count = 0
        while count < self.available and budget.may_extend(count, None):
            count += 1
        self.now += 0.5 * count
        self.cold = 2 if count else self.cold
        after = TEXT[len(tokens) : len(tokens) + self.correct]
        return Draft.chain((*after, *(0,) * count)[:count])

    def verify(self, tokens: Any, draft: Draft) -> None:
        scored = [*tokens, *draft.tokens]
        shared = 0
        while shared < min(len(self.cached), len(tokens)) and self.cached[shared] == tokens[shared]:
            shared += 1
        self.rows.append(len(scored) - shared)
        self.now += 50.0 if not self.cached else 0.75 + 0.25 * (len(scored) - shared) + 0.1 * (self.cold > 0)
        self.cold -= 1
        self.cached = scored


def pipeline_of(machine: Machine) -> Any:
    return nullcontext(
        SimpleNamespace(drafter=machine, verifier=machine, target_cache=SimpleNamespace(vocab_size=1000))
    )


@pytest.mark.parametrize("correct", [0, 2, 9])
@pytest.mark.parametrize("available", [0, 2, 99])
def test_known_costs_are_measured(correct: int, available: int) -> None:
    machine = Machine(correct, available)

    def pipeline() -> Any:
        machine.cached = []
        return pipeline_of(machine)

    costs = measure_costs(pipeline, [(TEXT, 5), (TEXT[:8], 5)], 4, repeats=7, clock=lambda: machine.now)
    assert costs.ar_s == 1.0 and costs.c == pytest.approx(0.5 if available else 0.0)
    cold = 0.1 if available else 0.0  # AR steps are measured with warm caches
    assert costs.v == pytest.approx([1.0, 1.25 + cold, 1.5 + cold, 1.75 + cold, 2.0 + cold])
    assert len(machine.rows) > 5 * 7
