"""Where the time of a round goes: ``python -m benchmarks.time_breakdown``, for `docs/performance.md`.

The calls of the real loop are timed from outside, on a CPU, with the bundled pair.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.nn import functional

from specdemo.core.events import StepEvent
from specdemo.core.step import Step
from specdemo.core.verifier import ModelVerifier
from specdemo.generate import generate
from specdemo.models.engines.llama import LlamaEngine
from specdemo.models.engines.packed_linear import PackedLinear
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe

# What is timed, and what each is called; a pass holds products and attention, a verdict holds a pass.
TIMED: tuple[tuple[Any, str, str], ...] = (
    (PackedLinear, "forward", "products"),
    (functional, "scaled_dot_product_attention", "attention"),
    (LlamaEngine, "run", "pass"),
    (ModelVerifier, "verify", "verdict"),
)


@contextmanager
def stopwatches() -> Iterator[Counter[tuple[bool, str]]]:
    """Seconds spent so far, by whether a verdict was being found, and in what."""
    spent: Counter[tuple[bool, str]] = Counter()
    judging = [False]

    def timed(call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            judging[0] |= part == "verdict"
            start = time.perf_counter()
            result = call(*args, **kwargs)
            spent[judging[0], part] += time.perf_counter() - start
            judging[0] &= part != "verdict"
            return result

        return wrapper

    with ExitStack() as stack:
        for owner, name, part in TIMED:
            stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), part)))
        yield spent


def rounds(recipe: Recipe, prompts: Sequence[str]) -> list[dict[str, float]]:
    """Seconds of each round with a draft of full length, by part; the first prompt is run once before that."""
    with stopwatches() as spent:
        pool = ModelPool()  # what it loads calls what is timed
        list(generate(recipe, prompts[0], pool))
        found = []
        for prompt in prompts:
            spent.clear()
            for event in generate(recipe, prompt, pool):
                if isinstance(event, StepEvent) and event.step.i and len(event.step.draft) == recipe.gamma:
                    found.append(_split(event.step, spent))
                spent.clear()
    return found


def _split(step: Step, spent: Counter[tuple[bool, str]]) -> dict[str, float]:
    """A round's time: what a pass is made of, and what is done with its logits."""
    pipeline = {}
    for judging, whose, seconds in ((False, "drafter", step.draft_s), (True, "target", step.verify_s)):
        products, attention, whole = (spent[judging, part] for part in ("products", "attention", "pass"))
        pipeline |= {
            f"{whose}: products": products,
            f"{whose}: attention": attention,
            f"{whose}: the rest of its passes": whole - products - attention,
            f"{whose}: laws, draws, tests": seconds - whole,
        }
    return {**pipeline, "the loop": step.host_s}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table: medians over rounds."""
    parser = argparse.ArgumentParser(prog="benchmarks.time_breakdown")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    prompts = [prompt.text for prompt in load_prompts(kinds=["code"])][: options.prompts]
    tables = []
    for temperature in options.temperature:
        recipe = Recipe(gamma=options.gamma, temperature=temperature, top_p=1.0, max_tokens=options.max_tokens)
        found = rounds(recipe, prompts)
        tables.append({part: statistics.median(one[part] for one in found) for part in found[0]})
    print("| part | " + " | ".join(f"T={temperature:g}, ms | share" for temperature in options.temperature) + " |")
    print("|---" * (1 + 2 * len(tables)) + "|")
    for part in tables[0]:
        cells = [f"{1000 * table[part]:.2f} | {table[part] / sum(table.values()):.0%}" for table in tables]
        print(f"| {part} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
