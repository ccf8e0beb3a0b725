"""Draft from counts of n-grams.

NASD, n-gram assisted speculative decoding: point masses from counts over prompt and output (ANPD, 2404.08698), with
backoff and a top-k filler. For comparison, the unigrams or bigrams of a corpus, or uniformly random tokens
(2211.17192, Table 3 and section 3.5).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from specdemo.core.decode import DraftBudget
from specdemo.core.options import OptionRule, OptionSet, option, options
from specdemo.core.step import Draft, Origin, Step
from specdemo.drafters.chain import ModelDrafter
from specdemo.drafters.method import BuildContext, Method, StoreOptions

if TYPE_CHECKING:
    from torch import Tensor

Context = tuple[int, ...]
Weight = tuple[float, float]  # (count, filler), compared in this order: emitted tokens outrank filler
_RANDOM = Origin("random")
_COUNT_BYTES = 400  # of the Python objects, measured: 164 to 446


class NGramStore:
    """Store of next-token counts for contexts of `lengths` tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = sorted(lengths, reverse=True)
        self._weights: dict[Context, dict[int, Weight]] = {}
        self._best: dict[Context, int] = {}

    def add(self, before: Sequence[int], token: int, seen: float = 1.0, filler: float = 0.0) -> None:
        """Count `token` after each context that ends `before`; the latest token wins ties."""
        for context in self._contexts(before):
            weights = self._weights.setdefault(context, {})
            count, weight = weights.get(token, (0.0, 0.0))
            weights[token] = (count + seen, weight + filler)
            best = self._best.setdefault(context, token)
            if weights[token] >= weights[best]:
                self._best[context] = token

    def __len__(self) -> int:
        return sum(map(len, self._weights.values()))

    @property
    def size_bytes(self) -> int:
        """Return an estimate."""
        return _COUNT_BYTES * len(self)

    def predict(self, before: Sequence[int]) -> tuple[int, Origin] | None:
        """Return the most frequent token after the longest recorded context, or None."""
        for context in self._contexts(before):
            token = self._best.get(context)
            if token is not None:
                count = int(self._weights[context][token][0])
                return token, Origin("n-gram" if count else "filler", order=len(context) + 1, count=count or None)
        return None

    def _contexts(self, before: Sequence[int]) -> Iterator[Context]:
        return (tuple(before[len(before) - length :]) for length in self.lengths if length <= len(before))


class NGramDrafter:
    """Draft chains from an `NGramStore`.

    Contexts have up to n - 1 tokens; `levels` "multi" falls back to shorter contexts. `filler_top_k` above 1 adds the
    target's top-k tokens at committed positions, with lower weight or, if `equal_filler`, like emitted tokens; 1 is
    NAPD. `store` reuses counts; `source` is additional text, such as an encoder's input.
    """

    def __init__(
        self,
        n: int = 3,
        levels: str = "multi",
        filler_top_k: int = 1,
        store: NGramStore | None = None,
        source: Sequence[int] = (),
        random_below: int = 0,
        seed: int = 0,
        equal_filler: bool = False,
    ) -> None:
        lengths = range(1, n) if levels == "multi" and n > 1 else (n - 1,)
        self.store = store or NGramStore(lengths)
        self._filler_top_k, self._equal_filler = filler_top_k, equal_filler
        self._random_below, self._rng = random_below, random.Random(f"{seed}/n-gram")
        self._longest = n - 1
        self._counted = 0  # tokens of the current text added to the store
        self._pending: list[Step] = []  # steps without filler
        self._count(source)
        self._counted = 0

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        self._count(tokens)
        context = list(self._before(tokens, len(tokens)))
        drafted: list[int] = []
        origin: list[Origin] = []
        while budget.may_extend(len(drafted), None):
            predicted = self.store.predict(context)
            if predicted is None and not self._random_below:
                break
            token, source = predicted or (self._rng.randrange(self._random_below), _RANDOM)
            drafted.append(token)
            origin.append(source)
            context = list(self._before([*context, token], len(context) + 1))
        return Draft.chain(tuple(drafted), origin=tuple(origin))

    def observe(self, step: Step) -> None:
        """Queue the step for filler tokens, added in `propose`."""
        if self._filler_top_k > 1:
            self._pending.append(step)

    @property
    def store_bytes(self) -> int:
        return self.store.size_bytes

    def _before(self, tokens: Sequence[int], end: int) -> Sequence[int]:
        return tokens[max(0, end - self._longest) : end]

    def _count(self, tokens: Sequence[int]) -> None:
        for end in range(max(self._counted, min(1, self._longest)), len(tokens)):
            self.store.add(self._before(tokens, end), tokens[end])
        self._counted = len(tokens)
        end = len(tokens)
        for step in reversed(self._pending):
            end -= len(step.tokens)
            self._add_filler(tokens, end, step)
        self._pending.clear()

    def _add_filler(self, tokens: Sequence[int], start: int, step: Step) -> None:
        rows = [0, *(node + 1 for node in step.verdict.accepted)]
        for offset, row in zip(range(len(step.tokens)), rows, strict=False):
            position = start + offset
            choices = step.verdict.choices[row] if step.verdict.choices else ()
            for rank, token in reversed(list(enumerate(choices[: self._filler_top_k]))):
                if token != tokens[position]:
                    seen, filler = (1.0, 0.0) if self._equal_filler else (0.0, 1.0 / (rank + 1))
                    self.store.add(self._before(tokens, position), token, seen, filler)


NGRAM_LEVELS = {"multi": "back off to shorter contexts", "one": "contexts of one length"}


FILLER_WEIGHTS = {"rank": "below emitted tokens, 1 / rank", "equal": "like emitted tokens"}


_WEIGHT_OF_FILLERS = OptionRule(
    ("filler_weight",),
    lambda chosen, name: chosen.filler_weight == "equal" and chosen.filler_top_k == 1,
    "filler_weight equal has no effect with filler_top_k 1",
    "choose 2 or more, or weight rank",
)


@options("N-grams", rules=(_WEIGHT_OF_FILLERS,))
class NGramOptions(OptionSet):
    """Options of NASD and NAPD."""

    ngram: int = option(4, "Order n", "order of NASD's n-grams", bounds=(1, 16), slider=(1, 8, 1), metavar="N")
    filler_top_k: int = option(
        3,
        "Target choices per position (1: NAPD)",
        "target choices that NASD learns per position; 1 is NAPD",
        bounds=(1, 64),
        slider=(1, 8, 1),
        metavar="K",
    )
    filler_weight: str = option(
        "rank", "Weight of fillers", "weight of NASD's fillers", choices=FILLER_WEIGHTS, noun="weight of fillers"
    )
    ngram_levels: str = option(
        "multi", "Contexts", "NASD's context lengths", choices=NGRAM_LEVELS, noun="n-gram storage"
    )
    ngram_random: bool = option(
        False,
        "Random token for unknown contexts",
        "draft a random token for a context that NASD has not seen; it counts as drafted and is usually rejected",
    )


def build_ngram_drafter(context: BuildContext) -> NGramDrafter:
    chosen = context.options
    order, levels = chosen.ngram, chosen.ngram_levels
    filler = chosen.filler_top_k
    below = context.vocab_size if chosen.ngram_random else 0
    equal = chosen.filler_weight == "equal"
    return context.with_store(
        lambda store: NGramDrafter(order, levels, filler, store, context.source, below, context.seed, equal),
        "nasd",
        order,
        levels,
    )


NASD = Method(
    name="nasd",
    label="n-grams",
    title="phrases of prompt and output draft (NASD; NAPD with filler top-k 1)",
    notes="""\
**N-grams** of the prompt and the output draft, longest context first (NASD). If no phrase fits, the large model's
second-best words are tried. Token y is accepted with the probability p(y) of the large model, otherwise another token
is drawn from p without y, which is exact. Drafting is almost free. It is fast on repetitive text and loses
little on other text. *ANPD 2404.08698.*""",
    build=build_ngram_drafter,
    options=(NGramOptions, StoreOptions),
    copies=True,
    candidates=lambda chosen: chosen.filler_top_k,
)


class CorpusCounts:
    """Logits of the next token from counts in `texts`.

    `order` 0: a uniform distribution. Order 1: unigrams, with one further count for all tokens together, so that every
    token has a probability. Order 2: bigrams, with one further count distributed like the unigrams.
    """

    def __init__(self, texts: Iterable[Sequence[int]], vocab_size: int, order: int) -> None:
        import torch

        self._unigrams = torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float32)
        self._bigrams: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for text in texts if order else ():
            for token, count in Counter(text).items():
                self._unigrams[token] += count
            for token, following in pairwise(text if order > 1 else ()):
                self._bigrams[token][following] += 1
        self._unigrams /= self._unigrams.sum()

    def score(self, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Return logits `[1, vocab_size]` of the token after `tokens`."""
        counts = self._unigrams
        if tokens and (following := self._bigrams.get(tokens[-1])):
            counts = counts.clone()
            for token, count in following.items():
                counts[token] += count
        return counts.log()[None]


@options("Corpus")
class CorpusOptions(OptionSet):
    """Options of drafts from the counts of a corpus."""

    corpus_order: int = option(
        2,
        "Counts of the corpus",
        "2: bigrams, 1: unigrams, 0: uniformly random tokens",
        bounds=(0, 2),
        slider=(0, 2, 1),
        metavar="N",
    )


def build_corpus_drafter(context: BuildContext) -> ModelDrafter:
    from specdemo.core.sampling import SamplingParams

    order = context.options.corpus_order
    counts = CorpusCounts(context.corpus if order else (), context.vocab_size, order)
    sampling = context.draft_sampling if order else SamplingParams(temperature=1.0)
    return ModelDrafter(counts.score, sampling, context.noise("draft"), context.vocab_size)


CORPUS = Method(
    name="corpus",
    title="unigrams or bigrams of the prompt set draft, or random tokens",
    notes="""\
**Corpus** samples from token counts of the bundled prompts: bigrams, unigrams, or a uniform distribution. These weak
drafters show that the output is exact for any q, and how few tokens they get accepted. *Leviathan et al. 2211.17192,
Table 3.*""",
    build=build_corpus_drafter,
    options=(CorpusOptions,),
    sampled=True,
)
