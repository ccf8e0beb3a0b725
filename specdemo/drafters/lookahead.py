"""Lookahead: the target guesses ahead of itself in the same pass that verifies (2402.02057).

A window of guesses rides along in every pass as a comb-shaped forest: a spine of one guess per place, and on each place
of the spine a tooth of the guesses that earlier passes made after it. What the target makes of a tooth's end is the
next guess there (a Jacobi step), and a whole tooth with its end is an n-gram worth keeping. N-grams that begin with
the text's last token are what is really drafted. All are point masses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from specdemo.core.decode import DraftBudget
from specdemo.core.options import option, options
from specdemo.core.policies import Fixed
from specdemo.core.step import Draft, Step
from specdemo.drafters.method import BuildContext, Method


class LookaheadDrafter:
    """`window` places ahead, n-grams of `n` tokens, at most `guesses` of them drafted.

    `budget` limits how deep a guess may reach; the window is as deep as `window + n - 2` and only where that is allowed
    too, since a comb that happens to be right is accepted like any draft.
    """

    def __init__(self, window: int = 5, n: int = 4, guesses: int = 5, seed: int = 0) -> None:
        self._window, self._n, self._guesses = window, n, guesses
        self._rng = random.Random(seed)
        self._levels: list[list[int]] = []  # n - 1 rows of `window` guesses; row 0 is the spine
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}  # by first token, what followed: the latest last
        self._comb: list[list[int]] = []  # nodes of the last draft, by level and place

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """Guesses from the pool as branches, then the comb."""
        deepest = 0
        while deepest < self._window + self._n and budget.may_extend(deepest, None):
            deepest += 1
        drafted: list[int] = []
        parents: list[int] = []

        def add(token: int, parent: int) -> int:
            drafted.append(token)
            parents.append(parent)
            return len(drafted) - 1

        grown: dict[tuple[int, int], int] = {}  # (parent, token): guesses share their beginnings
        for guess in list(reversed(self._pool.get(tokens[-1], {})))[: self._guesses]:
            parent = -1
            for token in guess[:deepest]:
                if (parent, token) not in grown:
                    grown[parent, token] = add(token, parent)
                parent = grown[parent, token]
        self._comb = []
        if deepest >= self._window + self._n - 2:
            if not self._levels:
                self._levels = [[self._rng.choice(tokens) for _ in range(self._window)] for _ in range(self._n - 1)]
            for level, row in enumerate(self._levels):
                nodes: list[int] = []
                for place, token in enumerate(row):
                    below = self._comb[-1][place] if level else (nodes[-1] if nodes else -1)
                    nodes.append(add(token, below))
                self._comb.append(nodes)
        return Draft(tuple(drafted), tuple(parents))

    def observe(self, step: Step) -> None:
        """Read what the target made of the comb: new guesses, and n-grams for the pool."""
        if not self._comb or not step.draft.tokens:
            return
        last = [step.verdict.choices[node + 1][0] for node in self._comb[-1]]
        for place, end in enumerate(last):
            first, *rest = (row[place] for row in self._levels)
            after = self._pool.setdefault(first, {})
            after.pop((*rest, end), None)
            after[(*rest, end)] = None
            while len(after) > self._guesses:
                del after[next(iter(after))]
        self._levels = [*self._levels[1:], last]
        self._comb = []


@options("Lookahead")
class LookaheadOptions:
    """Options of lookahead decoding."""

    lookahead_window: int = option(
        5,
        "Window, positions",
        "positions ahead that lookahead guesses",
        low=1,
        high=32,
        slider=(1, 16, 1),
        limit="max_nodes",
        metavar="N",
    )
    lookahead_n: int = option(4, "Order n", "tokens of its n-grams", low=2, high=16, slider=(2, 8, 1), metavar="N")
    lookahead_guesses: int = option(
        5,
        "Drafted n-grams per step",
        "n-grams that it drafts per step",
        low=1,
        high=32,
        slider=(1, 16, 1),
        limit="max_nodes",
        metavar="N",
    )


def _build(context: BuildContext) -> LookaheadDrafter:
    chosen = context.options
    return LookaheadDrafter(chosen.lookahead_window, chosen.lookahead_n, chosen.lookahead_guesses, context.seed)


METHOD = Method(
    name="lookahead",
    title="the target guesses further tokens in the pass that verifies",
    notes="""\
**Lookahead** makes the target guess ahead of itself. Each pass carries a window of guesses as a comb; its results are
the next guesses (Jacobi iteration), and frequent n-grams are drafted. Drafts are point masses, so the method is exact.
It needs cheap additional rows. Its acceptance rate is low because most guesses only fill the window.
*Fu et al. 2402.02057.*""",
    build=_build,
    options=(LookaheadOptions,),
    shape="forest",
    policy=lambda chosen: Fixed(chosen.lookahead_window + chosen.lookahead_n),  # the comb needs this depth
)
