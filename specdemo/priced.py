"""What a round costs with a recipe's own parts: draft, pass, laws, draws and coins, timed on a text that is there.

Drafts of every length take turns, so whatever else the machine does weighs on all alike. Rounds follow one another as
they do in decoding, each where the one before it ended, since what a model finds in the processor's caches depends on
which model ran last: for the same reason plain passes come several in a row, as in plain decoding, and those right
behind a draft are not counted. Nothing is committed but the text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from specdemo.core.decode import More
from specdemo.core.gamma import Fixed
from specdemo.core.step import Draft
from specdemo.parts import Parts


@dataclass(frozen=True)
class Priced:
    """What was found."""

    plain_s: float  # seconds of a plain pass, with all that makes a token of it
    c: float  # a drafted token, in plain passes
    v: tuple[float, ...]  # a pass over 1, 2, ... rows, in plain passes


PLAIN = 5  # plain rounds in a row,
WARMING = 2  # of which the first are not counted

Text = tuple[Sequence[int], int]  # tokens, and how many of them are there before the first round


def price(
    parts: Callable[[], Parts],
    texts: Sequence[Text],
    longest: int,
    rounds: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> Priced:
    """Costs of drafts of up to `longest` tokens.

    Medians over `rounds` rounds of every length. Every text has room for two rounds; each is begun anew, with parts of
    its own, until there have been enough. A drafter that never proposes anything costs nothing.
    """
    judged: list[list[float]] = [[] for _ in range(longest + 1)]
    drafted: list[float] = []
    lengths = cycle([*[0] * PLAIN, *range(1, longest + 1)])
    for text in cycle(texts):
        idle = 0
        for n, draft_s, judge_s, tokens in _rounds(parts(), *text, lengths, clock):
            idle = 0 if n else idle + 1
            if n or idle > WARMING:
                judged[n].append(judge_s)
            if tokens:
                drafted.append(draft_s / tokens)
            if len(judged[longest]) == rounds:
                plain = statistics.median(judged[0])
                c = statistics.median(drafted) / plain if drafted else 0.0
                return Priced(plain, c, tuple(statistics.median(seconds) / plain for seconds in judged))
    raise ValueError("there are no texts")


def reading(parts: Parts, text: Text, priced: Priced, clock: Callable[[], float] = time.perf_counter) -> float:
    """What it costs a drafter that has seen nothing yet to read a text's prompt, in plain passes."""
    tokens, start = text
    began = clock()
    draft = parts.drafter.propose(tokens[:start], More(1, Fixed(1)))
    return max(0.0, (clock() - began) / priced.plain_s - priced.c * len(draft))


def _rounds(
    parts: Parts, text: Sequence[int], start: int, lengths: Iterator[int], clock: Callable[[], float]
) -> Iterator[tuple[int, float, float, int]]:
    """One round after the other: the length asked for, seconds of drafting and judging, and how many were drafted."""
    parts.judge.judge(text[:start], Draft())  # reads the prompt
    place = start + 1
    while place < len(text):
        n = next(lengths)
        began = clock()
        draft = parts.drafter.propose(text[:place], More(n, Fixed(n))) if n else Draft()
        draft_s, tokens = clock() - began, len(draft)
        if tokens < n:  # the pass is timed with as many rows all the same
            draft = Draft.chain(((text[place] + 1) % parts.caches[0].vocab_size,) * n)
        since = clock()
        parts.judge.judge(text[:place], draft)
        yield n, draft_s, clock() - since, tokens
        kept = 0  # what the text confirms is held, and the token after it is news
        while kept < n and place + kept < len(text) and draft.tokens[kept] == text[place + kept]:
            kept += 1
        place += kept + 1
