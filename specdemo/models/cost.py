"""What a pass costs: by rows, by context, and one model's beside another's. Seconds of passes that take turns.

Taking turns, whatever else the machine does weighs on all alike, so ratios can be trusted where seconds cannot.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from specdemo.core.step import Draft
from specdemo.models.cached import CachedModel
from specdemo.models.lean import Lean

Model = Lean | PreTrainedModel


def step_seconds(models: Sequence[Model], rounds: int = 60, length: int = 200) -> list[float]:
    """Seconds of a pass over one row, for each model."""
    caches = [CachedModel(model) for model in models]
    length = min(length, *(cache.context - rounds for cache in caches))
    text = _text(caches, length + rounds)
    for cache in caches:
        cache.score(text[:length], Draft())
    seconds = _in_turn([_timed(cache, text, length, rounds) for cache in caches], rounds)
    return [statistics.median(own) for own in seconds]


def pass_seconds(
    model: Model, rows: Sequence[int], contexts: Sequence[int], rounds: int
) -> dict[tuple[int, int], Sequence[float]]:
    """Seconds of passes over so many rows behind so many tokens, by rows and tokens: in every round each shape once."""
    shapes = [(n, context) for n in rows for context in contexts]
    caches = {context: CachedModel(model) for context in contexts}
    text = _text(list(caches.values()), max(contexts) + max(rows))

    def timed(n: int, context: int) -> Callable[[int], float]:
        def once(i: int) -> float:
            cache = caches[context]
            cache.score(text[: context - 1], Draft())  # so that the last token is news
            start = time.perf_counter()
            cache.score(text[:context], Draft.chain(tuple(text[context : context + n - 1])))[0, 0].item()
            return time.perf_counter() - start

        return once

    return dict(zip(shapes, _in_turn([timed(*shape) for shape in shapes], rounds), strict=True))


def _timed(cache: CachedModel, text: Sequence[int], length: int, rounds: int) -> Callable[[int], float]:
    def once(i: int) -> float:
        start = time.perf_counter()
        cache.score(text[: length + 1 + i], Draft())[0, 0].item()  # waits for it
        return time.perf_counter() - start

    return once


def _in_turn(timed: Sequence[Callable[[int], float]], rounds: int) -> list[tuple[float, ...]]:
    """What each of them found: they are called with the number of the round, one after the other."""
    return list(zip(*[[once(i) for once in timed] for i in range(rounds)], strict=True))


def _text(caches: Sequence[CachedModel], length: int) -> list[int]:
    return [i % min(cache.vocab_size for cache in caches) for i in range(length)]
