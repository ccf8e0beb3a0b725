"""What drafting without a model costs as the text grows: microseconds and bytes per token, by length of history."""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdemo.cli.arguments import Parser
from specdemo.cli.commands import run_command
from specdemo.core.decode import DraftBudget, Drafter, decode
from specdemo.core.policies import Fixed
from specdemo.core.step import Draft, Verdict
from specdemo.drafters.lookup import LookupDrafter
from specdemo.drafters.ngram import NGramDrafter
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

SIZES = (1_000, 10_000, 100_000)
READ = DraftBudget(0, Fixed(1))  # a draft of no tokens: the text is read, and that is all
NEW = 1_000  # tokens over which a cost is taken
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "nasd": lambda: NGramDrafter(4, "multi", 3),
    "nasd, one level": lambda: NGramDrafter(4, "one", 1),
    "suffix": SuffixDrafter,
    "lookup": LookupDrafter,
}


@dataclass(frozen=True)
class StoreCost:
    """One drafter at one length of history."""

    drafter: str
    history: int
    seconds_per_token: float  # drafting and learning, per committed token
    bytes_per_token: float  # of what is kept
    accepted_per_round: float


class Replay:
    """A target that always says what a text says: what it drafts against is real, its pass is free."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        """The drafted tokens that the text has, and its next one."""
        at = len(tokens)
        kept = next((i for i, t in enumerate(draft.tokens) if t != self._text[at + i]), len(draft))
        choices = tuple((self._text[at + i],) for i in range(len(draft) + 1))
        return Verdict(tuple(range(kept)), self._text[at + kept], choices=choices)


def stdlib_tokens(encode: Callable[[str], list[int]], count: int) -> list[int]:
    """The source of Python's standard library, as it comes, up to `count` tokens."""
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(tokens) >= count:
            break
        tokens += encode(path.read_text("utf-8", errors="replace"))
    return tokens[:count]


def measure(text: Sequence[int], sizes: Sequence[int] = SIZES, gamma: int = 4) -> Iterator[StoreCost]:
    """Let every drafter follow `text` from each of `sizes` tokens on."""
    for name, make in DRAFTERS.items():
        for size in sizes:
            seconds, accepted, rounds = _follow(make(), text, size, gamma)
            tracemalloc.start()
            drafter = make()
            drafter.propose(text[:size], READ)
            kept, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            yield StoreCost(name, size, seconds / NEW, kept / size, accepted / rounds)


def _follow(drafter: Drafter, text: Sequence[int], size: int, gamma: int) -> tuple[float, int, int]:
    """Seconds spent on `NEW` tokens after the first `size`, tokens accepted, and rounds; reading the prompt apart."""
    drafter.propose(text[:size], READ)
    steps = decode(text[:size], Replay(text), drafter, Fixed(gamma), max_tokens=NEW, stop=(), clock=time.perf_counter)
    seconds, accepted, rounds = 0.0, 0, 0
    for step in steps:
        seconds += step.draft_s + step.host_s
        accepted += len(step.verdict.accepted)
        rounds += 1
    return seconds, accepted, rounds


def markdown(costs: Sequence[StoreCost]) -> str:
    """A row per drafter, a pair of columns per length of history."""
    sizes = sorted({cost.history for cost in costs})
    head = [
        "drafter",
        *(f"us / token at {size:,}" for size in sizes),
        *(f"bytes / token at {size:,}" for size in sizes),
    ]
    rows = []
    for name in dict.fromkeys(cost.drafter for cost in costs):
        mine = {cost.history: cost for cost in costs if cost.drafter == name}
        rows.append(
            [name]
            + [f"{1e6 * mine[size].seconds_per_token:.1f}" for size in sizes]
            + [f"{mine[size].bytes_per_token:.0f}" for size in sizes]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def run(options: argparse.Namespace) -> int:
    """Measure and print the table."""
    tokenizer = ModelPool().take(Recipe(method="nasd").target_spec).tokenizer
    text = stdlib_tokens(lambda source: tokenizer.encode(source, verbose=False), max(SIZES) + 2 * NEW)
    print(markdown(list(measure(text))))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run the benchmark."""
    parser = Parser(description="cost of drafting without a model as the text grows")
    return run_command(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
