"""Bootstrap confidence intervals."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence


def interval(ratios: Sequence[float], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of `ratios`."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]
