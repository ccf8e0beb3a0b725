"""Load tests of page, cloud service and endpoint: tables `load`, `soak` (docs/edge-cloud.md), `endpoint`.

`OMP_NUM_THREADS=1 python -m benchmarks.load STUDY --write`. Edges decode greedy texts drafted by prompt lookup, which
is almost free, in processes on the same cores. Every text is compared with local AR decoding to detect mixed output.

`soak`: latencies are measured at the edges; memory is the resident size of the service. `page`: visitors press Run
again after each run, next to the edges; growth is the change of the page's memory from the second to the last quarter.
`endpoint` (docs/completions.md): clients stream greedy completions; a token takes its share of the time since the chunk
before.
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
from urllib.request import Request, urlopen

import psutil

from app import choose_port
from benchmarks.page_client import PageClient
from benchmarks.runs import Trace, cloud_service, possibly_failed, traced
from benchmarks.tables import ROOT, Study, publish, study_command
from specdemo.core.errors import UserError
from specdemo.core.metrics import percentile
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

TABLES = {**dict.fromkeys(("load", "soak"), "docs/edge-cloud.md"), "endpoint": "docs/completions.md"}
HOST = "127.0.0.1"
SAMPLE_S = 10.0
SERVICE, LINK = ("--contexts", "64", "--budget-mb", "256"), {"encoding": "msgpack", "deadline_ms": 5000}
PROMPT_STEP = 5  # every fifth prompt of the set
PAGE_COLUMNS = {
    "runs": "{runs:,}",
    "lost, mixed, failed": "{lost}, {wrong}, {failed}",
    "first token p50 / p95 s": "{p50_s:.1f} / {p95_s:.1f}",
    "Jain index": "{fairness:.3f}",
    "edge texts, mixed, failed": "{texts}, {edge_wrong}, {edge_failed}",
    "page MB by eighth of the time": "{curve}",
    "growth": "{growth:+.1f} %",
}
SOAK_COLUMNS = {
    "texts": "{texts}",
    "different from AR decoding": "{wrong}",
    "failed": "{failed}",
    "repeated requests": "{repeated_requests}",
    "steps": "{steps:,}",
    "steps/s": "{steps_per_second:.0f}",
    "latency p50 / p95 / p99 ms": "{p50_ms:.0f} / {p95_ms:.0f} / {p99_ms:.0f}",
    "memory after 1/4, 1/2, end MB": "{rss_mb[0]:.0f}, {rss_mb[1]:.0f}, {rss_mb[2]:.0f}",
}
ENDPOINT_COLUMNS = {
    "clients": "{clients}",
    "texts": "{texts}",
    "different from AR decoding": "{wrong}",
    "first token p50 / p95 s": "{first_p50_s:.2f} / {first_p95_s:.2f}",
    "each token p50 / p95 ms": "{token_p50_ms:.0f} / {token_p95_ms:.0f}",
    "tokens/s of all": "{tokens_per_second:.0f}",
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


class Tallies:
    """Thread-safe totals over all edges."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.latencies: list[float] = []
        self.texts = self.wrong = self.failed = self.requests = 0

    def add(self, trace: Trace, expected: Sequence[int]) -> None:
        with self._lock:
            self.latencies += [event.step.seconds.verify for event in trace.steps[1:]]
            self.requests += int(sum(event.step.verdict.remote["sent"] for event in trace.steps))
            self.texts += 1
            self.failed += trace.end.error is not None
            self.wrong += trace.end.error is None and trace.tokens != expected


def ar_texts(recipe: Recipe, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the tokens of each prompt's text by AR decoding."""
    pool = ModelPool()
    texts = [traced(recipe, prompt.text, pool).tokens for prompt in prompts]
    pool.clear()
    return texts


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


def memory_mb(process: psutil.Process, threads: Sequence[threading.Thread], interval_s: float) -> Iterator[float]:
    """Yield the resident memory of `process` at intervals until all threads end."""
    while any(thread.is_alive() for thread in threads):
        yield process.memory_info().rss / 1e6
        wake = time.monotonic() + interval_s
        for thread in threads:
            thread.join(max(0.0, wake - time.monotonic()))


@contextmanager
def page_process(pair: str = "bundled", **variables: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run the page with environment `variables`; yield its address and process."""
    port = choose_port(HOST, None)
    command = [sys.executable, "-u", "app.py", "--no-browser", "--pair", pair, "--host", HOST, "--port", str(port)]
    environment = {**os.environ, "SPECDEMO_QUEUE": "256", **variables}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            while not (line := process.stdout.readline()).startswith("specdemo is ready"):
                if not line:
                    raise UserError("the page did not start: run app.py to see its error")
            yield f"http://{HOST}:{port}/", psutil.Process(process.pid)
        finally:
            process.terminate()


def soak(options: argparse.Namespace) -> None:
    """Load the cloud service with many edges."""
    prompts, tallies = load_prompts(), Tallies()
    base = Recipe(method="ar", temperature=0.0, max_tokens=options.max_tokens)
    expected = ar_texts(base, prompts)
    with cloud_service(*SERVICE) as service:
        recipe = replace(base, method="lookup", cloud=CloudConfig(service.url, **LINK))
        end = time.monotonic() + options.seconds
        threads = start_edges(options.edges, recipe, prompts, expected, end, tallies)
        memory = list(memory_mb(service.process, threads, 2.0))
    cuts = statistics.quantiles(tallies.latencies, n=100)
    quarter, steps = max(1, len(memory) // 4), len(tallies.latencies)
    record = {
        "edges": options.edges,
        "seconds": options.seconds,
        "texts": tallies.texts,
        "wrong": tallies.wrong,
        "failed": tallies.failed,
        "steps": steps,
        "repeated_requests": tallies.requests - steps - tallies.texts,
        "steps_per_second": steps / options.seconds,
        **{f"p{percent}_ms": 1000 * cuts[percent - 1] for percent in (50, 95, 99)},
        "rss_mb": [memory[quarter - 1], memory[min(2 * quarter, len(memory)) - 1], memory[-1]],
    }
    publish(options, "soak", SOAK_COLUMNS, [record])


@dataclass
class Streamed:
    """Tokens of a streamed completion and their times in seconds, as seen by its client."""

    first_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, lines: Iterable[str], clock: Iterator[float]) -> Streamed:
        """Read the lines of a stream; `clock` yields the seconds since the request."""
        result, before = cls(), 0.0
        for line in lines:
            if not line.startswith("data: {"):
                continue
            choices, seconds = json.loads(line[6:])["choices"], next(clock)
            if not (new := choices[0].get("token_ids") if choices else None):
                continue
            if result.tokens:
                result.token_s += [(seconds - before) / len(new)] * len(new)
            else:
                result.first_s = seconds
            result.tokens, before = result.tokens + new, seconds
        return result


def stream_completion(url: str, prompt: Prompt, max_tokens: int) -> Streamed:
    """Return a greedy completion of a service."""
    body = {"model": "default", "prompt": prompt.text, "max_tokens": max_tokens}
    body |= {"temperature": 0, "stream": True, "return_token_ids": True}
    headers, start = {"content-type": "application/json"}, time.monotonic()
    with urlopen(Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)) as answer:
        return Streamed.of((line.decode() for line in answer), seconds_since(start))


def endpoint(options: argparse.Namespace) -> None:
    """Load the endpoint with streaming clients."""
    prompts = load_prompts()[::PROMPT_STEP]
    expected = ar_texts(Recipe(method="ar", temperature=0.0, max_tokens=options.max_tokens), prompts)
    results: list[tuple[Streamed, int]] = []

    def client(number: int) -> None:
        for turn in range(options.texts):
            chosen = (number + 7 * turn) % len(prompts)
            results.append((stream_completion(service.url, prompts[chosen], options.max_tokens), chosen))

    with cloud_service("--queue", "256") as service:
        client(0)  # compile and warm up
        results.clear()
        threads = [threading.Thread(target=client, args=(number,)) for number in range(options.clients)]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - start
    publish(options, "endpoint", ENDPOINT_COLUMNS, [endpoint_figures(results, expected, options.clients, seconds)])


def endpoint_figures(
    results: Sequence[tuple[Streamed, int]], expected: Sequence[Sequence[int]], clients: int, seconds: float
) -> dict[str, float]:
    """Return the record of the table."""
    first, each = [text.first_s for text, _ in results], [s for text, _ in results for s in text.token_s]
    return {
        "clients": clients,
        "texts": len(results),
        "wrong": sum(text.tokens != list(expected[prompt]) for text, prompt in results),
        "first_p50_s": percentile(first, 0.5),
        "first_p95_s": percentile(first, 0.95),
        "token_p50_ms": 1000 * percentile(each, 0.5),
        "token_p95_ms": 1000 * percentile(each, 0.95),
        "tokens_per_second": sum(len(text.tokens) for text, _ in results) / seconds,
    }


def page(options: argparse.Namespace) -> None:
    """Load the page with many visitors next to the edges of a cloud service."""
    prompts, edges = load_prompts()[::PROMPT_STEP], Tallies()
    base = Recipe(method="ar", temperature=0.0, max_tokens=options.max_tokens)
    expected, memory = ar_texts(base, prompts), []
    visits: list[list[tuple[Visit, int]]] = [[] for _ in range(options.visitors)]  # with the prompt
    with page_process() as (url, process), cloud_service(*SERVICE) as service:
        recipe = replace(base, method="lookup", cloud=CloudConfig(service.url, **LINK))
        end = time.monotonic() + 60 * options.minutes
        threads = start_edges(options.edges, recipe, prompts, expected, end, edges)
        for number in range(options.visitors):
            arguments = (url, number, prompts, options.max_tokens, end, visits[number])
            threads.append(threading.Thread(target=run_visitor, args=arguments))
            threads[-1].start()
        for megabytes in memory_mb(process, threads, SAMPLE_S):
            memory.append(megabytes)
            done = f"{sum(map(len, visits))} runs, {edges.texts} edge texts"
            print(f"{len(memory) * SAMPLE_S:.0f} s: {done}, page {megabytes:.0f} MB", file=sys.stderr, flush=True)
    publish(options, "load", PAGE_COLUMNS, [figures(options.minutes, visits, expected, memory, edges)])


def run_visitor(
    url: str, number: int, prompts: Sequence[Prompt], max_tokens: int, end: float, visits: list[tuple[Visit, int]]
) -> None:
    """Press Run until `end`, with another prompt each time."""
    client, index = PageClient(url, f"visitor{number}"), number
    settings = {"method": "nasd", "temperature": 0, "top-p": 1, "max-tokens": max_tokens, "compare": False}
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
    runs = [run for column in visits for run in column]
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


STUDIES = {
    "soak": Study(soak, {"edges": 32, "seconds": 120.0, "max_tokens": 48}),
    "endpoint": Study(endpoint, {"clients": 16, "texts": 3, "max_tokens": 48}),
    "page": Study(page, {"visitors": 50, "edges": 32, "minutes": 3.0, "max_tokens": 48}),
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
