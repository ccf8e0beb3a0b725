"""Drafts, verdicts and steps: the values that everything else reads.

Plain values only (ints, floats, tuples), but for a draft's `probs`, which stays on the device between drafter and rule
and never leaves a round. Knows nothing of models, text or devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


class RowNeeded(Exception):
    """A rule needs the law of a node that was not sent along."""

    def __init__(self, node: int) -> None:
        super().__init__(f"the law of node {node} is wanted")
        self.node = node


@dataclass(frozen=True, slots=True)
class Draft:
    """A forest of proposed tokens. `parents[i] < i`; -1 is the last committed token; siblings stand in drawing order.

    `probs` holds, per node, the law `[vocab]` that the token was *actually* drawn from (`[n, vocab]`); for a sibling
    that is the law given that the earlier siblings were not chosen. `None` means point masses.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    token_probs: tuple[float, ...] | None = None  # each token's probability under its law
    probs: Any = None  # or anything that gives a row per node and may raise `RowNeeded`

    @classmethod
    def chain(cls, tokens: tuple[int, ...], token_probs: tuple[float, ...] | None = None, probs: Any = None) -> Draft:
        """The forest in which every node has one child."""
        return cls(tokens, tuple(range(-1, len(tokens) - 1)), token_probs, probs)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each node hangs on the one before it."""
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def children(self) -> dict[int, list[int]]:
        """Nodes by parent, siblings in drawing order."""
        kids: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            kids.setdefault(parent, []).append(node)
        return kids

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to `node`, which may be -1."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class TopTokens:
    """What is worth seeing of a law: its entropy in nats, and its likeliest tokens with their probabilities."""

    entropy: float
    top: tuple[tuple[int, float], ...]

    def to_json(self) -> dict[str, Any]:
        """As a trace holds it."""
        return {"entropy": self.entropy, "top": [list(pair) for pair in self.top]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TopTokens:
        """From a trace."""
        return cls(value["entropy"], tuple((token, p) for token, p in value["top"]))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a draft.

    `choices[r]` are the target's most probable tokens, best first, after row r: row 0 follows the last committed
    token, row i + 1 follows node i. Per node, `draw` is the uniform number it was tested with, `beta` is
    sum min(p, q) where it stood (Leviathan et al. 2211.17192, Def. 3.3); both `None` where it was never tested.

    A search settles any number of tokens in a round, none of them drafted, and shows in `pending` how it would go on.
    A judge that did not ask the target knows no `p` (None) and no `choices`, and may add no token of its own.
    """

    accepted: tuple[int, ...]  # nodes, root to leaf
    token: int | None  # correction, bonus or plain; None where a stop token cut the round before it, and in a search
    p: tuple[float | None, ...] = ()  # the target's probability of each node
    draw: tuple[float | None, ...] = ()
    beta: tuple[float | None, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    committed: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    target_top: tuple[TopTokens, ...] = ()  # of the target, a row each, if they were asked for
    draft_top: tuple[TopTokens, ...] = ()  # of the drafter, a node each, likewise
    notes: Mapping[str, float] = field(default_factory=dict)  # how the judge came by it: bytes, seconds, ...

    @property
    def target_tokens(self) -> tuple[int, ...]:
        """The tokens that the target adds to the accepted ones."""
        return self.committed if self.token is None else (*self.committed, self.token)

    def cut(self, draft: Draft, keep: int) -> Verdict:
        """The verdict of a round of which only `keep` accepted tokens count: nothing past them was tested."""

        def shown(values: tuple[float | None, ...]) -> tuple[float | None, ...]:
            return tuple(v if len(draft.path(i)) <= keep else None for i, v in enumerate(values))

        return replace(self, accepted=self.accepted[:keep], token=None, draw=shown(self.draw), beta=shown(self.beta))


@dataclass(frozen=True, slots=True)
class Step:
    """One round of the loop: what was drafted, what the target said, what was committed, and how long it took."""

    i: int
    tokens: tuple[int, ...]  # committed in this round
    draft: Draft
    verdict: Verdict
    gamma: int  # the longest draft that this round allowed
    draft_s: float
    verify_s: float
    host_s: float  # the rest of the round
    t: float  # seconds since the request began
    policy: Mapping[str, float] = field(default_factory=dict)  # what the draft-length policy had to say

    @property
    def kind(self) -> str:
        """What the round's last token is: `plain` (nothing drafted), `bonus` (a leaf was reached) or `correction`."""
        if not self.draft.tokens:
            return "plain"
        last = self.verdict.accepted[-1] if self.verdict.accepted else -1
        return "correction" if last in self.draft.parents else "bonus"

    @property
    def searched(self) -> bool:
        """Whether this was a round of a search, which may well commit nothing."""
        return not self.draft.tokens and self.verdict.token is None

    @property
    def tested(self) -> int:
        """How many nodes the rule looked at."""
        return sum(beta is not None for beta in self.verdict.beta)

    def to_json(self) -> dict[str, Any]:
        """The trace's line for this step, but for its texts."""
        draft, verdict = self.draft, self.verdict
        return {
            "i": self.i,
            "tokens": list(self.tokens),
            "draft": list(draft.tokens),
            "parents": list(draft.parents),
            "accepted": list(verdict.accepted),
            "token": verdict.token,
            "kind": self.kind,
            "p": list(verdict.p),
            "q": None if draft.token_probs is None else list(draft.token_probs),
            "top": [verdict.choices[parent + 1][0] if verdict.choices else None for parent in draft.parents],
            "choices": [list(row) for row in verdict.choices],
            "draw": list(verdict.draw),
            "beta": list(verdict.beta),
            "gamma": self.gamma,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "host_s": self.host_s,
            "t": self.t,
            "policy": dict(self.policy),
            **({"remote": dict(verdict.notes)} if verdict.notes else {}),
            **({"pending": list(verdict.pending)} if self.searched else {}),
            **({"laws": [peak.to_json() for peak in verdict.target_top]} if verdict.target_top else {}),
            **({"drafted": [peak.to_json() for peak in verdict.draft_top]} if verdict.draft_top else {}),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Step:
        """The step that a trace's line tells of."""
        q = line["q"]
        return cls(
            i=line["i"],
            tokens=tuple(line["tokens"]),
            draft=Draft(tuple(line["draft"]), tuple(line["parents"]), None if q is None else tuple(q)),
            verdict=Verdict(
                accepted=tuple(line["accepted"]),
                token=line["token"],
                p=tuple(line["p"]),
                draw=tuple(line["draw"]),
                beta=tuple(line["beta"]),
                choices=tuple(tuple(row) for row in line["choices"]),
                committed=tuple(line["tokens"] if "pending" in line else ()),
                pending=tuple(line.get("pending", ())),
                target_top=tuple(map(TopTokens.from_json, line.get("laws", ()))),
                draft_top=tuple(map(TopTokens.from_json, line.get("drafted", ()))),
                notes=dict(line.get("remote", {})),
            ),
            gamma=line["gamma"],
            draft_s=line["draft_s"],
            verify_s=line["verify_s"],
            host_s=line["host_s"],
            t=line["t"],
            policy=dict(line.get("policy", {})),
        )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts, both lists or both tuples, have in common: a bisection at the speed of C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
