"""Drafts, verdicts and steps as frozen values; only `Draft.probs` is on the device.

A draft token has an `Origin`, a verdict a `Source` and, over a link, `LinkStats`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from specdemo.core.distributions import DraftProbs


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a draft token, as its drafter reports it; fields are None where unknown or without meaning."""

    source: str | None = None  # "model", "head", "n-gram", "filler", "random", "text", "store",
    # "prediction", "pool" or "window"
    position: int | None = None  # index of the copied token in the text
    matched: int | None = None  # length of the repeated ending
    order: int | None = None  # n of the n-gram
    count: int | None = None
    confidence: float | None = None  # probability estimated by the drafter

    def as_dict(self) -> dict[str, Any]:
        """Return the known fields."""
        return {name: value for name in _ORIGIN_FIELDS if (value := getattr(self, name)) is not None}


_ORIGIN_FIELDS = tuple(field.name for field in fields(Origin))
MODEL, HEAD = Origin("model"), Origin("head")


class Source(StrEnum):
    """Component or fallback that decided about the draft of a step."""

    TARGET = "target"
    GATE = "gate"
    PROVISIONAL = "provisional"
    ALONE = "alone"  # the mode is edge_only, or the connection was lost
    LATE = "late"  # response to an earlier request
    UNREPORTED = "unreported"  # another engine, which does not report whether the token was drafted

    @property
    def by_target(self) -> bool:
        return self in (Source.TARGET, Source.LATE, Source.UNREPORTED)


_FLAGS: Mapping[Source, Mapping[str, float]] = {
    Source.TARGET: {"escalated": 1.0},
    Source.GATE: {"escalated": 0.0},
    Source.PROVISIONAL: {"escalated": 1.0, "provisional": 1.0},
    Source.ALONE: {"escalated": 0.0, "edge": 1.0},
    Source.LATE: {"escalated": 1.0},
    Source.UNREPORTED: {},
}


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Measurements of a step over a link, in seconds; None: not measured.

    `switched` is 1 if another service continued, after `gap_s`; `numerics` is 1 if it rounds differently.
    `confirmed` counts the provisional tokens that a late response contains; `overruled` is 1 if it contradicts them.
    """

    hard_ratio: float | None = None
    cloud_s: float | None = None
    rtt_s: float | None = None  # excludes `cloud_s` and `gap_s`
    sent: int | None = None  # number of messages with repetitions
    rows: int | None = None  # draft distributions that the server requested
    confirmed: int | None = None
    overruled: int | None = None
    lost: int | None = None  # 1 if the connection was lost in this step
    switched: int | None = None
    numerics: int | None = None
    gap_s: float | None = None
    reread: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    up_s: float | None = None
    down_s: float | None = None

    @classmethod
    def of(cls, remote: Mapping[str, float]) -> LinkStats:
        """Read the frozen keys, ignoring others."""
        values: dict[str, Any] = {name: remote[name] for name in _LINK_FIELDS if name in remote}
        return cls(**values)

    def as_dict(self, source: Source, request_sent: bool) -> dict[str, float]:
        """Return the frozen keys of a step, as floats; a measure that is None has no key."""
        waiting = {"pending": 1.0} if source is Source.PROVISIONAL and not request_sent else {}
        measures = {name: float(value) for name in _LINK_FIELDS if (value := getattr(self, name)) is not None}
        return {**_FLAGS[source], **waiting, **measures}


_LINK_FIELDS = tuple(field.name for field in fields(LinkStats))


class Outcome(StrEnum):
    """Fate of a draft token, or origin of the target's token."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    IGNORED = "ignored"  # drafted but not tested
    UNVERIFIED = "unverified"  # committed without the target
    CORRECTION = "correction"
    BONUS = "bonus"
    PLAIN = "plain"  # the draft was empty
    UNKNOWN = "unknown"  # committed by another engine, which does not report how

    @property
    def committed(self) -> bool:
        return self not in (Outcome.REJECTED, Outcome.IGNORED)


@dataclass(frozen=True, slots=True)
class Draft:
    """A forest of proposed tokens: `parents[i] < i`, -1 is the last committed token, siblings in sampling order.

    `probs`: the distribution each token was sampled from, conditional on the earlier siblings not being chosen. `None`:
    point masses. `undisclosed`: number of further tokens of a chain, whose ids another engine does not report.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    token_probs: tuple[float, ...] | None = None  # draft probability of each token
    probs: DraftProbs | None = None
    origin: tuple[Origin, ...] = ()  # origin of each token; empty if unknown
    undisclosed: int | None = None  # None: all tokens are known

    @classmethod
    def chain(
        cls,
        tokens: tuple[int, ...],
        token_probs: tuple[float, ...] | None = None,
        probs: DraftProbs | None = None,
        origin: tuple[Origin, ...] = (),
    ) -> Draft:
        return cls(tokens, tuple(range(-1, len(tokens) - 1)), token_probs, probs, origin)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def size(self) -> int:
        """Return the number of drafted tokens, with undisclosed tokens."""
        return len(self.tokens) + (self.undisclosed or 0)

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        return max(self.node_depths, default=0)

    @property
    def node_depths(self) -> list[int]:
        """Lengths of the paths to all nodes."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return depths[1:]

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def device_s(self) -> float:
        """Return the seconds of a device that drafted while the host went on."""
        return 0.0

    def read(self) -> Draft:
        """Return the draft with all its fields, see `UnreadDraft`."""
        return self

    def padded(self, count: int) -> Draft:
        """Append a chain of `count` unused nodes, which continues a chain; drop distributions and origins."""
        first = len(self) - 1 if self.is_chain else -1
        return Draft(self.tokens + (0,) * count, (*self.parents, first, *range(len(self), len(self) + count - 1)))

    def children(self) -> dict[int, list[int]]:
        kids: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            kids.setdefault(parent, []).append(node)
        return kids

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the longest path of nodes whose tokens begin `tokens`."""
        if self.is_chain:
            return tuple(range(common_prefix(self.tokens, tuple(tokens))))
        children, nodes = self.children(), [-1]
        for token in tokens:
            following = [child for node in nodes for child in children.get(node, ()) if self.tokens[child] == token]
            if not following:
                break
            nodes = following  # siblings may have equal tokens
        return tuple(self.path(nodes[0]))

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, which may be -1."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Entropy in nats, and the most probable tokens with their probabilities."""

    entropy: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a committed token under the raw logits of the target, and the most probable tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of verifying a draft: accepted nodes and the token of the target.

    Per node: `p` is the target probability, `draw` the uniform number of the test, `beta` is sum min(p, q) at its
    position (2211.17192, Def. 3.3); `None` where not computed. A node is accepted if `draw` is below
    `bound` or, without a draw, if p reaches it; siblings are tested against residuals. `choices[r]`: most probable
    target tokens after row r, best first. `request_sent`: the step's target pass is done or under way. Blocks are
    accepted up to the last draw below its bound.
    """

    accepted: tuple[int, ...]  # accepted nodes from root to leaf
    token: int | None  # correction, bonus or plain; None after a stop token and in beam search
    p: tuple[float | None, ...] = ()
    draw: tuple[float | None, ...] = ()
    beta: tuple[float | None, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    committed: tuple[int, ...] = ()  # undrafted tokens that all beams of a search share
    pending: tuple[int, ...] = ()  # rest of the best beam
    bound: tuple[float | None, ...] = ()
    rank: tuple[int, ...] = ()  # rank of each draft token under p (1: most probable); empty unless requested
    target_top: tuple[TopTokens, ...] = ()  # top tokens of each row, if requested
    draft_top: tuple[TopTokens, ...] = ()  # top tokens of each node, if requested
    token_top: TopTokens | None = None  # residual that `token` was sampled from, if requested
    logprobs: tuple[TokenLogprob, ...] = ()  # accepted path and `token`, if requested; not part of traces
    residual: Any = field(default=None, compare=False, repr=False)  # distribution `[vocab]`, removed by the verifier
    source: Source = Source.TARGET
    request_sent: bool = True
    link: LinkStats | None = None
    replica: str = ""  # name of the service, if the last step had another

    @property
    def remote(self) -> dict[str, float]:
        """Frozen keys; empty without a link."""
        return {} if self.link is None else self.link.as_dict(self.source, self.request_sent)

    @property
    def target_tokens(self) -> tuple[int, ...]:
        return self.committed if self.token is None else (*self.committed, self.token)

    @property
    def tops(self) -> tuple[TopTokens, ...]:
        """Return all recorded distributions."""
        return (*self.target_top, *self.draft_top, *((self.token_top,) if self.token_top else ()))

    def cut(self, draft: Draft, keep: int) -> Verdict:
        """Keep the first `keep` tokens, and the tests up to that depth."""

        def shown(values: tuple[float | None, ...]) -> tuple[float | None, ...]:
            return tuple(v if len(draft.path(i)) <= keep else None for i, v in enumerate(values))

        return replace(
            self,
            accepted=self.accepted[:keep],
            token=None,
            committed=self.committed[: max(0, keep - len(self.accepted))],
            pending=(),
            draw=shown(self.draw),
            beta=shown(self.beta),
            bound=shown(self.bound),
            token_top=None,
            logprobs=self.logprobs[:keep],
        )


class StepSeconds(NamedTuple):
    """Durations of drafting and verification, and the remaining time of a step, in seconds."""

    draft: float
    verify: float
    host: float


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a draft-verify iteration, with times in seconds; None if another engine does not report them."""

    i: int
    tokens: tuple[int, ...]
    draft: Draft
    verdict: Verdict
    gamma: int  # maximum draft length of this step
    draft_s: float | None
    verify_s: float | None
    host_s: float | None  # remaining time of the step
    t: float  # seconds since the request began
    policy: Mapping[str, float] = field(default_factory=dict)  # notes of the draft-length policy

    def cut(self, keep: int) -> Step:
        """Return the step with its first `keep` tokens."""
        if keep >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:keep], verdict=self.verdict.cut(self.draft, keep))

    @property
    def seconds(self) -> StepSeconds:
        """Return the durations. Raises `ValueError` if they are unknown."""
        if self.draft_s is None or self.verify_s is None or self.host_s is None:
            raise ValueError("the engine does not report the durations of a step")
        return StepSeconds(self.draft_s, self.verify_s, self.host_s)

    @property
    def kind(self) -> Outcome:
        """`UNVERIFIED` (no target token), `PLAIN` (empty draft), `BONUS` (a leaf was reached) or `CORRECTION`.

        `UNKNOWN` if another engine does not report it.
        """
        if self.unverified:
            return Outcome.UNVERIFIED
        if self.verdict.source is Source.UNREPORTED:
            return Outcome.UNKNOWN
        if not self.draft.size:
            return Outcome.PLAIN
        if self.draft.undisclosed:
            return Outcome.CORRECTION
        last = self.verdict.accepted[-1] if self.verdict.accepted else -1
        return Outcome.CORRECTION if last in self.draft.parents else Outcome.BONUS

    def outcome(self, node: int | None) -> Outcome:
        if node is None:
            return self.kind
        if node in self.verdict.accepted:
            return Outcome.UNVERIFIED if self.unverified else Outcome.ACCEPTED
        return Outcome.IGNORED if self.verdict.beta[node] is None else Outcome.REJECTED

    @property
    def verified(self) -> bool:
        """True if a target pass of this step verified the draft."""
        return self.verdict.source is Source.TARGET

    @property
    def unverified(self) -> bool:
        """True if no target pass verified the draft."""
        return not self.verdict.source.by_target

    @property
    def target_passes(self) -> int:
        """Target passes requested by this step: 0 or 1."""
        return int(self.verdict.request_sent)

    @property
    def lost(self) -> bool:
        """True if the connection was lost in this step."""
        return self.verdict.link is not None and bool(self.verdict.link.lost)

    @property
    def searched(self) -> bool:
        """True for a step of a beam search, which may commit no tokens."""
        return not self.draft.size and self.verdict.token is None

    @property
    def accepted(self) -> int:
        return 0 if self.unverified else len(self.verdict.accepted)

    @property
    def betas(self) -> list[float]:
        return [beta for beta in self.verdict.beta if beta is not None]

    @property
    def depths(self) -> tuple[list[int], list[int]]:
        """Positions in the draft, from 1, of the tested tokens, and of the accepted tokens among them."""
        draft, verdict = self.draft, self.verdict
        if draft.undisclosed is not None:
            rejected = bool(draft.undisclosed) and verdict.token is not None
            return list(range(1, self.accepted + 1 + rejected)), list(range(1, self.accepted + 1))
        depths = draft.node_depths
        tested = {node: depths[node] for node, beta in enumerate(verdict.beta) if beta is not None}
        return [*tested.values()], [tested[node] for node in verdict.accepted if node in tested]

    @property
    def tested(self) -> int:
        return len(self.depths[0])


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix of two lists, tuples or texts, by bisection on slices."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:  # most texts continue the one before
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
