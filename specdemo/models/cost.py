"""What one token costs: the seconds of a pass over one row, for several models side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from transformers import PreTrainedModel

from specdemo.core.step import Draft
from specdemo.models.cached import CachedModel
from specdemo.models.lean import Lean


def step_seconds(models: Sequence[Lean | PreTrainedModel], rounds: int = 60, length: int = 200) -> list[float]:
    """Medians of passes that take turns, so that whatever else the machine does weighs on all alike."""
    caches = [CachedModel(model) for model in models]
    length = min(length, *(cache.context - rounds for cache in caches))
    text = [i % min(cache.vocab_size for cache in caches) for i in range(length + rounds)]
    seconds: list[list[float]] = [[] for _ in models]
    for cache in caches:
        cache.score(text[:length], Draft())
    for end in range(length + 1, len(text) + 1):
        for cache, times in zip(caches, seconds, strict=True):
            start = time.perf_counter()
            cache.score(text[:end], Draft())[0, 0].item()  # waits for it
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]
