"""Many edges and replicas: a simulation from measured durations, and its validation (docs/hosting.md).

`OMP_NUM_THREADS=1 python -m benchmarks.fleet STUDY --write`. `validate`: throughput of one
service of the bundled pair, predicted from the steps of one edge and from passes without a service; all edges share a
process, and the cores of the service. `simulate`: the chat model with edges on devices of their own, which draft as in
the measured steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.batching import load_with
from benchmarks.fleet_model import CHUNK, Fleet, Simulation
from benchmarks.native_passes import engine_for, filled, seconds
from benchmarks.runs import cloud_service, possibly_failed
from benchmarks.tables import Study, publish, study_command
from specdemo.core.metrics import percentile
from specdemo.core.step import Draft
from specdemo.models.engines.engine import Entry
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

TABLES = dict.fromkeys(("fleet", "fleet-validation"), "docs/hosting.md")
SIZES = ((10, 1), (100, 1), (100, 4), (1000, 4), (1000, 16), (1000, 64), (10_000, 64), (10_000, 256))
PREDICTED_S = 20.0
VALIDATION_COLUMNS = {
    "edges": "{edges}",
    "tokens/s measured": "{measured:.0f}",
    "predicted": "{predicted:.0f}",
    "predicted / measured": "{ratio:.2f}",
}
COLUMNS = {
    "edges": "{edges:,}",
    "replicas": "{replicas}",
    "tokens/s": "{tokens_s:,.0f}",
    "step p50 / p95 s": "{p50_s:.2f} / {p95_s:.2f}",
    "without affinity": "{no_affinity:.0%}",
    "without shared passes": "{no_batching:.0%}",
    "tokens of a lost replica, s": "{lost_s:.2f}",
}


def pass_costs(pair: str) -> tuple[tuple[float, float], float]:
    """Return the seconds of a pass and of each row, fitted to passes of several texts, and of a token of a prefill."""
    engine = engine_for(argparse.Namespace(pair=pair), "stored")
    counts = (1, 2, 4, 8, 16, 32)
    caches = [filled(engine, 64, seed) for seed in range(max(counts))]
    times = []
    for count in counts:
        entries = [Entry(cache, list(range(1, 6)), 64, Draft.chain((2, 3, 4, 5))) for cache in caches[:count]]
        times.append(percentile([seconds(partial(engine.run, entries)) for _ in range(9)], 0.5))
    slope, constant = np.polyfit([5 * count for count in counts], times, 1)
    read_s = seconds(partial(filled, engine, CHUNK)) / CHUNK
    return (max(float(constant), 0.0), float(slope)), read_s


def measured_fleet(
    pair: str, clients: Sequence[int], rtt_ms: float, duration_s: float
) -> tuple[Fleet, dict[int, float]]:
    """Return the durations of one edge and a service of the pair, and the tokens per second by number of edges."""
    pass_s, read_s = pass_costs(pair)
    prompts, pool, measured = load_prompts()[::25], ModelPool(), {}
    chat = {"pair": CHAT_PAIR} if pair == CHAT_PAIR else {}
    with cloud_service("--pair", pair, "--queue", "256") as service:
        cloud = CloudConfig(service.url, encoding="msgpack", deadline_ms=5000, rtt_ms=rtt_ms)
        recipe = Recipe(method="lookup", temperature=0.0, max_tokens=48, cloud=cloud, **chat)

        def decode(prompt: Prompt) -> tuple[Sequence[int], float]:
            return possibly_failed(recipe, prompt.text, pool).tokens, 0.0

        decode(prompts[0])
        edge_cpu, service_cpu = time.process_time(), sum(service.process.cpu_times()[:2])
        traces = [possibly_failed(recipe, prompt.text, pool) for prompt in prompts]
        edge_cpu, service_cpu = time.process_time() - edge_cpu, sum(service.process.cpu_times()[:2]) - service_cpu
        for count in clients:
            _, measured[count] = load_with(decode, count, prompts, duration_s)
            print(count, measured[count], file=sys.stderr, flush=True)
    steps = [event.step for trace in traces for event in trace.steps[1:]]
    total = sum(len(trace.steps) for trace in traces)
    cloud_s = sum(step.verdict.remote["cloud_s"] for step in steps) / len(steps)
    rows = sum(1 + len(step.draft) for step in steps) / len(steps)
    fleet = Fleet(
        edge_s=edge_cpu / total,
        http_s=max(service_cpu / total - cloud_s, 0.0),
        text_s=max(cloud_s - pass_s[0] - rows * pass_s[1], 0.0),
        pass_s=pass_s,
        read_s=read_s,
        steps=[(len(step.draft), len(step.tokens)) for step in steps],
    )
    print(replace(fleet, steps=()), file=sys.stderr, flush=True)
    return fleet, measured


def validate(options: argparse.Namespace) -> None:
    """Compare predicted and measured throughput of one service of the bundled pair."""
    fleet, measured = measured_fleet("bundled", options.edges, options.rtt_ms, options.seconds)
    records = []
    for edges, tokens_s in measured.items():
        small = replace(fleet, edges=edges, rtt_s=options.rtt_ms / 1000, prompt=64, length=48, cores=options.cores)
        predicted = Simulation.of(small, PREDICTED_S).tokens / PREDICTED_S
        records.append({"edges": edges, "measured": tokens_s, "predicted": predicted, "ratio": predicted / tokens_s})
    publish(options, "fleet-validation", VALIDATION_COLUMNS, records)


def _duration(options: argparse.Namespace, size: tuple[int, int]) -> float:
    """Return the simulated seconds: fewer of many edges."""
    return options.seconds / (4 if size[0] >= 10_000 else 1)


def simulate(options: argparse.Namespace) -> None:
    """Simulate edges and replicas of the chat model."""
    fleet, _ = measured_fleet(CHAT_PAIR, (), 0.0, 0.0)
    changes: dict[str, dict[str, Any]] = {
        "best": {},
        "no_affinity": {"affinity": False},
        "no_batching": {"texts": 1},
        "lost": {"lost_at_s": 0.5},
    }
    records = []
    with ProcessPoolExecutor(options.processes) as pool:
        results = {
            (size, name): pool.submit(
                Simulation.of, replace(fleet, edges=size[0], replicas=size[1], **change), _duration(options, size)
            )
            for size in reversed(SIZES)  # the longest first
            for name, change in changes.items()
        }
        for size in SIZES:
            duration = _duration(options, size)
            best, no_affinity, no_batching, lost = (results[size, name].result() for name in changes)
            records.append(
                {
                    "edges": size[0],
                    "replicas": size[1],
                    "tokens_s": best.tokens / duration,
                    "p50_s": percentile(best.durations, 0.5),
                    "p95_s": percentile(best.durations, 0.95),
                    "no_affinity": no_affinity.tokens / best.tokens,
                    "no_batching": no_batching.tokens / best.tokens,
                    "lost_s": (1 - lost.tokens / best.tokens) * duration,
                }
            )
            print(records[-1], file=sys.stderr, flush=True)
    publish(options, "fleet", COLUMNS, records)


STUDIES = {
    "validate": Study(validate, {"edges": [1, 2, 4, 8, 16, 32], "seconds": 4.0, "rtt_ms": 30.0, "cores": 2}),
    "simulate": Study(simulate, {"seconds": 10.0, "processes": 2}),
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
