"""Discrete-event simulation of many edges and replicas, with measured durations (docs/hosting.md).

`OMP_NUM_THREADS=1 python -m benchmarks.fleet STUDY --write`. A replica reads long texts in chunks, alternating with
passes that its other texts share; the interpreter of a service runs one thread at a time. `validate`: throughput of one
service of the bundled pair, predicted from the steps of one edge and from passes without a service; all edges share a
process, and the cores of the service. `simulate`: the chat model with edges on devices of their own, which draft as in
the measured steps.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import simpy

from benchmarks.batching import load_with
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
from specdemo.shared_passes import PASS_ROWS

TABLES = dict.fromkeys(("fleet", "fleet-validation"), "docs/hosting.md")
CHUNK = 256  # tokens of a long text that a pass reads
CONTEXTS = 256  # texts cached by a replica
WARM_UP_S = 3.0
SIZES = ((10, 1), (100, 1), (100, 4), (1000, 4), (1000, 16), (1000, 64), (10_000, 64), (10_000, 256))
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


Process: TypeAlias = "Generator[simpy.Event, Any, None]"


@dataclass(frozen=True)
class Fleet:
    """Measured durations in seconds, and the settings of a simulation."""

    edge_s: float  # work of the edge per step
    http_s: float  # work of the service per request, besides the device
    text_s: float  # work per text of a pass
    pass_s: tuple[float, float]  # a pass, and each of its rows
    read_s: float  # a token of a long text
    steps: Sequence[tuple[int, int]]  # draft tokens and committed tokens
    rtt_s: float = 0.1
    prompt: int = 512
    length: int = 200  # committed tokens of a text
    opening: int = 4  # other round trips of a text: connection, description, prefill, deletion
    edges: int = 1
    replicas: int = 1
    texts: int = 32  # most texts of a pass
    affinity: bool = True
    cores: int = 0  # of a machine that runs one service and all edges, in a process; 0: no limit
    lost_at_s: float | None = None  # time at which a replica is lost, for `replaced_s`
    replaced_s: float = 3.0
    seed: int = 1


@dataclass(eq=False)
class Job:
    """Request of a step: unread tokens before the draft, and rows of the draft."""

    unread: int
    rows: int
    done: simpy.Event


class Replica:
    """Service with an interpreter, a device and cached texts."""

    def __init__(self, env: simpy.Environment, fleet: Fleet, cores: simpy.Resource | None) -> None:
        self.env, self.fleet, self.cores = env, fleet, cores
        self.interpreter = simpy.Resource(env)
        self.read: OrderedDict[int, int] = OrderedDict()  # length of each cached text
        self.jobs: deque[Job] = deque()
        self.long: deque[Job] = deque()  # jobs that read a long text in chunks
        self.owed_s = 0.0  # duration of passes before the next chunk
        self.arrived = env.event()
        self.alive = True
        env.process(self.run())

    def submit(self, edge: int, length: int, rows: int) -> Job:
        """Queue a step of a text of `length` tokens."""
        job = Job(length - min(length - 1, self.read.get(edge, 0)), rows, self.env.event())
        self.read[edge] = length
        self.read.move_to_end(edge)
        while len(self.read) > CONTEXTS:
            self.read.popitem(last=False)
        self._queue(job)
        if not self.arrived.triggered:
            self.arrived.succeed()
        return job

    def run(self) -> Process:
        env, fleet = self.env, self.fleet
        while True:
            while not self.jobs and not self.long:
                self.arrived = env.event()
                yield self.arrived
            if self.long and (self.owed_s <= 0 or not self.jobs):
                job = self.long.popleft()
                count = min(job.unread - 1, CHUNK)
                self.owed_s = count * fleet.read_s
                yield from _use(env, self.owed_s, self.cores)
                job.unread -= count
                self._queue(job)
                continue
            group, rows = self._group()
            seconds = fleet.pass_s[0] + rows * fleet.pass_s[1]
            yield from _use(env, seconds, self.cores)
            yield from _use(env, len(group) * fleet.text_s, self.interpreter, self.cores)
            self.owed_s -= seconds
            for member in group:
                if not member.done.triggered:
                    member.done.succeed()

    def _queue(self, job: Job) -> None:
        (self.long if job.unread > CHUNK // 4 else self.jobs).append(job)

    def _group(self) -> tuple[list[Job], int]:
        """Remove and return the jobs of the next pass, and its rows."""
        group: list[Job] = []
        rows = 0
        for job in [*self.jobs]:
            if len(group) < self.fleet.texts and (not group or rows + job.unread + job.rows <= PASS_ROWS):
                group.append(job)
                self.jobs.remove(job)
                rows += job.unread + job.rows
        return group, rows

    def lose(self) -> Process:
        """End all requests; return with an empty cache."""
        self.alive = False
        self.read.clear()
        for job in (*self.jobs, *self.long):
            job.done.succeed("lost")
        self.jobs.clear()
        self.long.clear()
        yield self.env.timeout(self.fleet.replaced_s)
        self.alive = True


@dataclass
class Simulation:
    """Committed tokens and durations of steps after the warm-up."""

    fleet: Fleet
    tokens: int = 0
    durations: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, fleet: Fleet, seconds: float) -> Simulation:
        """Return a simulation after the warm-up and `seconds`."""
        simulation = cls(fleet)
        simulation.run(seconds)
        return simulation

    def run(self, until_s: float) -> float:
        """Return the tokens per second of all edges."""
        env, fleet = simpy.Environment(), self.fleet
        cores = simpy.Resource(env, fleet.cores) if fleet.cores else None
        process = simpy.Resource(env) if fleet.cores else None  # runs the code of one edge at a time
        replicas = [Replica(env, fleet, cores) for _ in range(fleet.replicas)]
        for edge in range(fleet.edges):
            env.process(self._edge(env, edge, replicas, process, cores))
        if fleet.lost_at_s is not None:
            env.process(_lose(env, replicas[0], WARM_UP_S + fleet.lost_at_s))
        env.run(WARM_UP_S + until_s)
        return self.tokens / until_s

    def _edge(
        self, env: simpy.Environment, edge: int, replicas: Sequence[Replica], *resources: simpy.Resource | None
    ) -> Process:
        fleet, rng = self.fleet, random.Random(f"{self.fleet.seed} {edge}")
        yield env.timeout(rng.uniform(0, fleet.rtt_s))
        length = fleet.prompt + rng.randrange(fleet.length)
        home = used = replicas[edge % len(replicas)]
        # Texts are under way at the start; without affinity, replicas have read other parts of them.
        count = min(len(replicas), CONTEXTS * len(replicas) // fleet.edges)
        for steps, replica in enumerate([home] if fleet.affinity else rng.sample(replicas, count)):
            replica.read[edge] = max(0, length - steps * fleet.steps[0][1])
        while True:
            start = env.now
            drafted, committed = rng.choice(fleet.steps)
            yield from _use(env, fleet.edge_s, *resources)
            outcome: Any = "lost"
            while outcome == "lost":
                yield env.timeout(fleet.rtt_s / 2)
                alive = [replica for replica in replicas if replica.alive]
                if not alive:
                    yield env.timeout(0.25)
                    continue
                if not (fleet.affinity and used.alive):
                    used = rng.choice(alive)
                yield from _use(env, fleet.http_s, used.interpreter, used.cores)
                outcome = yield used.submit(edge, length, drafted).done
                yield env.timeout(fleet.rtt_s / 2)
            length += committed
            if env.now >= WARM_UP_S:
                self.tokens += committed
                self.durations.append(env.now - start)
            if length >= fleet.prompt + fleet.length:
                length, used = fleet.prompt, home
                yield env.timeout(fleet.opening * fleet.rtt_s)
                for other in replicas:
                    other.read.pop(edge, None)


def _use(env: simpy.Environment, duration: float, *resources: simpy.Resource | None) -> Process:
    with ExitStack() as held:
        for resource in filter(None, resources):
            yield held.enter_context(resource.request())
        yield env.timeout(duration)


def _lose(env: simpy.Environment, replica: Replica, at_s: float) -> Process:
    yield env.timeout(at_s)
    yield from replica.lose()


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
        predicted = Simulation(small).run(20.0)
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
