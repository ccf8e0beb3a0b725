"""Passes of the native engine: tables `native_passes`, `native_stages` and `several_texts` in docs/native-engine.md.

`python -m benchmarks.native_passes STUDY --write`. B is the time that reading the weights, keys and values takes at the
bandwidth measured in the same run: 512 MB, read by the same number of threads. `steps` times the parts of decoding
steps with the bundled pair: table `time_breakdown` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.runs import save_dequantised
from benchmarks.tables import Study, per_width, publish, publish_width, study_command
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.step import Draft, Step
from specdemo.core.verifier import ModelVerifier
from specdemo.generate import generate
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.native import NativeCache, NativeEngine
from specdemo.models.engines.select import engine_of
from specdemo.models.load import load
from specdemo.models.memory import release_memory
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe

TABLES = {
    **dict.fromkeys(per_width("native_passes", "native_stages", "several_texts"), "docs/native-engine.md"),
    "time_breakdown": "docs/performance.md",
}
FORMS = {  # dtype, quantization, and bits of activations
    "stored": ("auto", "none", "16"),
    "stored-activations8": ("auto", "none", "8"),
    "float32": ("float32", "none", "16"),
    "bfloat16": ("bfloat16", "none", "16"),
    "int8": ("bfloat16", "int8", "16"),
    "nf4": ("bfloat16", "nf4", "16"),
}
READ_BYTES = 512 << 20
# Timed calls and their names; a verification includes a pass, and drafts of fixed length are sampled with their passes.
TIMED: tuple[tuple[Any, str, str], ...] = (
    (NativeEngine, "run", "pass"),
    (NativeEngine, "sample_chain", "pass"),
    (ModelVerifier, "verify", "verification"),
)
STAGES = ("query, key, value", "value", "attention", "output", "gate, up", "down", "head")


def engine_for(options: argparse.Namespace, form: str) -> NativeEngine:
    """Load the target of the pair in a form; other forms than the stored one start from its dequantised weights."""
    release_memory()
    dtype, quantization, bits = FORMS[form]
    with tempfile.TemporaryDirectory() as folder:
        target = PAIRS[options.pair].target
        if not form.startswith("stored") and options.pair == CHAT_PAIR:
            save_dequantised(Path(folder))
            target = folder
        engine = engine_of(load(ModelSpec(target, dtype, quantization, device="cpu", activations=bits)).model)
    if not isinstance(engine, NativeEngine):
        raise UserError(f"{options.pair} runs on another engine: choose a pair that the native engine supports")
    return engine


def filled(engine: NativeEngine, context: int, seed: int = 0) -> NativeCache:
    cache = engine.open()
    engine.run([Entry(cache, [(7 * i + seed) % 1000 for i in range(context)], 0, Draft())])
    return cache


def a_pass(engine: NativeEngine, cache: NativeCache, context: int, rows: int) -> Callable[[], object]:
    ids = [(13 * i) % 1000 for i in range(rows)]
    return lambda: engine.run([Entry(cache, ids, context, Draft.chain(tuple(ids[1:])))])


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def passes(options: argparse.Namespace) -> None:
    """Publish milliseconds of passes, and their ratios to B and to one row."""
    memory, records = torch.ones(READ_BYTES // 4), []
    for form in options.form:
        engine = engine_for(options, form)
        for context in options.context:
            cache, record = filled(engine, context), {"form": form, "context": context}
            actions = [a_pass(engine, cache, context, rows) for rows in options.rows]
            times: list[list[float]] = [[] for _ in actions]
            reads = []
            for _ in range(options.rounds):
                reads.append(seconds(memory.sum))
                for action, list_of in zip(actions, times, strict=True):
                    action()  # a first pass reads its weights after another number of rows
                    list_of += [seconds(action) for _ in range(3)]
            bandwidth = READ_BYTES / statistics.median(reads)
            cache.keep(context)
            least = (engine.weight_bytes + cache.kv_bytes) / bandwidth
            medians = [statistics.median(list_of) for list_of in times]
            record |= {"bandwidth": bandwidth / 1e9, "b": 1000 * least, "share": medians[0] / least}
            for rows, median in zip(options.rows, medians, strict=True):
                record[f"rows_{rows}"] = f"{1000 * median:.2f} ({median / medians[0]:.2f})"
            records.append(record)
            engine.close(cache)
    columns = {"form": "{form}", "context": "{context}", "read GB/s": "{bandwidth:.0f}", "B, ms": "{b:.2f}"}
    columns |= {"one row / B": "{share:.2f}"} | {f"{rows} rows, ms": f"{{rows_{rows}}}" for rows in options.rows}
    publish_width(options, "native_passes", columns, records)


def stages(options: argparse.Namespace) -> None:
    """Publish the microseconds of one-row and five-row passes by stage: products, attention, other work, waiting."""
    threads, records = torch.get_num_threads(), []
    engine = engine_for(options, options.form[0])
    engine.times = array("q", [0] * 2 * len(STAGES))
    for context in options.context:
        cache = filled(engine, context)
        for rows in options.rows:
            action = a_pass(engine, cache, context, rows)
            action()
            samples: list[list[float]] = []
            for _ in range(options.rounds):
                engine.times[:] = array("q", [0] * len(engine.times))
                total = 1e9 * seconds(action) * threads
                samples.append([*engine.times, total - sum(engine.times), total])
            medians = [statistics.median(column) / threads / 1000 for column in zip(*samples, strict=True)]
            products, serial = medians[: len(STAGES)], medians[len(STAGES) : -2]
            named = dict(zip(STAGES, products, strict=True))
            named["query, key, value"] += named.pop("value")
            named |= {
                "between the products": threads * sum(serial),
                "waiting and Python": medians[-2] - (threads - 1) * sum(serial),
            }
            records.append({"context": context, "rows": rows, "total": medians[-1], "stages": [*named.values()]})
    columns = {"context": "{context}", "rows": "{rows}"}
    columns |= {name: f"{{stages[{i}]:.0f}}" for i, name in enumerate(named)}
    publish_width(options, "native_stages", {**columns, "pass": "{total:.0f}"}, records)


def texts(options: argparse.Namespace) -> None:
    """Publish the tokens per second of several texts in one pass."""
    records: list[dict[str, Any]] = []
    for form in options.form:
        engine = engine_for(options, form)
        for context in options.context:
            caches = [filled(engine, context, seed) for seed in range(max(options.texts))]
            record: dict[str, Any] = {"form": form, "context": context}
            for count in options.texts:
                entries = [Entry(cache, [i + 1], context, Draft()) for i, cache in enumerate(caches[:count])]
                engine.run(entries)
                median = statistics.median(seconds(partial(engine.run, entries)) for _ in range(options.rounds))
                record[f"texts_{count}"] = count / median
            records.append(record)
    columns = {"form": "{form}", "context": "{context}"}
    columns |= {f"{count} texts" if count > 1 else "1 text": f"{{texts_{count}:.0f}}" for count in options.texts}
    publish_width(options, "several_texts", columns, records)


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


def steps(options: argparse.Namespace) -> None:
    """Publish the median times of decoding steps by part: a row per part, two columns per temperature."""
    prompts = [prompt.text for prompt in load_prompts(kinds=["code"])][: options.prompts]
    columns, records = {"part": "{part}"}, {}
    for temperature in options.temperature:
        recipe = Recipe(gamma=options.gamma, temperature=temperature, top_p=1.0, max_tokens=options.max_tokens)
        parts = step_parts(recipe, prompts)
        medians = {part: statistics.median(step[part] for step in parts) for part in parts[0]}
        key = f"{temperature:g}".replace(".", "_")
        columns |= {f"T={temperature:g}, ms": f"{{ms_{key}:.2f}}", f"T={temperature:g}, share": f"{{share_{key}:.0%}}"}
        for part, median in medians.items():
            figures = {f"ms_{key}": 1000 * median, f"share_{key}": median / sum(medians.values())}
            records.setdefault(part, {"part": part}).update(figures)
    publish(options, "time_breakdown", columns, list(records.values()))


_PAIR = {"pair": CHAT_PAIR}
STUDIES = {
    "passes": Study(
        passes,
        {
            **_PAIR,
            "rows": [*range(1, 9), 16],
            "context": [16, 64, 512, 1500, 2048],
            "rounds": 15,
            "form": {"nargs": "+", "default": list(FORMS), "choices": FORMS},
        },
    ),
    "stages": Study(stages, {**_PAIR, "rows": [1, 5], "context": [16, 512, 2048], "rounds": 60, "form": ["stored"]}),
    "texts": Study(
        texts, {**_PAIR, "texts": [1, 4, 8, 16, 32], "context": [64, 512], "rounds": 15, "form": ["stored"]}
    ),
    "steps": Study(steps, {"gamma": 3, "temperature": [0.0, 1.0], "prompts": 12, "max_tokens": 64}),
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
