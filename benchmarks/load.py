"""Load test of the page and the cloud service: table `load` in docs/edge-cloud.md.

`OMP_NUM_THREADS=1 python -m benchmarks.load --write`. Visitors press Run again after each run; edges use a cloud
service like those of `benchmarks.soak`. All share the cores. Every text is compared with AR decoding to detect mixed
output. Growth is the change of the page's memory from the second to the last quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import psutil

from app import choose_port
from benchmarks.page_client import PageClient
from benchmarks.runs import cloud_service, percentile, traced
from benchmarks.soak import Tallies, start_edges
from benchmarks.tables import ROOT, publish, run_study, study_parser
from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

TABLES = {"load": "docs/edge-cloud.md"}
HOST = "127.0.0.1"
SAMPLE_S = 10.0
PROMPT_STEP = 5  # every fifth prompt of the set
COLUMNS = {
    "runs": "{runs:,}",
    "lost, mixed, failed": "{lost}, {wrong}, {failed}",
    "first token p50 / p95 s": "{p50_s:.1f} / {p95_s:.1f}",
    "Jain index": "{fairness:.3f}",
    "edge texts, mixed, failed": "{texts}, {edge_wrong}, {edge_failed}",
    "page MB by eighth of the time": "{curve}",
    "growth": "{growth:+.1f} %",
}
ESTIMATE = re.compile(r"\d+ ahead, about \d+ s")
DISCARDED = ("rejected", "ignored")


@dataclass
class Visit:
    """A run as seen by its visitor."""

    tokens: list[int] = field(default_factory=list)
    phases: list[tuple[str, str]] = field(default_factory=list)
    first_token_s: float | None = None
    gaps: int = 0
    over: bool = False

    @property
    def queued(self) -> bool:
        """True if a queue position was displayed."""
        return any(phase == "queued" and "ahead" in text for phase, text in self.phases)

    @property
    def estimated(self) -> bool:
        """True if a waiting time was displayed."""
        return any(phase == "queued" and ESTIMATE.fullmatch(text) for phase, text in self.phases)

    @property
    def done(self) -> bool:
        """True if the run ended without a failure."""
        return self.over and self.phases[-1][0] == "done"


def visit(frames: Iterable[str], clock: Iterator[float]) -> Visit:
    """Read the frames of a run; `clock` yields the seconds since Run was pressed."""
    result, count = Visit(), 0
    for text in frames:
        frame, seconds = json.loads(text), next(clock)
        result.gaps += frame["at"] != count
        count = frame["at"] + len(frame["r"])
        result.phases.append(tuple(frame["phase"]))
        result.over = frame["over"]
        new = [cell[2] for record in frame["r"] for cell in record.get("c", ()) if cell[0] not in DISCARDED]
        if new and result.first_token_s is None:
            result.first_token_s = seconds
        result.tokens += new
    return result


def seconds_since(start: float) -> Iterator[float]:
    """Yield the seconds since `start`."""
    while True:
        yield time.monotonic() - start


def jain_index(shares: Sequence[float]) -> float:
    """Return the fairness index of Jain et al. (1984): 1 for equal shares, 1/n if one of n gets everything."""
    squares = len(shares) * sum(share * share for share in shares)
    return sum(shares) ** 2 / squares if squares else 1.0


def growth_percent(samples: Sequence[float]) -> float:
    """Return the growth from the second to the last quarter."""
    quarter = max(1, len(samples) // 4)
    before = statistics.mean(samples[quarter : 2 * quarter] or samples)
    return 100 * (statistics.mean(samples[-quarter:]) / before - 1)


def mean_by_eighth(samples: Sequence[float]) -> list[float]:
    """Return the mean of each eighth of the samples; an eighth without samples is left out."""
    bounds = [len(samples) * part // 8 for part in range(9)]
    return [statistics.mean(samples[start:end]) for start, end in pairwise(bounds) if end > start]


@contextmanager
def page_process() -> Iterator[tuple[str, psutil.Process]]:
    """Run the page; yield its address and process."""
    port = choose_port(HOST, None)
    command = [sys.executable, "-u", "app.py", "--no-browser", "--host", HOST, "--port", str(port)]
    environment = {**os.environ, "SPECDEMO_QUEUE": "256"}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            while not (line := process.stdout.readline()).startswith("specdemo is ready"):
                if not line:
                    raise UserError("the page did not start: run app.py to see its error")
            yield f"http://{HOST}:{port}/", psutil.Process(process.pid)
        finally:
            process.terminate()


def study(options: argparse.Namespace) -> None:
    """Drive visitors and edges for the requested time and publish the table."""
    pool, prompts, edges = ModelPool(), load_prompts()[::PROMPT_STEP], Tallies()
    base = Recipe(method="ar", temperature=0.0, max_tokens=options.max_tokens)
    expected = [traced(base, prompt.text, pool).tokens for prompt in prompts]
    pool.clear()
    visits: list[list[tuple[Visit, int]]] = [[] for _ in range(options.visitors)]  # with the prompt
    memory: list[float] = []
    with page_process() as (url, page), cloud_service("--contexts", "64", "--budget-mb", "256") as service:
        cloud = CloudConfig(service.url, encoding="msgpack", deadline_ms=5000)
        end = time.monotonic() + 60 * options.minutes
        threads = start_edges(options.edges, replace(base, method="lookup", cloud=cloud), prompts, expected, end, edges)
        for number in range(options.visitors):
            arguments = (url, number, prompts, options.max_tokens, end, visits[number])
            threads.append(threading.Thread(target=run_visitor, args=arguments))
            threads[-1].start()
        while any(thread.is_alive() for thread in threads):
            memory.append(page.memory_info().rss / 1e6)
            done = f"{sum(map(len, visits))} runs, {edges.texts} edge texts"
            print(f"{len(memory) * SAMPLE_S:.0f} s: {done}, page {memory[-1]:.0f} MB", file=sys.stderr, flush=True)
            wake = time.monotonic() + SAMPLE_S
            for thread in threads:
                thread.join(max(0.0, wake - time.monotonic()))
    publish(options, "load", COLUMNS, [figures(options.minutes, visits, expected, memory, edges)])


def run_visitor(
    url: str, number: int, prompts: Sequence[Prompt], max_tokens: int, end: float, visits: list[tuple[Visit, int]]
) -> None:
    """Press Run until `end`, with another prompt each time."""
    client, index = PageClient(url, f"visitor{number}"), number
    settings = {"method": "nasd", "temperature": 0, "top-p": 1, "max-tokens": max_tokens}
    while time.monotonic() < end:
        chosen = index % len(prompts)
        frames = client.frames({**settings, "prompt": prompts[chosen].text})
        visits.append((visit(frames, seconds_since(time.monotonic())), chosen))
        index += 7


def figures(
    minutes: float,
    visits: Sequence[Sequence[tuple[Visit, int]]],
    expected: Sequence[Sequence[int]],
    memory: Sequence[float],
    edges: Tallies,
) -> dict[str, object]:
    """Return the record of the table."""
    runs = [one for column in visits for one in column]
    waits = [run.first_token_s for run, _ in runs if run.first_token_s is not None]
    return {
        "minutes": minutes,
        "visitors": len(visits),
        "runs": len(runs),
        "lost": sum(run.gaps > 0 or not run.over for run, _ in runs),
        "wrong": sum(run.done and run.tokens != list(expected[prompt]) for run, prompt in runs),
        "failed": sum(run.over and not run.done for run, _ in runs),
        "queued": sum(run.queued for run, _ in runs),
        "estimated": sum(run.estimated for run, _ in runs),
        "p50_s": percentile(waits, 0.5),
        "p95_s": percentile(waits, 0.95),
        "fairness": jain_index([sum(run.done for run, _ in column) for column in visits]),
        "texts": edges.texts,
        "edge_wrong": edges.wrong,
        "edge_failed": edges.failed,
        "edge_p95_ms": 1000 * percentile(edges.latencies, 0.95) if edges.latencies else 0.0,
        "growth": growth_percent(memory),
        "curve": " ".join(f"{mean:.0f}" for mean in mean_by_eighth(memory)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--visitors", type=int, default=50)
    parser.add_argument("--edges", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
