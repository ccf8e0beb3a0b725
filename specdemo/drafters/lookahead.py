"""Lookahead decoding: the target drafts during verification (2402.02057).

A draft is a spine with a guess per position, each with a tooth of later guesses. The target's token after a tooth is
the next guess there (Jacobi iteration) and completes an n-gram. N-grams that start with the last token are drafted, as
point masses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from specdemo.core.decode import DraftBudget
from specdemo.core.options import OptionSet, option, options
from specdemo.core.policies import Fixed
from specdemo.core.step import Draft, Origin, Step
from specdemo.drafters.method import BuildContext, Method

_POOL, _WINDOW = Origin("pool"), Origin("window")


class _Forest:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1


class LookaheadDrafter:
    """Guess `window` positions ahead; draft at most `guesses` n-grams of `n` tokens.

    The comb has depth `window + n - 2`; a smaller budget omits it, since its tokens may be accepted.
    """

    def __init__(self, window: int = 5, n: int = 4, guesses: int = 5, seed: int = 0) -> None:
        self._window, self._n = window, n
        self._guesses = guesses
        self._rng = random.Random(seed)
        self._levels: list[list[int]] = []  # [n - 1][window] guesses; level 0 is the spine
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}
        self._comb: list[list[int]] = []  # nodes of the last draft, [level][position]

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        depth = 0
        while depth < self._window + self._n and budget.may_extend(depth, None):
            depth += 1
        forest = _Forest()
        nodes: dict[tuple[int, int], int] = {}
        for guess in list(reversed(self._pool.get(tokens[-1], {})))[: self._guesses]:
            parent = -1
            for token in guess[:depth]:
                if (parent, token) not in nodes:
                    nodes[parent, token] = forest.add(token, parent)
                parent = nodes[parent, token]
        self._comb, pooled = [], len(forest.tokens)
        if depth >= self._window + self._n - 2:
            self._add_comb(forest, tokens)
        origin = (_POOL,) * pooled + (_WINDOW,) * (len(forest.tokens) - pooled)
        return Draft(tuple(forest.tokens), tuple(forest.parents), origin=origin)

    def _add_comb(self, forest: _Forest, tokens: Sequence[int]) -> None:
        if not self._levels:
            self._levels = [[self._rng.choice(tokens) for _ in range(self._window)] for _ in range(self._n - 1)]
        for level, row in enumerate(self._levels):
            nodes: list[int] = []
            for position, token in enumerate(row):
                parent = self._comb[-1][position] if level else (nodes[-1] if nodes else -1)
                nodes.append(forest.add(token, parent))
            self._comb.append(nodes)

    def observe(self, step: Step) -> None:
        if not self._comb or not step.draft.tokens or not step.verdict.choices:
            return
        last = [step.verdict.choices[node + 1][0] for node in self._comb[-1]]
        for position, end in enumerate(last):
            first, *rest = (row[position] for row in self._levels)
            continuations = self._pool.setdefault(first, {})
            continuations.pop((*rest, end), None)
            continuations[(*rest, end)] = None
            while len(continuations) > self._guesses:
                del continuations[next(iter(continuations))]
        self._levels = [*self._levels[1:], last]
        self._comb = []


@options("Lookahead")
class LookaheadOptions(OptionSet):
    """Options of lookahead decoding."""

    lookahead_window: int = option(
        5,
        "Window, positions",
        "positions ahead that lookahead guesses",
        bounds=(1, 32),
        slider=(1, 16, 1),
        limit="max_nodes",
        metavar="N",
    )
    lookahead_n: int = option(4, "Order n", "tokens of its n-grams", bounds=(2, 16), slider=(2, 8, 1), metavar="N")
    lookahead_guesses: int = option(
        5,
        "Drafted n-grams per step",
        "n-grams that it drafts per step",
        bounds=(1, 32),
        slider=(1, 16, 1),
        limit="max_nodes",
        metavar="N",
    )


def _build(context: BuildContext) -> LookaheadDrafter:
    chosen = context.options
    return LookaheadDrafter(chosen.lookahead_window, chosen.lookahead_n, chosen.lookahead_guesses, context.seed)


LOOKAHEAD = Method(
    name="lookahead",
    title="the target guesses further tokens in the pass that verifies",
    notes="""\
**Lookahead** makes the target guess ahead of itself. Each pass carries a window of guesses as a comb; its results are
the next guesses (Jacobi iteration), and frequent n-grams are drafted. The method is exact. It needs cheap additional
rows. Its acceptance rate is low because most guesses only fill the window.
*Fu et al. 2402.02057.*""",
    build=_build,
    options=(LookaheadOptions,),
    shape="forest",
    policy=lambda chosen: Fixed(chosen.lookahead_window + chosen.lookahead_n),  # the comb needs this depth
)
