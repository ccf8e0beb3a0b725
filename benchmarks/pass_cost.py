"""What a pass costs: by rows, by context, and one model's beside another's. Seconds of passes that take turns.

Taking turns, whatever else the machine does weighs on all alike, so ratios can be trusted where seconds cannot.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from specdemo.cli.arguments import Parser, add_model_options, given
from specdemo.cli.commands import at_least_one, run_command
from specdemo.core.errors import UserError
from specdemo.core.intervals import interval
from specdemo.core.step import Draft
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

Model = LlamaWeights | PreTrainedModel


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


def run(options: argparse.Namespace) -> int:
    """Measure and print the table."""
    at_least_one("rounds", options.rounds)
    target = ModelPool().take(Recipe(method="ar", **given(options)).target_spec)
    longest = CachedModel(target.model).context
    if max(options.context) + max(options.rows) > longest or min(*options.context, *options.rows) < 1:
        raise UserError(f"contexts and rows must be 1 or more and fit the model's {longest:,} tokens together")
    found = pass_seconds(target.model, options.rows, options.context, options.rounds)
    print("| rows | " + " | ".join(f"{context:,} tokens" for context in options.context) + " |")
    print("|---" * (len(options.context) + 1) + "|")
    first = options.rows[0]
    for n in options.rows:
        cells = []
        for context in options.context:
            ratios = [own / one for own, one in zip(found[n, context], found[first, context], strict=True)]
            low, high = interval(ratios)
            ratio = "1" if n == first else f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"
            cells.append(f"{1000 * statistics.median(found[n, context]):.2f} ms, {ratio}")
        print(f"| {n} | " + " | ".join(cells) + " |")
    print(f"milliseconds of a pass, and how many passes over {first} row(s) that is at the same context [95 %]")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run the benchmark."""
    parser = Parser(description="what a pass of the target costs, by rows and by context")
    add_model_options(parser)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 6, 8])
    parser.add_argument("--context", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 2040])
    parser.add_argument("--rounds", type=int, default=100, help="passes of each shape (default: %(default)s)")
    return run_command(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
