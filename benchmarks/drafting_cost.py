"""Time and memory of drafting without a model, by length of the history: table `drafting_cost` in docs/performance.md.

`python -m benchmarks.drafting_cost --write`. The drafters follow the source of Python's standard library; the target is
replaced by the text, so that acceptance is real and verification free.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import publish, run_study, study_parser
from specdemo.core.decode import DraftBudget, Drafter, decode
from specdemo.core.policies import Fixed
from specdemo.core.step import Draft, Verdict
from specdemo.drafters.lookup import LookupDrafter
from specdemo.drafters.ngram import NGramDrafter
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

TABLES = {"drafting_cost": "docs/performance.md"}
SIZES = (1_000, 10_000, 100_000)
NEW_TOKENS = 1_000  # timed
READ_ONLY = DraftBudget(0, Fixed(1))  # update without drafting
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "nasd": lambda: NGramDrafter(4, "multi", 3),
    "nasd, one level": lambda: NGramDrafter(4, "one", 1),
    "suffix": SuffixDrafter,
    "lookup": LookupDrafter,
}


@dataclass(frozen=True)
class DraftingCost:
    """Cost of a drafter for a length of history."""

    drafter: str
    history: int
    seconds_per_token: float  # drafting and learning, per committed token
    bytes_per_token: float  # memory of the drafter, per token of the history
    accepted_per_step: float


class TextVerifier:
    """Verifier that continues every prefix of a text with the text."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        """Accept the draft tokens that agree with the text."""
        start = len(tokens)
        accepted = next((i for i, token in enumerate(draft.tokens) if token != self._text[start + i]), len(draft))
        choices = tuple((self._text[start + i],) for i in range(len(draft) + 1))
        return Verdict(tuple(range(accepted)), self._text[start + accepted], choices=choices)


def stdlib_tokens(encode: Callable[[str], list[int]], count: int) -> list[int]:
    """Return the first `count` tokens of the standard library's source."""
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(tokens) >= count:
            break
        tokens += encode(path.read_text("utf-8", errors="replace"))
    return tokens[:count]


def measure(text: Sequence[int], sizes: Sequence[int] = SIZES, gamma: int = 4) -> Iterator[DraftingCost]:
    """Yield the cost of every drafter following `text` from each of `sizes` tokens on."""
    for name, build in DRAFTERS.items():
        for size in sizes:
            seconds, accepted, steps = _follow(build(), text, size, gamma)
            tracemalloc.start()
            drafter = build()
            drafter.propose(text[:size], READ_ONLY)
            memory, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            yield DraftingCost(name, size, seconds / NEW_TOKENS, memory / size, accepted / steps)


def _follow(drafter: Drafter, text: Sequence[int], size: int, gamma: int) -> tuple[float, int, int]:
    """Return drafting seconds, accepted tokens and steps for `NEW_TOKENS` tokens after the first `size`."""
    drafter.propose(text[:size], READ_ONLY)
    verifier, clock = TextVerifier(text), time.perf_counter
    steps = list(decode(text[:size], verifier, drafter, Fixed(gamma), max_tokens=NEW_TOKENS, stop=(), clock=clock))
    seconds = sum(step.draft_s + step.host_s for step in steps)
    return seconds, sum(len(step.verdict.accepted) for step in steps), len(steps)


def study(options: argparse.Namespace) -> None:
    """Measure and publish the table: a row per drafter, two columns per length of history."""
    tokenizer = ModelPool().take(Recipe(method="nasd").target_spec).tokenizer
    text = stdlib_tokens(lambda source: tokenizer.encode(source, verbose=False), max(SIZES) + 2 * NEW_TOKENS)
    rows: dict[str, dict[str, object]] = {}
    for cost in measure(text):
        row = rows.setdefault(cost.drafter, {"drafter": cost.drafter})
        row[f"us_{cost.history}"] = 1e6 * cost.seconds_per_token
        row[f"bytes_{cost.history}"] = cost.bytes_per_token
    columns = {"drafter": "{drafter}"}
    columns |= {f"us / token at {size:,}": f"{{us_{size}:.1f}}" for size in SIZES}
    columns |= {f"bytes / token at {size:,}": f"{{bytes_{size}:.0f}}" for size in SIZES}
    publish(options, "drafting_cost", columns, list(rows.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    return run_study(study, study_parser(__file__, __doc__, TABLES), arguments)


if __name__ == "__main__":
    sys.exit(main())
