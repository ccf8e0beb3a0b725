"""Steps of other engines, from the tokens of streamed chunks and the reported counts; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from specdemo.core.step import Draft, Source, Step, Verdict


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
    if not tokens:
        return
    yield reported_step(0, times[0], tokens[:1], NO_DRAFT)
    first, *others = [len(chunk.tokens) for chunk in chunks if chunk.tokens]
    sizes = [size for size in (first - 1, *others) if size]
    start = 1
    for i, (length, counts) in enumerate(_divided(sizes, drafts), 1):
        yield reported_step(i, times[start + length - 1], tokens[start : start + length], counts)
        start += length


def _divided(sizes: Sequence[int], drafts: Sequence[StepCounts] | None) -> Sequence[tuple[int, StepCounts | None]]:
    """Return number of tokens and counts of each step, for chunks of these sizes.

    If some steps have no draft, each chunk must be a step, and a single token may follow a rejected draft or no draft.
    Tokens are unknown if chunks contradict the counts.
    """
    unknown: list[tuple[int, StepCounts | None]] = [(1, None)] * sum(sizes)
    if drafts is None:
        return unknown
    if sum(draft.accepted + 1 for draft in drafts) == len(unknown):
        return [(draft.accepted + 1, draft) for draft in drafts]
    accepting = [draft for draft in drafts if draft.accepted]
    expected = [draft.accepted + 1 for draft in accepting]
    if expected and sizes and sizes[-1] > 1:  # the text may end within a step
        expected[-1] = min(expected[-1], sizes[-1])
    if expected != [size for size in sizes if size > 1]:
        return unknown
    single = NO_DRAFT if len(accepting) == len(drafts) else None
    following = iter(accepting)
    return [(size, next(following) if size > 1 else single) for size in sizes]
