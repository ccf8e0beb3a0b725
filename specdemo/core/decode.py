"""The roles and the one loop. No torch, no text, no printing, no callbacks.

Every way of decoding is this loop with other parts; plain decoding is the loop with empty drafts, so the baseline is
measured by the same code (Leviathan et al. 2211.17192, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

from specdemo.core.step import Draft, Step, Verdict


class DraftBudget:
    """May the draft grow? Asked before every token, or not at all for the first `sure` ones."""

    def __init__(self, limit: int, policy: DraftLengthPolicy) -> None:
        self._limit, self._policy = limit, policy

    def may_extend(self, n: int, logits: Any) -> bool:
        """Whether a draft of n tokens may grow; `logits` are the drafter's raw ones for the next, None if unknown."""
        return n < self._limit and self._policy.may_extend(n, logits)

    @property
    def unconditional(self) -> int:
        """How many tokens may be drafted whatever the logits are: a device need not show them to the host."""
        return 0 if self._policy.needs_logits else self._limit

    def at_most(self, limit: int) -> DraftBudget:
        """The same, for drafts of at most `limit` tokens."""
        return DraftBudget(min(limit, self._limit), self._policy)


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """A draft that continues `tokens`.

        `budget` must be asked before a token is drawn: dropping a drawn token because it turned out improbable would
        bias the output.
        """

    def observe(self, step: Step) -> None:
        """Learn from a finished round."""


class Verifier(Protocol):
    """Decides what of a draft is kept, and adds a token of its own."""

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        """The verdict on `draft` as a continuation of `tokens`, in one pass of the target."""


class DraftLengthPolicy(Protocol):
    """A draft-length policy."""

    @property
    def gamma(self) -> int:
        """The longest draft that it would allow now."""

    @property
    def needs_logits(self) -> bool:
        """Whether `budget` depends on logits; if not, it allows drafts of `gamma` tokens."""

    @property
    def notes(self) -> Mapping[str, float]:
        """What the trace should know of this round's decision."""

    def may_extend(self, n: int, logits: Any) -> bool:
        """May a draft of n tokens grow?"""

    def observe(self, step: Step) -> None:
        """Learn from a finished round."""


class EmptyDrafter:
    """The drafter that never drafts: autoregressive decoding."""

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """The empty draft."""
        return Draft()

    def observe(self, step: Step) -> None:
        """Nothing to learn."""


def decode(
    prompt: Sequence[int],
    verifier: Verifier,
    drafter: Drafter,
    policy: DraftLengthPolicy,
    *,
    max_tokens: int,
    stop: Collection[int],
    clock: Callable[[], float],
    start: float | None = None,
) -> Iterator[Step]:
    """Continue `prompt` by up to `max_tokens` tokens, or through the first one in `stop`, a step per round.

    Round 0 drafts nothing: it is the prefill, so time to first token and decoding speed are apart by construction.
    `start` is the clock's reading when the request began. May be closed at any step; there is nothing to clean up.
    The time a caller takes between steps is in `t` and in no other figure.
    """
    tokens = list(prompt)
    end = len(tokens) + max_tokens
    start = clock() if start is None else start
    for i in count():
        began = clock()
        room = end - len(tokens) - 1  # the target's own token takes one place
        limit = min(policy.gamma, room) if i else 0
        draft = drafter.propose(tokens, DraftBudget(limit, policy)) if limit else Draft()
        drafted = clock()
        verdict = verifier.verify(tokens, draft)
        judged = clock()
        new = [*(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens]
        keep = next((n + 1 for n, token in enumerate(new) if token in stop), len(new))
        if keep < len(new):
            verdict = verdict.cut(draft, keep)
        tokens += new[:keep]
        finished = clock()
        step = Step(
            i,
            tuple(new[:keep]),
            replace(draft, probs=None),
            verdict,
            gamma=limit,
            draft_s=drafted - began,
            verify_s=judged - drafted,
            host_s=finished - judged,
            t=finished - start,
            policy=policy.notes if limit else {},
        )
        policy.observe(step)
        drafter.observe(step)
        step = replace(step, host_s=clock() - judged)
        yield step
        if (step.tokens and step.tokens[-1] in stop) or len(tokens) >= end:
            return
