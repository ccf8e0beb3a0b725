"""Copy the continuation of repeated text: suffix decoding (2411.04975), alone, with a model or in a predicted output.

A suffix automaton finds the longest repeated suffix in amortised constant time per token (Blumer et al. 1985). Prompt
lookup, as in transformers, is a baseline that scans the text in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.step import Draft, Origin, Step
from specdemo.drafters.chain import build_head_drafter, build_model_drafter
from specdemo.drafters.method import BuildContext, Method, StoreOptions

_STATE_BYTES = 280  # of the Python objects, measured: 267 to 279
PREDICTED = "prediction"  # source of tokens that were copied from the prediction
LONGEST_COPY = 15  # tokens of a draft; with the token of the target 16 rows
_ANCHOR = 16  # tokens of the prompt that precede the prediction, so that drafts begin with the answer
_TRUSTED = 2  # matched tokens from which the prediction drafts


class SuffixStore:
    """Suffix automaton over several texts, which finds the longest repeated suffix."""

    def __init__(self) -> None:
        self.text: list[int] = []  # negative numbers separate texts
        self.matched = 0  # length of the longest suffix that occurred earlier
        self._after = 0  # end of that earlier occurrence
        # Each state has transitions, a suffix link, the longest string and the end of its last occurrence.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length = [-1], [0]
        self._end = [0]
        self._last = 0

    def __len__(self) -> int:
        return len(self._next)

    @property
    def size_bytes(self) -> int:
        """Return an estimate."""
        return _STATE_BYTES * len(self._next)

    def begin(self) -> None:
        """Start a new text, which matches do not cross."""
        if self.text:
            self.add(-1 - len(self.text))

    def add(self, token: int) -> None:
        self.text.append(token)
        before, new = self._last, self._state({}, 0, self._length[self._last] + 1, len(self.text))
        while before >= 0 and token not in self._next[before]:
            self._next[before][token] = new
            before = self._link[before]
        if before >= 0:
            known = self._next[before][token]
            fits = self._length[known] == self._length[before] + 1
            self._link[new] = known if fits else self._split(before, known, token)
        self._last, link = new, self._link[new]
        self.matched, self._after = self._length[link], self._end[link]
        self._end[link] = len(self.text)

    def continuation(self, count: int) -> list[int]:
        """Return up to `count` tokens after the match; an overlapping match repeats periodically."""
        tokens: list[int] = []
        for position in range(self._after, self._after + count if self.matched else 0):
            token = self.text[position] if position < len(self.text) else tokens[position - len(self.text)]
            if token < 0:
                break
            tokens.append(token)
        return tokens

    def position(self, i: int) -> int:
        """Return the position in `text` of token i of the continuation."""
        return self._after + i % (len(self.text) - self._after)

    def _split(self, before: int, known: int, token: int) -> int:
        short = self._state(dict(self._next[known]), self._link[known], self._length[before] + 1, self._end[known])
        while before >= 0 and self._next[before].get(token) == known:
            self._next[before][token] = short
            before = self._link[before]
        self._link[known] = short
        return short

    def _state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class SuffixDrafter(Drafter):
    """Draft chains from a `SuffixStore`, `factor` tokens per matched token.

    `store` contains earlier texts; `source` is additional text, such as an encoder's input.
    """

    def __init__(self, factor: float = 2.0, store: SuffixStore | None = None, source: Sequence[int] = ()) -> None:
        self.store = store or SuffixStore()
        self._factor = factor
        self._added = 0
        self.store.begin()
        if source:
            for token in source:
                self.store.add(token)
            self.store.begin()
        self._start = len(self.store.text)

    def match(self, tokens: Sequence[int]) -> int:
        for token in tokens[self._added :]:
            self.store.add(token)
        self._added = len(tokens)
        return self.store.matched

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        limit = round(self._factor * self.match(tokens))
        drafted: list[int] = []
        for token in self.store.continuation(limit):
            if not budget.may_extend(len(drafted), None):
                break
            drafted.append(token)
        return Draft.chain(tuple(drafted), origin=tuple(map(self._origin, range(len(drafted)))))

    @property
    def store_bytes(self) -> int:
        return self.store.size_bytes

    def _origin(self, i: int) -> Origin:
        position, matched = self.store.position(i) - self._start, self.store.matched
        return Origin("text", position, matched) if position >= 0 else Origin("store", None, matched)


def build_suffix_drafter(context: BuildContext) -> SuffixDrafter:
    return context.with_store(lambda store: SuffixDrafter(store=store, source=context.source))


SUFFIX = Method(
    name="suffix",
    title="the continuation of the longest repeated ending drafts",
    notes="""\
**Suffix decoding** finds the longest ending of the text that occurred before and drafts its continuation. A suffix
automaton makes this constant amortised time per token. Longer matches give longer drafts. The method is exact. It is
fast on tables, edits and long quotations. *SuffixDecoding 2411.04975.*""",
    build=build_suffix_drafter,
    options=(StoreOptions,),
    copies=True,
)


@dataclass(eq=False)
class LookupDrafter(Drafter):
    """Copy from the earliest match of the longest suffix of up to `longest` tokens."""

    longest: int = 2

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        tokens = list(tokens)
        for size in range(self.longest, 0, -1):
            suffix = tokens[-size:]
            for start in range(len(tokens) - size):
                if tokens[start : start + size] == suffix:
                    after = start + size
                    count = 0
                    while after + count < len(tokens) and budget.may_extend(count, None):
                        count += 1
                    origin = tuple(Origin("text", after + i, matched=size) for i in range(count))
                    return Draft.chain(tuple(tokens[after : after + count]), origin=origin)
        return Draft()


LOOKUP = Method(
    name="lookup",
    title="prompt lookup as in transformers, for comparison",
    notes="""\
**Prompt lookup** copies the continuation of the first earlier occurrence of the last two tokens, or of the last one. It
reproduces the method of `transformers` for comparison. It is exact, ignores later occurrences and searches the full
text in every step.""",
    build=lambda context: LookupDrafter(),
    copies=True,
)


@dataclass(eq=False)
class HybridDrafter:
    """Draft with `model`, if any, unless the suffix drafter matches at least `trusted` tokens."""

    suffixes: SuffixDrafter
    model: Drafter | None
    trusted: int = 4

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        if self.model is None or self.suffixes.match(tokens) >= self.trusted:
            return self.suffixes.propose(tokens, budget)
        return self.model.propose(tokens, budget)

    @property
    def store_bytes(self) -> int:
        return self.suffixes.store_bytes

    def observe(self, step: Step) -> None:
        if self.model is not None:
            self.model.observe(step)


def build_hybrid_drafter(context: BuildContext) -> HybridDrafter:
    model: Drafter | None = None
    if context.head() is not None:
        model = build_head_drafter(context)
    elif context.has_drafter:
        model = build_model_drafter(context)
    return HybridDrafter(build_suffix_drafter(context), model)


HYBRID = Method(
    name="hybrid",
    title="suffix decoding on repeated text, a smaller model or a head otherwise",
    notes="""\
**The hybrid** drafts from suffixes after a long repetition and with the draft model or a head otherwise. The method
is chosen before any token is drawn, so the text stays exact. It is fast on mixed text on a CPU; with heads, the
speed was not measured on GPUs. Without a model and a head, suffixes draft all text.""",
    build=build_hybrid_drafter,
    options=(StoreOptions,),
    sampled=True,
    drafter="model",
    accepts_head=True,
    optional_model=True,
    copies=True,
)


class PredictionDrafter:
    """Continue a text that the answer probably repeats, such as an edited file, after the last matching tokens.

    Without a match `fallback` drafts at most `fallback_gamma` tokens.
    """

    def __init__(
        self, prompt: Sequence[int], prediction: Sequence[int], fallback: Drafter, fallback_gamma: int
    ) -> None:
        self._start = max(0, len(prompt) - _ANCHOR)
        self._suffixes = _PredictionSuffixes([*prompt[self._start :], *prediction], self._start)
        self._fallback = fallback
        self._fallback_gamma = fallback_gamma

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        answer = tokens[self._start :]
        if self._suffixes.match(answer) >= _TRUSTED and (draft := self._suffixes.propose(answer, budget)):
            return draft
        return self._fallback.propose(tokens, budget.at_most(self._fallback_gamma))

    @property
    def store_bytes(self) -> int:
        return self._suffixes.store_bytes + getattr(self._fallback, "store_bytes", 0)

    def observe(self, step: Step) -> None:
        self._fallback.observe(step)


class _PredictionSuffixes(SuffixDrafter):
    """Suffixes of prediction and answer; positions count from the start of the text."""

    def __init__(self, text: Sequence[int], offset: int) -> None:
        super().__init__(source=text)
        self._offset = offset

    def _origin(self, i: int) -> Origin:
        origin = super()._origin(i)
        if origin.position is None:
            return replace(origin, source=PREDICTED)
        return replace(origin, position=origin.position + self._offset)
