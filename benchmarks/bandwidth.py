"""Share of the read bandwidth that passes over a large model use: table `bandwidth` in docs/performance.md.

`python -m benchmarks.bandwidth --write`. The bandwidth is that of summing an array of the model's size in float32.
Passes and sums alternate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.against_llama_cpp import FORMS
from benchmarks.memory import SHAPES, save_random
from benchmarks.tables import publish, run_study, study_parser
from specdemo.cli.commands import at_least_one
from specdemo.core.step import Draft
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.select import engine_of
from specdemo.models.load import load
from specdemo.models.memory import release_memory
from specdemo.models.spec import ModelSpec

TABLES = {"bandwidth": "docs/performance.md"}
COLUMNS = {"form": "{form}", "weights MB": "{mb:.0f}", "read GB/s": "{read:.0f}"}
CONTEXT = 64


def seconds(action: Callable[[], Any]) -> float:
    """Return the duration of `action`."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(form: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the share of the bandwidth for each number of rows."""
    release_memory()
    dtype, quantization, _ = FORMS[form]
    model = load(ModelSpec(str(folder), dtype=dtype, quantization=quantization, device="cpu")).model
    engine, size = engine_of(model), model.weight_bytes
    cache = engine.open()
    engine.run([Entry(cache, list(range(CONTEXT)), 0, Draft())])
    memory = torch.ones(size // 4)

    def single_pass(rows: int) -> Callable[[], Any]:
        ids = list(range(rows))
        return lambda: engine.run([Entry(cache, ids, CONTEXT, Draft.chain(tuple(ids[1:])))])

    actions = {"read": memory.sum, **{str(rows): single_pass(rows) for rows in options.rows}}
    found = {name: [seconds(action)] for name, action in actions.items()}
    for _ in range(options.rounds):
        for name, action in actions.items():
            found[name].append(seconds(action))
    record = {"form": form, "mb": size / 1e6, "read": size / 1e9 / statistics.median(found["read"][1:])}
    for rows in options.rows:
        shares = [read / own for read, own in zip(found["read"][1:], found[str(rows)][1:], strict=True)]
        own = statistics.median(found[str(rows)][1:])
        record[f"rows_{rows}"] = f"{1000 * own:.1f} ms, {statistics.median(shares):.2f}"
    return record


def study(options: argparse.Namespace) -> None:
    """Measure all forms and publish the table."""
    at_least_one("rounds", options.rounds)
    at_least_one("rows", min(options.rows))
    with tempfile.TemporaryDirectory() as folder:
        save_random(SHAPES[options.model], Path(folder))
        records = [measure(form, Path(folder), options) for form in options.form]
    unit = {f"{rows} rows" if rows > 1 else "1 row": f"{{rows_{rows}}}" for rows in options.rows}
    publish(options, "bandwidth", {**COLUMNS, **unit}, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--model", default="llama-300m", choices=SHAPES)
    parser.add_argument("--form", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 5, 8, 16])
    parser.add_argument("--rounds", type=int, default=30)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
