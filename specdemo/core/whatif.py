"""What other draft lengths would have given on a text that was decoded once.

Every tested position of a run has its beta = sum min(p, q), the chance that a drafted token is accepted there
(Leviathan et al. 2211.17192, Definition 3.3), and it depends on the tokens before it alone. So the rounds of any other
gamma can be followed through the same text. Knows steps and numbers; no text, no models.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specdemo.core.step import Step


def chances(steps: Iterable[Step]) -> list[float]:
    """For each token committed after the prefill, the chance that a draft of it is accepted.

    Where nothing was tested (a bonus, a plain token) it is taken for the mean of the others. Empty if nothing was
    tested at all. Raises `ValueError` for a draft that is no chain: its betas do not stand one behind the other.
    """
    found: list[float | None] = []
    for step in steps:
        if step.i == 0:
            continue
        if not step.draft.is_chain:
            raise ValueError("the drafts are no chains")
        tested = [beta for beta in step.verdict.beta if beta is not None]
        found += [*tested, *[None] * len(step.tokens)][: len(step.tokens)]
    known = [beta for beta in found if beta is not None]
    if not known:
        return []
    usual = statistics.fmean(known)
    return [usual if beta is None else beta for beta in found]


def rounds(chance: Sequence[float], gamma: int) -> float:
    """How many rounds drafts of `gamma` are expected to take for a text with these chances.

    A round that starts at a token commits the drafts that are accepted and one token of the target's own. Followed
    from every token at which a round may start, weighted by how likely it starts there.
    """
    starts = [1.0, *[0.0] * (len(chance) + gamma)]
    for place in range(len(chance)):
        path = starts[place]
        for depth in range(gamma):
            if place + depth >= len(chance):
                break
            beta = chance[place + depth]
            starts[place + depth + 1] += path * (1 - beta)
            path *= beta
        else:
            depth = gamma
        starts[place + depth + 1] += path
    return sum(starts[: len(chance)])


@dataclass(frozen=True)
class Other:
    """One draft length: what it would have given."""

    gamma: int
    tokens_per_pass: float
    tokens_per_second: float


def other_gammas(steps: Sequence[Step], gammas: Iterable[int], pass_cost: Callable[[float], float]) -> list[Other]:
    """Tokens per pass and per second for each of `gammas` (0: plain decoding) on the text of `steps`.

    `pass_cost(rows)` is v, a pass over so many rows in plain steps; only its shape counts: it is scaled to what this
    run's own passes took, as are drafting and the rest of a round.
    """
    chance, after = chances(steps), [step for step in steps if step.i > 0]
    drafted = sum(len(step.draft) for step in after)
    if not chance or not drafted:
        return []
    verify = sum(step.verify_s for step in after) / sum(pass_cost(len(step.draft) + 1) for step in after)
    draft = sum(step.draft_s for step in after) / drafted
    host = sum(step.host_s for step in after) / len(after)
    found = []
    for gamma in gammas:
        count = rounds(chance, gamma)
        seconds = count * (verify * pass_cost(gamma + 1) + gamma * draft + host)
        found.append(Other(gamma, len(chance) / count, len(chance) / seconds))
    return found
