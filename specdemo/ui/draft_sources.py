"""Origin of the guesses of a step: matched context, counts, and the copied place in prompt and text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from specdemo.core.events import Header, StepEvent
from specdemo.core.origin import Origin
from specdemo.core.step import Draft

Range = tuple[int, int]  # characters of prompt and text
MOST_INDEXED = 8  # tokens of an indexed n-gram; the rest of longer ones is compared
EXCERPT = 40  # characters shown around a copied place
_WORDS = {
    "model": "Sampled by the draft model.",
    "head": "Drafted by the head from hidden states of the target.",
    "filler": "A runner-up of the target after the same context.",
    "random": "A random token: the context is unknown.",
    "store": "Copied from an earlier run.",
    "pool": "Taken from the n-grams that lookahead collected.",
    "window": "Taken from the window that lookahead refines.",
}


@dataclass(frozen=True)
class LaneText:
    """Prompt and text of a lane as tokens and characters, indexed once for all steps."""

    header: Header
    steps: Sequence[StepEvent]
    names: Mapping[int, str]

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens that drafters copy from; an encoder's prompt is a separate text."""
        prompt = () if self.header.encoder else self.header.prompt_tokens
        return [*prompt, *(token for event in self.steps for token in event.step.tokens)]

    @cached_property
    def text(self) -> str:
        return self.header.prompt + "".join(event.text for event in self.steps)

    @property
    def prompt_length(self) -> int:
        return 0 if self.header.encoder else len(self.header.prompt_tokens)

    @cached_property
    def starts(self) -> list[int]:
        """First character of each piece, and the end of the last."""
        lengths = (len(piece) for event in self.steps for piece in event.pieces)
        return list(accumulate(lengths, initial=len(self.header.prompt)))

    @cached_property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Numbers of tokens, pieces and characters before each step."""
        counts = ((len(event.step.tokens), len(event.pieces), len(event.text)) for event in self.steps)
        first = (self.prompt_length, 0, len(self.header.prompt))
        return list(accumulate(counts, lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] + b[2]), initial=first))

    @cached_property
    def _ends(self) -> dict[int, dict[tuple[int, ...], list[int]]]:
        return {}

    def ends(self, ngram: tuple[int, ...]) -> list[int]:
        """Return the positions of the last token of an n-gram, in ascending order."""
        order = len(ngram)
        if order not in self._ends:
            index = self._ends[order] = {}
            for end in range(order - 1, len(self.tokens)):
                index.setdefault(tuple(self.tokens[end + 1 - order : end + 1]), []).append(end)
        return self._ends[order].get(ngram, [])

    @cached_property
    def _prompt_positions(self) -> dict[int, list[int]]:
        positions: dict[int, list[int]] = {}
        for i, token in enumerate(self.header.prompt_tokens):
            positions.setdefault(token, []).append(i)
        return positions

    def in_prompt(self, first: int, tokens: Sequence[int], text: str) -> Range | None:
        """Locate a text of the prompt by its rank among equal ones, since traces contain no offsets of tokens."""
        ids = self.header.prompt_tokens
        positions = self._prompt_positions.get(tokens[0], [])
        equal = [i for i in positions if tuple(ids[i : i + len(tokens)]) == tuple(tokens)]
        places = list(_occurrences(self.header.prompt, text))
        if first not in equal or len(places) != len(equal):
            return None
        start = places[equal.index(first)]
        return start, start + len(text)


def _occurrences(text: str, part: str) -> Iterator[int]:
    place = text.find(part)
    while place >= 0:
        yield place
        place = text.find(part, place + 1)


class SourceText:
    """Part of a lane's text before step `i`."""

    def __init__(self, lane: LaneText, i: int) -> None:
        self.lane = lane
        self.count, self._pieces, self.length = lane.sizes[i]

    @property
    def prompt_length(self) -> int:
        return self.lane.prompt_length

    def last(self, size: int) -> list[int]:
        return self.lane.tokens[max(0, self.count - size) : self.count]

    def latest(self, ngram: list[int]) -> int | None:
        """Return the position of the last token of the latest occurrence."""
        ends = self.lane.ends(tuple(ngram[-MOST_INDEXED:]))
        for end in reversed(ends[: bisect_left(ends, self.count)]):
            if self.lane.tokens[max(0, end + 1 - len(ngram)) : end + 1] == ngram:
                return end
        return None

    def characters(self, first: int, tokens: Sequence[int]) -> Range | None:
        """Return the characters of `tokens`, which begin at token `first`; None if they cannot be located."""
        texts = [self.lane.names.get(token) for token in tokens]
        if first >= self.prompt_length:
            i = first - self.prompt_length
            start, end = (self.lane.starts[min(k, self._pieces)] for k in (i, i + len(tokens)))
            return start, end
        if (rest := first + len(tokens) - self.prompt_length) > 0:
            head, tail = self.characters(first, tokens[:-rest]), self.characters(self.prompt_length, tokens[-rest:])
            return (head[0], tail[1]) if head and tail else None
        if any(not text or "\ufffd" in text for text in texts):
            return None
        return self.lane.in_prompt(first, tokens, "".join(filter(None, texts)))

    def between(self, start: int, end: int) -> str:
        return self.lane.text[max(0, start) : min(end, self.length)]


def describe_sources(event: StepEvent, source: SourceText, order: int) -> dict[str, Any] | None:
    """Return sentence, excerpt and character ranges of the copied draft tokens; None for unknown origins."""
    draft = event.step.draft
    if not draft.origin:
        return None
    first = draft.origin[0]
    if first.source in _WORDS and first.source != "filler":
        return {"words": _WORDS[first.source], "copied": [], "context": [], "excerpt": None}
    runs = [run for run in _runs(copied_positions(source, draft)) if draft.is_chain]
    copied = [source.characters(start, draft.tokens[node : node + count]) for node, start, count in runs]
    context = _context(first, runs, source)
    return {
        "words": _sentence(first, order, runs, source),
        "copied": [place for place in copied if place],
        "context": [place for place in context if place],
        "excerpt": _excerpt(source, copied[0], context[0] if context else None) if copied and copied[0] else None,
    }


def describe_origin(origin: Origin) -> str:
    """Return the order and count of one draft token, for the card of the token."""
    facts = [f"order {origin.order}"] if origin.order else []
    facts += [f"seen {origin.count}×"] if origin.count else []
    facts += [f"match of {origin.matched} tokens"] if origin.matched else []
    return ", ".join([origin.source, *facts]) if origin.source else ""


def copied_positions(source: SourceText, draft: Draft) -> list[int | None]:
    """Return the index of the token that each draft token repeats; the latest if a drafter recorded only the order."""
    positions: list[int | None] = []
    for node, origin in enumerate(draft.origin):
        if origin.source == "text" and origin.position is not None and 0 <= origin.position < source.count:
            positions.append(origin.position)
        elif origin.source == "n-gram" and origin.order:
            path = [draft.tokens[i] for i in draft.path(node)]
            wanted = [*source.last(origin.order), *path][-origin.order :]
            positions.append(source.latest(wanted) if origin.order <= source.count else None)
        else:
            positions.append(None)
    return positions


def _runs(positions: Sequence[int | None]) -> Iterator[tuple[int, int, int]]:
    """Yield (node, position, length) of draft tokens that were copied from adjacent positions."""
    node = 0
    while node < len(positions):
        start, count = positions[node], 1
        if start is not None:
            while node + count < len(positions) and positions[node + count] == start + count:
                count += 1
            yield node, start, count
        node += count


def _context(first: Origin, runs: Sequence[tuple[int, int, int]], source: SourceText) -> list[Range | None]:
    """Return the matched context before the copied place and at the end of the text."""
    size = (first.order - 1 if first.order else first.matched) or 0
    if not runs or runs[0][0] or not size or runs[0][1] < size:
        return []
    tokens, start = source.lane.tokens, runs[0][1]
    return [source.characters(i, tokens[i : i + size]) for i in (start - size, source.count - size)]


def _sentence(first: Origin, order: int, runs: Sequence[tuple[int, int, int]], source: SourceText) -> str:
    if not runs or runs[0][0]:
        words = _WORDS.get(first.source or "", "")
        return "Found in an earlier run." if first.source == "n-gram" else words
    place = "prompt" if runs[0][1] < source.prompt_length else "text"
    if first.matched:
        return f"Copied from the {place}: the last {_count(first.matched, 'token')} occurred there."
    assert first.order is not None
    backoff = f", after backoff from order {order}" if first.order < order else ""
    times = "" if first.count is None else f" It occurred {_count(first.count, 'time')}."
    context = _count(first.order - 1, "token")
    return f"Copied from the {place}: the last {context} occurred there (order {first.order}{backoff}).{times}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _excerpt(source: SourceText, copied: Range, context: Range | None) -> list[str]:
    """Return the text before the context, the context, the copied text, and the text after it."""
    start, end = copied
    middle = context[0] if context and context[1] == start else start
    places = (middle - EXCERPT, middle, start, end, end + EXCERPT)
    return [source.between(a, b) for a, b in pairwise(places)]
