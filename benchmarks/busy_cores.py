"""Speed of AR decoding next to busy processes: table `busy_cores` in docs/performance.md.

`python -m benchmarks.busy_cores --write`. Runs with different numbers of busy processes alternate.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.runs import traced
from benchmarks.tables import publish, run_study, study_parser
from specdemo.cli.commands import at_least_one
from specdemo.core.metrics import interval
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR
from specdemo.recipe import Recipe

TABLES = {"busy_cores": "docs/performance.md"}
COLUMNS = {"pair": "{pair}", "busy processes": "{count}", "tokens/s": "{speed:.0f}", "relative to none": "{ratio}"}
PROMPT = "def fibonacci(n):"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Occupy `count` cores with endless loops."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2)  # start of the interpreters
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def study(options: argparse.Namespace) -> None:
    """Measure both pairs and publish the table."""
    at_least_one("rounds", options.rounds)
    pool, records = ModelPool(), []
    for pair in ("bundled", CHAT_PAIR):
        recipe = Recipe(pair=pair, method="ar", temperature=0.0, max_tokens=options.max_tokens, device="cpu")
        traced(recipe, PROMPT, pool)
        speeds: dict[int, list[float]] = {count: [] for count in options.busy}
        for _ in range(options.rounds):
            for count, found in speeds.items():
                with busy(count):
                    found.append(traced(recipe, PROMPT, pool).metrics["tokens_per_second"])
        for count, found in speeds.items():
            ratios = [own / alone for own, alone in zip(found, speeds[options.busy[0]], strict=True)]
            low, high = interval(ratios)
            ratio = f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"
            records.append({"pair": pair, "count": count, "speed": statistics.median(found), "ratio": ratio})
    publish(options, "busy_cores", COLUMNS, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
