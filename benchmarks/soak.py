"""Many edges at one cloud for a while: ``python -m benchmarks.soak``. Two processes over loopback.

Every edge writes one greedy text after another, drafted by prompt lookup so that the edges cost next to nothing, and
compares each with what plain decoding at hand writes: a context mixed up with another would show. Latencies are of
rounds as an edge sees them; the service's memory is its resident size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.cloud import cloud
from specdemo.core.events import End, Event, StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig


class Tallies:
    """What all edges found, together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.latencies: list[float] = []
        self.texts = self.wrong = self.failed = self.sent = 0

    def add(self, events: Sequence[Event], right: Sequence[int]) -> None:
        """Count in one text."""
        steps = [event.step for event in events if isinstance(event, StepEvent)]
        text = [token for step in steps for token in step.tokens]
        failed = isinstance(events[-1], End) and events[-1].error is not None
        with self._lock:
            self.latencies += [step.verify_s for step in steps[1:]]
            self.sent += int(sum(step.verdict.notes["sent"] for step in steps))
            self.texts += 1
            self.failed += failed
            self.wrong += not failed and text != list(right)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what was found, and a JSON line."""
    parser = argparse.ArgumentParser(prog="benchmarks.soak")
    parser.add_argument("--edges", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args(arguments)
    pool, prompts, found = ModelPool(), load_prompts(), Tallies()
    base = Recipe(method="ar", temperature=0.0, max_tokens=options.max_tokens)
    right = [
        [
            token
            for event in generate(base, prompt.text, pool)
            if isinstance(event, StepEvent)
            for token in event.step.tokens
        ]
        for prompt in prompts
    ]
    memory: list[int] = []
    with cloud("--contexts", "64", "--budget-mb", "256") as service:
        recipe = replace(base, method="lookup", cloud=CloudConfig(service.url, encoding="msgpack", deadline_ms=5000))
        end = time.monotonic() + options.seconds

        def edge(number: int) -> None:
            turn = number
            while time.monotonic() < end:
                which = turn % len(prompts)
                found.add(list(generate(recipe, prompts[which].text, pool)), right[which])
                turn += 7

        edges = [threading.Thread(target=edge, args=(number,)) for number in range(options.edges)]
        for thread in edges:
            thread.start()
        for thread in edges:
            while thread.is_alive():
                thread.join(2.0)
                memory.append(service.rss_bytes)
    cuts = statistics.quantiles(found.latencies, n=100)
    quarter = max(1, len(memory) // 4)
    figures = {
        "edges": options.edges,
        "seconds": options.seconds,
        "texts": found.texts,
        "wrong": found.wrong,
        "failed": found.failed,
        "rounds": len(found.latencies),
        "sent_again": found.sent - len(found.latencies) - found.texts,
        "rounds_per_second": len(found.latencies) / options.seconds,
        "p50_ms": 1000 * cuts[49],
        "p95_ms": 1000 * cuts[94],
        "p99_ms": 1000 * cuts[98],
        "rss_mb_after_a_quarter": memory[quarter - 1] / 1e6,
        "rss_mb_after_half": memory[2 * quarter - 1] / 1e6,
        "rss_mb_at_the_end": memory[-1] / 1e6,
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' ')}: {value:,.1f}" if isinstance(value, float) else f"{name}: {value:,}")
    print(json.dumps({"soak": figures}))


if __name__ == "__main__":
    main()
