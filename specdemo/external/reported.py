"""Steps of other engines, from the tokens of streamed chunks and the reported counts; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdemo.core.link_stats import Source
from specdemo.core.step import Draft, Step, Verdict

_MOST_STATES = 4_000_000  # states of an alignment


@dataclass(frozen=True)
class Chunk:
    """Tokens of a streamed chunk, received `t` seconds after the request."""

    t: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class StepCounts:
    """Accepted and drafted tokens of a step."""

    accepted: int
    drafted: int


NO_DRAFT = StepCounts(0, 0)


def reported_step(i: int, t: float, tokens: Sequence[int], counts: StepCounts | None) -> Step:
    """Return a step of committed `tokens`; the text may end before all accepted tokens. None: counts are unknown."""
    accepted, drafted = (counts.accepted, counts.drafted) if counts is not None else (0, 0)
    shown = min(accepted, len(tokens))
    unknown = (None,) * shown
    return Step(
        i,
        tuple(tokens),
        Draft(tuple(tokens[:shown]), tuple(range(-1, shown - 1)), undisclosed=drafted - shown),
        Verdict(
            accepted=tuple(range(shown)),
            token=tokens[shown] if shown < len(tokens) else None,
            p=unknown,
            draw=unknown,
            beta=unknown,
            source=Source.TARGET if counts is not None else Source.UNREPORTED,
        ),
        gamma=drafted,
        draft_s=None,
        verify_s=None,
        host_s=None,
        t=t,
    )


def steps_of_totals(chunks: Iterable[tuple[Chunk, StepCounts]]) -> Iterator[Step]:
    """Yield the steps of chunks with the totals of accepted and drafted tokens so far.

    The first token of a step has the totals of the complete step. A change within a chunk may belong to several steps:
    its tokens, and as many as were accepted, have unknown counts.
    """
    before = step = NO_DRAFT
    tokens: list[int] = []
    i = missing = unknown = 0
    t = 0.0
    for chunk, totals in chunks:
        for left, token in zip(range(len(chunk.tokens), 0, -1), chunk.tokens, strict=True):
            if not missing and left > 1 and totals != before:
                before, unknown = totals, left + totals.accepted - before.accepted
            elif totals != before:
                unknown = 0
            if unknown:
                yield reported_step(i, chunk.t, [token], None)
                i, unknown = i + 1, unknown - 1
                continue
            if not missing:
                step = StepCounts(totals.accepted - before.accepted, totals.drafted - before.drafted)
                before, missing = totals, 1 + step.accepted
            tokens, t = [*tokens, token], chunk.t
            missing -= 1
            if not missing:
                yield reported_step(i, t, tokens, step)
                i, tokens = i + 1, []
    if tokens:
        yield reported_step(i, t, tokens, step)


def steps_of_drafts(chunks: Sequence[Chunk], drafts: Sequence[StepCounts] | None) -> Iterator[Step]:
    """Yield the steps of a text; `drafts`: counts of the steps with a draft, known at its end.

    The first token is the result of the prefill. Ambiguous tokens have unknown counts.
    """
    tokens = [token for chunk in chunks for token in chunk.tokens]
    times = [chunk.t for chunk in chunks for _ in chunk.tokens]
    sizes = [len(chunk.tokens) for chunk in chunks if chunk.tokens]
    if not tokens:
        return
    yield reported_step(0, times[0], tokens[:1], NO_DRAFT)
    rest = [sizes[0] - 1, *sizes[1:]]
    spans = [(1, None)] * (len(tokens) - 1) if drafts is None else align(rest, drafts)
    start = 1
    for i, (length, counts) in enumerate(spans, 1):
        yield reported_step(i, times[start + length - 1], tokens[start : start + length], counts)
        start += length


Span = tuple[int, StepCounts | None]  # number of tokens, counts of the step or None


def align(sizes: Sequence[int], drafts: Sequence[StepCounts]) -> list[Span]:
    """Divide the tokens of chunks into steps.

    A step is one of `drafts`, in order, or has no draft and one token; the last step may end early. A chunk is a step,
    or consists of several if no such division exists. Tokens with several possible steps are single, their counts None.
    """
    total = sum(sizes)
    if sum(draft.accepted + 1 for draft in drafts) == total:
        return [(draft.accepted + 1, draft) for draft in drafts]
    if total * (len(drafts) + 1) > _MOST_STATES:
        return [(1, None)] * total
    ends = set(accumulate(sizes))
    divisions = _possible_steps(ends, total, drafts, merged=False) or _possible_steps(ends, total, drafts, merged=True)
    covering: list[set[tuple[int, StepCounts]]] = [
        set() for _ in range(total)
    ]  # start and counts of steps at each token
    for start, end, counts in divisions:
        for token in range(start, end):
            covering[token].add((start, counts))
    certain: dict[int, Span] = {
        start: (end - start, counts)
        for start, end, counts in divisions
        if all(covering[token] == {(start, counts)} for token in range(start, end))
    }
    spans: list[Span] = []
    start = 0
    while start < total:
        spans.append(certain.get(start, (1, None)))
        start += spans[-1][0]
    return spans


def _steps_from(
    position: int, limit: int, total: int, used: int, drafts: Sequence[StepCounts], merged: bool
) -> Iterator[tuple[int, int, StepCounts]]:
    """Yield end, used drafts and counts of possible steps; the chunk ends at `limit`."""
    if merged or position + 1 == limit:
        yield position + 1, used, NO_DRAFT
    if used < len(drafts):
        end, last = position + drafts[used].accepted + 1, used + 1 == len(drafts)
        if last and limit == total:
            end = min(end, total)
        if end == limit or (merged and end < limit):
            yield end, used + 1, drafts[used]


def _possible_steps(
    ends: set[int], total: int, drafts: Sequence[StepCounts], merged: bool
) -> set[tuple[int, int, StepCounts]]:
    """Return start, end and counts of all steps of possible divisions; chunks may be `merged` from several steps."""
    next_end, following = [0] * total, total
    for position in reversed(range(total)):
        following = position + 1 if position + 1 in ends else following
        next_end[position] = following

    def steps(position: int, used: int) -> Iterator[tuple[int, int, StepCounts]]:
        return _steps_from(position, next_end[position], total, used, drafts, merged)

    reached: list[set[int]] = [{0}, *(set() for _ in range(total))]  # drafts used before each token
    for position in range(total):
        for used in reached[position]:
            for end, then, _ in steps(position, used):
                reached[end].add(then)
    finishing: list[set[int]] = [*(set() for _ in range(total)), reached[total] & {len(drafts)}]
    possible = set()
    for position in reversed(range(total)):
        for used in reached[position]:
            for end, then, counts in steps(position, used):
                if then in finishing[end]:
                    finishing[position].add(used)
                    possible.add((position, end, counts))
    return possible
