"""Runs that lose the service they use: texts, recovery and repeated prefills (docs/reliability.md).

`OMP_NUM_THREADS=1 python -m benchmarks.replica_faults --write`. Two to four services of the bundled pair run on this
machine, each behind a relay; their processes are forked after the imports. At a random time of a run, a fault hits the
service that verifies it; greedy and sampled texts are compared with those of an undisturbed service. Runs that end
before the fault takes effect are repeated.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from benchmarks.runs import traced
from benchmarks.tables import publish, run_study, study_parser
from specdemo import set_environment_defaults
from specdemo.cli import main as run_terminal
from specdemo.core.events import End, StepEvent
from specdemo.core.metrics import percentile
from specdemo.core.step import Step
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

TABLES = {"replica-faults": "docs/reliability.md"}
PROMPT = "def read_lines(path):\n"
REPLICAS = (2, 3, 4)
MOST_DELAY_S = 0.6  # from the first step to the fault
PAUSE_S = 0.03  # between steps
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 1.0, "seed": 11})
COLUMNS = {
    "fault": "{fault}",
    "runs": "{runs}",
    "different texts": "{different}",
    "lost": "{lost}",
    "recovery p50 / p95 s": "{p50_s:.2f} / {p95_s:.2f}",
    "prefills repeated, mean tokens": "{prefills}, {reread:.0f}",
}


class Relay:
    """TCP relay to a service. A cut relay keeps its connections open and forwards nothing."""

    def __init__(self, url: str) -> None:
        self._service = urlsplit(url).hostname, urlsplit(url).port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut = True

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    service = socket.create_connection(self._service)
                except OSError:  # the service has ended
                    client.close()
                    continue
                for pair in ((client, service), (service, client)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._is_cut:
                    sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


PROCESSES = multiprocessing.get_context("forkserver")


class _Announcement(io.TextIOBase):
    """Standard output of a service, sent through a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def write(self, text: str) -> int:
        self._pipe.send(text)
        return len(text)


def serve(pipe: Connection) -> None:
    """Serve the bundled pair, and send the address."""
    sys.stdout = _Announcement(pipe)
    run_terminal(["serve", "--pair", "bundled", "--port", "0", "--device", "cpu"])


class Replica:
    """A service in a process of its own, and its relay."""

    def __init__(self) -> None:
        self._output, writer = PROCESSES.Pipe(duplex=False)
        self._process = PROCESSES.Process(target=serve, args=(writer,), daemon=True)
        self._process.start()
        writer.close()
        self.url = self._output.recv().removeprefix("listening on ").strip()
        self.relay = Relay(self.url)

    @property
    def port(self) -> str:
        """Port in the name of the replica."""
        return self.url.rpartition(":")[2]

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.relay.close()


FAULTS: dict[str, Callable[[Replica], None]] = {
    "killed (SIGKILL)": lambda replica: replica.send(signal.SIGKILL),
    "drained (SIGTERM)": lambda replica: replica.send(signal.SIGTERM),
    "frozen (SIGSTOP)": lambda replica: replica.send(signal.SIGSTOP),
    "network cut, connections open": lambda replica: replica.relay.cut(),
}


@dataclass(frozen=True)
class Outcome:
    """A disturbed run: its text, the step in which another service continued, and the duration of that step."""

    tokens: list[int]
    error: str | None
    switches: int
    recovery_s: float
    reread: int


def disturbed(
    recipe: Recipe, pool: ModelPool, replicas: list[Replica], fault: Callable[[Replica], None], delay_s: float
) -> tuple[Outcome, Replica]:
    """Run `recipe`; the fault hits its replica `delay_s` after the first step. Return the outcome and the victim."""
    steps: list[Step] = []
    recovery_s, victim, timer = 0.0, replicas[0], None
    events: Iterator[Any] = generate(recipe, PROMPT, pool)
    before = time.perf_counter()
    for event in events:
        if isinstance(event, StepEvent):
            seconds = time.perf_counter() - before
            steps.append(event.step)
            if timer is None:
                victim = next(r for r in replicas if event.step.verdict.replica.endswith(f":{r.port}"))
                timer = threading.Timer(delay_s, fault, [victim])
                timer.start()
            if event.step.verdict.remote.get("switched"):
                recovery_s += seconds
            time.sleep(PAUSE_S)
        before = time.perf_counter()
    assert timer is not None and isinstance(event, End)
    timer.join()
    links = [step.verdict.remote for step in steps]
    switches, reread = (int(sum(link.get(name, 0) for link in links)) for name in ("switched", "reread"))
    tokens = [token for step in steps for token in step.tokens]
    return Outcome(tokens, event.error, switches, recovery_s, reread), victim


def study(options: argparse.Namespace) -> None:
    """Disturb runs with each fault."""
    set_environment_defaults()
    PROCESSES.set_forkserver_preload(["benchmarks.runs", "specdemo.cli.commands"])
    pool, rng = ModelPool(), random.Random(options.seed)
    base = [Recipe(max_tokens=options.max_tokens, **values) for values in SETTINGS]
    records = []
    with ExitStack() as opened:
        replicas = [Replica() for _ in range(max(REPLICAS))]
        opened.callback(lambda: [replica.close() for replica in replicas])
        undisturbed = CloudConfig(replicas[0].url)
        expected = [traced(replace(recipe, cloud=undisturbed), PROMPT, pool).tokens for recipe in base]
        for name, fault in FAULTS.items():
            outcomes: list[tuple[Outcome, int]] = []
            while len(outcomes) < options.runs:
                used = replicas[: REPLICAS[len(outcomes) % len(REPLICAS)]]
                setting = len(outcomes) % len(base)
                cloud = CloudConfig(" ".join(replica.relay.url for replica in used))
                outcome, victim = disturbed(
                    replace(base[setting], cloud=cloud), pool, used, fault, rng.uniform(0.0, MOST_DELAY_S)
                )
                victim.close()
                replicas[replicas.index(victim)] = Replica()
                if outcome.switches or outcome.error or outcome.tokens != expected[setting]:
                    outcomes.append((outcome, setting))
                    print(name, len(outcomes), outcome.recovery_s, outcome.error or "", file=sys.stderr, flush=True)
            records.append(record(name, outcomes, expected))
    publish(options, "replica-faults", COLUMNS, records)


def record(fault: str, outcomes: list[tuple[Outcome, int]], expected: list[list[int]]) -> dict[str, Any]:
    """Return the record of the table; outcomes have the number of their expected text."""
    complete = [(outcome, setting) for outcome, setting in outcomes if outcome.error is None]
    seconds = [outcome.recovery_s for outcome, _ in complete]
    return {
        "fault": fault,
        "runs": len(outcomes),
        "different": sum(outcome.tokens != expected[setting] for outcome, setting in complete),
        "lost": len(outcomes) - len(complete),
        "p50_s": statistics.median(seconds),
        "p95_s": percentile(seconds, 0.95),
        "prefills": sum(outcome.switches for outcome, _ in complete),
        "reread": statistics.mean(outcome.reread / outcome.switches for outcome, _ in complete if outcome.switches),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--runs", type=int, default=100, help="runs per fault (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the times of the faults (default: %(default)s)")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
