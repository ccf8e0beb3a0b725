"""The decoding loop and its protocols, on token ids (Leviathan et al. 2211.17192, Algorithm 1).

Autoregressive (AR) decoding is the loop with empty drafts, so the same code measures the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

from specdemo.core.step import Draft, Step, Verdict


class DraftBudget:
    """Draft length per step, capped at `limit` tokens."""

    def __init__(self, limit: int, policy: DraftLengthPolicy) -> None:
        self.limit = limit
        self._policy = policy

    def may_extend(self, n: int, logits: Any) -> bool:
        """Return True if a draft of n tokens may grow; `logits` (raw, next token) may be None."""
        return n < self.limit and self._policy.may_extend(n, logits)

    @property
    def chain_limits(self) -> Sequence[float] | None:
        """Return the least path probability of each token of a chain; None: call `may_extend`."""
        if not self._policy.needs_logits:
            return [0.0] * self.limit
        limits = self._policy.path_limits
        return None if limits is None else limits[: self.limit]

    @property
    def paused(self) -> bool:
        """True if no path is probable enough; copied text has no probability."""
        limits = self.chain_limits
        return limits[0] > 1 if limits else False

    def at_most(self, limit: int) -> DraftBudget:
        return DraftBudget(min(limit, self.limit), self._policy)


class Drafter(Protocol):
    """Proposes draft tokens before each target pass and observes the results.

    A drafter with a store of text returns its size as `store_bytes`.
    """

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """Continue `tokens`.

        Query `budget` before sampling each token: discarding improbable samples biases the output.
        """

    def observe(self, step: Step) -> None:
        """Ignore the step."""
        return


class Verifier(Protocol):
    """Decides which draft tokens are accepted and adds a token of the target."""

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        """Verify `draft` after `tokens` in a single target pass."""


class DraftLengthPolicy(Protocol):
    """Chooses gamma, the draft length, before each step."""

    @property
    def gamma(self) -> int: ...

    @property
    def needs_logits(self) -> bool:
        """If False, `may_extend` ignores logits and allows `gamma` tokens."""

    @property
    def path_limits(self) -> Sequence[float] | None:
        """Least products of the largest probabilities up to each token; None if `may_extend` has other conditions."""

    @property
    def notes(self) -> Mapping[str, float]: ...

    def may_extend(self, n: int, logits: Any) -> bool: ...

    def observe(self, step: Step) -> None: ...


class EmptyDrafter(Drafter):
    """Drafter without drafts, which turns the loop into AR decoding."""

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        return Draft()


def decode(
    prompt: Sequence[int],
    verifier: Verifier,
    drafter: Drafter,
    policy: DraftLengthPolicy,
    *,
    max_tokens: int,
    stop: Collection[int],
    clock: Callable[[], float],
    elapsed: Callable[[], float] | None = None,
    first_target: bool = True,
) -> Iterator[Step]:
    """Continue `prompt` by up to `max_tokens` tokens, or to the first token in `stop`; yield each step.

    With `first_target`, step 0 has an empty draft, which separates time to first token from decoding speed. Only `t`
    includes time between steps: it is `elapsed()`, by default the time by `clock` since the first step began.
    """
    tokens, end = list(prompt), len(prompt) + max_tokens
    start = clock()
    for i in count():
        began = clock()
        limit = min(policy.gamma, end - len(tokens) - 1) if i or not first_target else 0  # the target adds a token
        draft = drafter.propose(tokens, DraftBudget(limit, policy)) if limit else Draft()
        drafted = clock()
        verdict = verifier.verify(tokens, draft)
        verified = clock()
        drafted = min(max(drafted, began + draft.device_s), verified)
        draft = draft.read()
        new = [*(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens]
        keep = next((n + 1 for n, token in enumerate(new) if token in stop), len(new))
        if keep < len(new):
            verdict = verdict.cut(draft, keep)
        tokens += new[:keep]
        finished = clock()
        step = Step(
            i,
            tuple(new[:keep]),
            draft if draft.probs is None else replace(draft, probs=None),
            verdict,
            gamma=limit,
            draft_s=drafted - began,
            verify_s=verified - drafted,
            host_s=finished - verified,
            t=elapsed() if elapsed else finished - start,
            policy=policy.notes if limit else {},
        )
        if step.verified:  # other steps have neither acceptance tests nor the time of a pass
            policy.observe(step)
        drafter.observe(step)
        yield (step := replace(step, host_s=clock() - verified))
        if (step.tokens and step.tokens[-1] in stop) or len(tokens) >= end:
            return
