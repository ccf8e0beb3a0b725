"""Discrete-event simulation of edges and of replicas that cache their texts.

A replica reads long texts in chunks, alternating with passes that its other texts share; the interpreter of a service
runs one thread at a time.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import simpy

from specdemo.shared_passes import PASS_ROWS

CHUNK = 256  # tokens of a long text that a pass reads
CONTEXTS = 256  # texts cached by a replica
WARM_UP_S = 3.0


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

    def lose(self, at_s: float) -> Process:
        """End all requests at a time; return with an empty cache."""
        yield self.env.timeout(at_s)
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
        simulation._run(seconds)
        return simulation

    def _run(self, seconds: float) -> None:
        env, fleet = simpy.Environment(), self.fleet
        cores = simpy.Resource(env, fleet.cores) if fleet.cores else None
        process = simpy.Resource(env) if fleet.cores else None  # runs the code of one edge at a time
        replicas = [Replica(env, fleet, cores) for _ in range(fleet.replicas)]
        for edge in range(fleet.edges):
            env.process(self._edge(env, edge, replicas, process, cores))
        if fleet.lost_at_s is not None:
            env.process(replicas[0].lose(WARM_UP_S + fleet.lost_at_s))
        env.run(WARM_UP_S + seconds)

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
