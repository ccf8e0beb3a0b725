"""Time of a step by part: table `time_breakdown` in docs/performance.md.

`python -m benchmarks.pass_cost --write`. Calls of the decoding loop are timed on a CPU with the bundled pair.
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

from benchmarks.tables import Study, publish, study_command
from specdemo.core.events import StepEvent
from specdemo.core.step import Step
from specdemo.core.verifier import ModelVerifier
from specdemo.generate import generate
from specdemo.models.engines.native import NativeEngine
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe

TABLES = {"time_breakdown": "docs/performance.md"}

# Timed calls and their names; a verification includes a pass, and drafts of fixed length are sampled with their passes.
TIMED: tuple[tuple[Any, str, str], ...] = (
    (NativeEngine, "run", "pass"),
    (NativeEngine, "sample_chain", "pass"),
    (ModelVerifier, "verify", "verification"),
)


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


OPTIONS = {"gamma": 3, "temperature": [0.0, 1.0], "prompts": 12, "max_tokens": 64}
main = study_command(__file__, __doc__, TABLES, Study(breakdown, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
