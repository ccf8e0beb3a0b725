"""Draft from the unigrams or bigrams of a corpus, or uniformly random tokens (2211.17192, Table 3 and section 3.5)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from specdemo.core.options import OptionSet, option, options
from specdemo.core.step import Draft
from specdemo.drafters.chain import ModelDrafter
from specdemo.drafters.method import BuildContext, Method

if TYPE_CHECKING:
    from torch import Tensor


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


def _build(context: BuildContext) -> ModelDrafter:
    from specdemo.core.sampling import SamplingParams

    order = context.options.corpus_order
    counts = CorpusCounts(context.corpus if order else (), context.vocab_size, order)
    sampling = context.draft_sampling if order else SamplingParams(temperature=1.0)
    return ModelDrafter(counts.score, sampling, context.noise("draft"), context.vocab_size)


METHOD = Method(
    name="corpus",
    title="unigrams or bigrams of the prompt set draft, or random tokens",
    notes="""\
**Corpus** samples from token counts of the bundled prompts: bigrams, unigrams, or a uniform distribution. These weak
drafters show that the output is exact for any q, and how few tokens they get accepted. *Leviathan et al. 2211.17192,
Table 3.*""",
    build=_build,
    options=(CorpusOptions,),
    sampled=True,
)
