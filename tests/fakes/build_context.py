"""`BuildContext` on table models, small enough for proofs by enumeration."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fakes.enumeration import PROMPT, SMALL, VOCAB
from specdemo.core.sampling import SamplingParams
from specdemo.drafters import option_classes

SMALL_SIZES = {"tree_nodes": 4, "tree_width": 2, "lookahead_window": 1, "lookahead_n": 2, "ngram": 3}


class FakeContext:
    """Every role is `SMALL`; `random` is the source of all noise."""

    corpus = (PROMPT,)
    vocab_size, stop, source, seed, bridge, has_drafter = VOCAB, (), PROMPT, 0, None, True

    def __init__(self, sampling: SamplingParams, random: Any, head: Any = None) -> None:
        self.sampling = self.draft_sampling = self.drafter_sampling = sampling
        self._random, self._head = random, head
        defaults = {name: option.default for group in option_classes() for name, option in group.OPTIONS.items()}
        self.options = SimpleNamespace(**{**defaults, **SMALL_SIZES})

    def scorer(self, role: str, layers: Callable | None = None) -> Any:
        return SimpleNamespace(score=SMALL.score, extend=SMALL.extend, vocab_size=VOCAB, context=99)

    def head(self) -> Any:
        return self._head

    def noise(self, name: str, *, shared: bool = True) -> Any:
        return self._random

    def with_store(self, make: Callable, *key: Any) -> Any:
        return make(None)
