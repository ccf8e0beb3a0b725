"""Cost of a target pass by rows and context: tables `pass_cost-float32`, `pass_cost-bfloat16` in docs/performance.md.

`python -m benchmarks.pass_cost --dtype float32 --write`, then with `--dtype bfloat16`. Passes of all shapes alternate,
so that other load affects them alike and ratios are reliable.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from benchmarks.tables import publish, run_study, study_parser
from specdemo.cli.arguments import given
from specdemo.cli.commands import at_least_one
from specdemo.core.errors import UserError
from specdemo.core.metrics import interval
from specdemo.core.step import Draft
from specdemo.models.engines.fused_weights import FusedWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

TABLES = {"pass_cost-float32": "docs/performance.md", "pass_cost-bfloat16": "docs/performance.md"}

Model = FusedWeights | PreTrainedModel


def step_seconds(models: Sequence[Model], repeats: int = 60, length: int = 200) -> list[float]:
    """Return the median seconds of a single-row pass for each model."""
    caches = [CachedModel(model) for model in models]
    length = min(length, *(cache.context - repeats for cache in caches))
    text = _text(caches, length + repeats)
    for cache in caches:
        cache.score(text[:length], Draft())

    def timed(cache: CachedModel) -> Callable[[int], float]:
        return lambda i: _seconds(cache, text[: length + 1 + i], Draft())

    return [statistics.median(seconds) for seconds in _alternate([timed(cache) for cache in caches], repeats)]


def pass_seconds(
    model: Model, rows: Sequence[int], contexts: Sequence[int], repeats: int
) -> dict[tuple[int, int], Sequence[float]]:
    """Return the seconds of `repeats` passes for every (number of rows, context)."""
    shapes = [(n, context) for n in rows for context in contexts]
    caches = {context: CachedModel(model) for context in contexts}
    text = _text(list(caches.values()), max(contexts) + max(rows))

    def timed(n: int, context: int) -> Callable[[int], float]:
        def once(_: int) -> float:
            caches[context].score(text[: context - 1], Draft())  # the pass then adds the last token and the draft
            return _seconds(caches[context], text[:context], Draft.chain(tuple(text[context : context + n - 1])))

        return once

    return dict(zip(shapes, _alternate([timed(*shape) for shape in shapes], repeats), strict=True))


def _seconds(cache: CachedModel, tokens: Sequence[int], draft: Draft) -> float:
    start = time.perf_counter()
    cache.score(tokens, draft)[0, 0].item()  # synchronise the device
    return time.perf_counter() - start


def _alternate(timed: Sequence[Callable[[int], float]], repeats: int) -> list[tuple[float, ...]]:
    """Call all functions in turn, `repeats` times, and return the results of each."""
    return list(zip(*[[once(i) for once in timed] for i in range(repeats)], strict=True))


def _text(caches: Sequence[CachedModel], length: int) -> list[int]:
    return [i % min(cache.vocab_size for cache in caches) for i in range(length)]


def study(options: argparse.Namespace) -> None:
    """Publish the median milliseconds of a pass and its ratio to the first number of rows, with a 95 % interval."""
    at_least_one("rounds", options.rounds)
    target = ModelPool().take(Recipe(method="ar", **given(options)).target_spec)
    longest = CachedModel(target.model).context
    if max(options.context) + max(options.rows) > longest or min(*options.context, *options.rows) < 1:
        raise UserError(f"contexts and rows must be at least 1 and fit the model's {longest:,} positions together")
    seconds = pass_seconds(target.model, options.rows, options.context, options.rounds)
    first = options.rows[0]
    records = []
    for n in options.rows:
        record: dict[str, object] = {"rows": n}
        for context in options.context:
            ratios = [own / base for own, base in zip(seconds[n, context], seconds[first, context], strict=True)]
            ratio = (
                "1" if n == first else "{:.2f} [{:.2f}, {:.2f}]".format(statistics.median(ratios), *interval(ratios))
            )
            record[f"context_{context}"] = f"{1000 * statistics.median(seconds[n, context]):.2f} ms, {ratio}"
        records.append(record)
    columns = {"rows": "{rows}", **{f"{context:,} tokens": f"{{context_{context}}}" for context in options.context}}
    publish(options, f"pass_cost-{options.dtype or 'float32'}", columns, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES, models=True)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--context", nargs="+", type=int, default=[64, 512, 2040])
    parser.add_argument("--rounds", type=int, default=100, help="passes of each shape (default: %(default)s)")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
