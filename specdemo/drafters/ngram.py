"""NASD: draft from counts of what followed what in the prompt and the output so far.

N-gram Assisted Speculative Decoding (ANPD, 2404.08698, with its multi-level storage and a top-k filler). Drafts are
point masses, so any rule for point masses verifies them.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.core.decode import DraftBudget
from specdemo.core.errors import UserError
from specdemo.core.options import option, options
from specdemo.core.step import Draft, Step
from specdemo.drafters.method import BuildContext, Method, StoreOptions

Context = tuple[int, ...]
Weight = tuple[float, float]  # times seen, then filler: what was emitted always outweighs what might have been


class NGramStore:
    """Counts of next tokens per context, with the best one kept at hand: looking up and adding take constant time."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths`: numbers of tokens in a context, the longest tried first."""
        self.lengths = sorted(lengths, reverse=True)
        self._weights: dict[Context, dict[int, Weight]] = {}
        self._best: dict[Context, int] = {}

    def add(self, before: Sequence[int], token: int, seen: float = 1.0, filler: float = 0.0) -> None:
        """Count `token` after the contexts that end `before`; among equals the latest wins."""
        for length in self.lengths:
            if length > len(before):
                continue
            context = tuple(before[len(before) - length :])
            weights = self._weights.setdefault(context, {})
            old = weights.get(token, (0.0, 0.0))
            weights[token] = (old[0] + seen, old[1] + filler)
            best = self._best.setdefault(context, token)
            if weights[token] >= weights[best]:
                self._best[context] = token

    def __len__(self) -> int:
        """Distinct pairs of a context and a token after it."""
        return sum(map(len, self._weights.values()))

    def predict(self, before: Sequence[int]) -> int | None:
        """The likeliest token after the longest known context that ends `before`; None where none is known."""
        for length in self.lengths:
            if length <= len(before):
                token = self._best.get(tuple(before[len(before) - length :]))
                if token is not None:
                    return token
        return None


class NGramDrafter:
    """Chains of predictions from an `NGramStore` that learns prompt and output as they come.

    `n` is the order: contexts have up to n - 1 tokens; `levels` "multi" backs off to shorter ones, "one" does not.
    `filler_top_k` above 1 also counts, more lightly, the target's runners-up at each committed position; 1 is NAPD.
    Give an earlier `store` to keep what former generations taught, and a `source` that is no part of the text but may
    well come up in it: what an encoder read.
    """

    def __init__(
        self,
        n: int = 3,
        levels: str = "multi",
        filler_top_k: int = 1,
        store: NGramStore | None = None,
        source: Sequence[int] = (),
    ) -> None:
        if n < 2:
            raise UserError(f"an n-gram needs n of at least 2, not {n}")
        lengths = range(1, n) if levels == "multi" else (n - 1,)
        self.store = store or NGramStore(lengths)
        self._filler_top_k = filler_top_k
        self._longest = n - 1
        self._seen = 0  # tokens counted so far
        self._unread: list[Step] = []
        self._learn(source)
        self._seen = 0

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """Predictions as long as the context is known."""
        self._learn(tokens)
        tail, drafted = list(tokens[-self._longest :]), []
        while budget.may_extend(len(drafted), None):
            token = self.store.predict(tail)
            if token is None:
                break
            drafted.append(token)
            tail = [*tail, token][-self._longest :]
        return Draft.chain(tuple(drafted))

    def observe(self, step: Step) -> None:
        """Keep the round for its runners-up; its place in the text is known when the next draft is asked for."""
        if self._filler_top_k > 1:
            self._unread.append(step)

    def _learn(self, tokens: Sequence[int]) -> None:
        for end in range(max(self._seen, 1), len(tokens)):
            self.store.add(tokens[max(0, end - self._longest) : end], tokens[end])
        self._seen = len(tokens)
        end = len(tokens)
        for step in reversed(self._unread):
            end -= len(step.tokens)
            self._fill(tokens, end, step)
        self._unread.clear()

    def _fill(self, tokens: Sequence[int], start: int, step: Step) -> None:
        rows = [0, *(node + 1 for node in step.verdict.accepted)]
        for offset, row in zip(range(len(step.tokens)), rows, strict=False):
            at = start + offset
            before = tokens[max(0, at - self._longest) : at]
            for rank, token in reversed(list(enumerate(step.verdict.choices[row][: self._filler_top_k]))):
                if token != tokens[at]:
                    self.store.add(before, token, seen=0.0, filler=1.0 / (rank + 1))


NGRAM_LEVELS = {"multi": "back off to shorter contexts", "one": "contexts of one length"}


@options("NASD")
class NGramOptions:
    """Options of n-gram drafting."""

    ngram: int = option(4, "Order n", "order of NASD's n-grams", low=2, high=16, slider=(2, 8, 1), metavar="N")
    filler_top_k: int = option(
        3,
        "Target choices per position (1: NAPD)",
        "target choices that NASD learns per position; 1 is NAPD",
        low=1,
        high=64,
        slider=(1, 8, 1),
        metavar="K",
    )
    ngram_levels: str = option(
        "multi", "Contexts", "NASD's context lengths", choices=NGRAM_LEVELS, noun="n-gram storage"
    )


def _build(context: BuildContext) -> NGramDrafter:
    chosen = context.options
    order, levels, filler = chosen.ngram, chosen.ngram_levels, chosen.filler_top_k
    return context.with_store(
        lambda store: NGramDrafter(order, levels, filler, store, context.source), "nasd", order, levels
    )


METHOD = Method(
    name="nasd",
    title="n-grams of prompt and output draft (NASD; NAPD with filler top-k 1)",
    notes="""\
**NASD** drafts from n-grams of the prompt and the output, longest context first. The target's runners-up serve as
fillers; with one filler it is NAPD. Drafts are point masses: token y is accepted with probability p(y), otherwise the
correction is sampled from p without y, which is exact. Drafting is almost free. It is fast on repetitive text and loses
little on other text. *ANPD 2404.08698.*""",
    build=_build,
    options=(NGramOptions, StoreOptions),
    preflight="replay",
    candidates=lambda chosen: chosen.filler_top_k,
)
