"""Cost of passes and steps: tables `pass_cost*` and `time_breakdown` in docs/performance.md.

`python -m benchmarks.pass_cost STUDY --write`; `rows` once with `--dtype float32` and once with `--dtype bfloat16`. All
shapes alternate, so that other load affects them alike and ratios are reliable. `breakdown`: calls of the decoding loop
are timed on a CPU with the bundled pair.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel

from benchmarks.tables import Study, publish, study_command
from specdemo.cli.arguments import at_least_one, given
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.metrics import interval
from specdemo.core.step import Draft, Step
from specdemo.core.verifier import ModelVerifier
from specdemo.generate import generate
from specdemo.models.engines.fused_weights import FusedWeights
from specdemo.models.engines.native import NativeEngine
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe

TABLE_NAMES = ("pass_cost-float32", "pass_cost-bfloat16", "time_breakdown")
TABLES = dict.fromkeys(TABLE_NAMES, "docs/performance.md")

# Timed calls and their names; a verification includes a pass, and drafts of fixed length are sampled with their passes.
TIMED: tuple[tuple[Any, str, str], ...] = (
    (NativeEngine, "run", "pass"),
    (NativeEngine, "sample_chain", "pass"),
    (ModelVerifier, "verify", "verification"),
)
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
    """Call all functions with 0, 1, ..., `repeats` - 1 in turn and return the results of each."""
    return list(zip(*[[once(i) for once in timed] for i in range(repeats)], strict=True))


def _text(caches: Sequence[CachedModel], length: int) -> list[int]:
    return [i % min(cache.vocab_size for cache in caches) for i in range(length)]


def ratio(values: Sequence[float], base: Sequence[float]) -> str:
    """Format the median of the paired ratios with its 95 % interval."""
    ratios = [value / reference for value, reference in zip(values, base, strict=True)]
    return "{:.2f} [{:.2f}, {:.2f}]".format(statistics.median(ratios), *interval(ratios))


def rows(options: argparse.Namespace) -> None:
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
            to_first = "1" if n == first else ratio(seconds[n, context], seconds[first, context])
            record[f"context_{context}"] = f"{1000 * statistics.median(seconds[n, context]):.2f} ms, {to_first}"
        records.append(record)
    columns = {"rows": "{rows}", **{f"{context:,} tokens": f"{{context_{context}}}" for context in options.context}}
    publish(options, f"pass_cost-{options.dtype or 'float32'}", columns, records)


@contextmanager
def stopwatches() -> Iterator[Counter[tuple[bool, str]]]:
    """Count seconds by (during verification, name of the call)."""
    spent: Counter[tuple[bool, str]] = Counter()
    verifying = [False]

    def timed(call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            verifying[0] |= part == "verification"
            start = time.perf_counter()
            result = call(*args, **kwargs)
            spent[verifying[0], part] += time.perf_counter() - start
            verifying[0] &= part != "verification"
            return result

        return wrapper

    with ExitStack() as stack:
        for owner, name, part in TIMED:
            stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), part)))
        yield spent


def step_parts(recipe: Recipe, prompts: Sequence[str]) -> list[dict[str, float]]:
    """Return seconds by part for each step with a full-length draft, after a warm-up run of the first prompt."""
    with stopwatches() as spent:
        pool = ModelPool()  # models loaded within the context use the patched calls
        list(generate(recipe, prompts[0], pool))
        parts = []
        for prompt in prompts:
            spent.clear()
            for event in generate(recipe, prompt, pool):
                if isinstance(event, StepEvent) and event.step.i and len(event.step.draft) == recipe.gamma:
                    parts.append(_split(event.step, spent))
                spent.clear()
    return parts


def _split(step: Step, spent: Counter[tuple[bool, str]]) -> dict[str, float]:
    parts = {}
    names = ("drafter: passes, sampling", "drafter: rest"), ("target: passes", "target: distributions, sampling, tests")
    for verifying, (inside, rest), seconds in zip((False, True), names, step.seconds[:2], strict=True):
        parts[inside] = spent[verifying, "pass"]
        parts[rest] = seconds - parts[inside]
    return {**parts, "loop": step.seconds.host}


def breakdown(options: argparse.Namespace) -> None:
    """Publish medians over steps: a row per part, two columns per temperature."""
    prompts = [prompt.text for prompt in load_prompts(kinds=["code"])][: options.prompts]
    columns, records = {"part": "{part}"}, {}
    for temperature in options.temperature:
        recipe = Recipe(gamma=options.gamma, temperature=temperature, top_p=1.0, max_tokens=options.max_tokens)
        steps = step_parts(recipe, prompts)
        medians = {part: statistics.median(step[part] for step in steps) for part in steps[0]}
        key = f"{temperature:g}".replace(".", "_")
        columns |= {f"T={temperature:g}, ms": f"{{ms_{key}:.2f}}", f"T={temperature:g}, share": f"{{share_{key}:.0%}}"}
        for part, seconds in medians.items():
            figures = {f"ms_{key}": 1000 * seconds, f"share_{key}": seconds / sum(medians.values())}
            records.setdefault(part, {"part": part}).update(figures)
    publish(options, "time_breakdown", columns, list(records.values()))


STUDIES = {
    "rows": Study(rows, {"rows": [1, 2, 4, 8], "context": [64, 512, 2040], "rounds": 100}, models=True),
    "breakdown": Study(breakdown, {"gamma": 3, "temperature": [0.0, 1.0], "prompts": 12, "max_tokens": 64}),
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
