"""Load test of the cloud service with many edges: table `soak` in docs/edge-cloud.md.

`OMP_NUM_THREADS=1 python -m benchmarks.soak --write`. Two processes over loopback. Each edge decodes greedy texts
drafted by prompt lookup, which is almost free, and compares them with local AR decoding to detect mixed-up contexts.
Latencies are measured at the edges; memory is the resident size of the service.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.runs import Trace, cloud_service, possibly_failed, traced
from benchmarks.tables import publish, run_study, study_parser
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

TABLES = {"soak": "docs/edge-cloud.md"}
COLUMNS = {
    "texts": "{texts}",
    "different from AR decoding": "{wrong}",
    "failed": "{failed}",
    "repeated requests": "{repeated_requests}",
    "steps": "{steps:,}",
    "steps/s": "{steps_per_second:.0f}",
    "latency p50 / p95 / p99 ms": "{p50_ms:.0f} / {p95_ms:.0f} / {p99_ms:.0f}",
    "memory after 1/4, 1/2, end MB": "{rss_mb[0]:.0f}, {rss_mb[1]:.0f}, {rss_mb[2]:.0f}",
}


class Tallies:
    """Thread-safe totals over all edges."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.latencies: list[float] = []
        self.texts = self.wrong = self.failed = self.requests = 0

    def add(self, trace: Trace, expected: Sequence[int]) -> None:
        with self._lock:
            self.latencies += [event.step.verify_s for event in trace.steps[1:]]
            self.requests += int(sum(event.step.verdict.remote["sent"] for event in trace.steps))
            self.texts += 1
            self.failed += trace.end.error is not None
            self.wrong += trace.end.error is None and trace.tokens != expected


def start_edges(
    count: int,
    recipe: Recipe,
    prompts: Sequence[Prompt],
    expected: Sequence[Sequence[int]],
    end: float,
    tallies: Tallies,
) -> list[threading.Thread]:
    """Start threads that decode texts until `end`, by `time.monotonic`."""
    pool = ModelPool()

    def edge(number: int) -> None:
        index = number
        while time.monotonic() < end:
            chosen = index % len(prompts)
            tallies.add(possibly_failed(recipe, prompts[chosen].text, pool), expected[chosen])
            index += 7

    threads = [threading.Thread(target=edge, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def study(options: argparse.Namespace) -> None:
    """Run the edges for the requested time and publish the table."""
    pool, prompts, tallies = ModelPool(), load_prompts(), Tallies()
    base = Recipe(method="ar", temperature=0.0, max_tokens=options.max_tokens)
    expected = [traced(base, prompt.text, pool).tokens for prompt in prompts]
    memory: list[int] = []
    with cloud_service("--contexts", "64", "--budget-mb", "256") as service:
        recipe = replace(base, method="lookup", cloud=CloudConfig(service.url, encoding="msgpack", deadline_ms=5000))
        end = time.monotonic() + options.seconds
        for thread in start_edges(options.edges, recipe, prompts, expected, end, tallies):
            while thread.is_alive():
                thread.join(2.0)
                memory.append(service.rss_bytes)
    cuts = statistics.quantiles(tallies.latencies, n=100)
    quarter, steps = max(1, len(memory) // 4), len(tallies.latencies)
    figures = {
        "edges": options.edges,
        "seconds": options.seconds,
        "texts": tallies.texts,
        "wrong": tallies.wrong,
        "failed": tallies.failed,
        "steps": steps,
        "repeated_requests": tallies.requests - steps - tallies.texts,
        "steps_per_second": steps / options.seconds,
        **{f"p{percent}_ms": 1000 * cuts[percent - 1] for percent in (50, 95, 99)},
        "rss_mb": [memory[i] / 1e6 for i in (quarter - 1, 2 * quarter - 1, -1)],
    }
    publish(options, "soak", COLUMNS, [figures])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--edges", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--max-tokens", type=int, default=48)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
