"""Clients of page and services, and a load test of the endpoint: table `endpoint` (docs/completions.md).

`python -m benchmarks.load --write`: clients stream greedy completions, which are compared with local AR decoding; a
token takes its share of the time since the chunk before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.request import Request, urlopen

import psutil

from app import choose_port
from benchmarks.runs import Trace, cloud_service, traced
from benchmarks.tables import ROOT, publish, run_study, study_parser
from specdemo.core.errors import UserError
from specdemo.core.metrics import percentile
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe

TABLES = {"endpoint": "docs/completions.md"}
HOST = "127.0.0.1"
SERVICE, LINK = ("--contexts", "64", "--budget-mb", "256"), {"encoding": "msgpack", "deadline_ms": 5000}
PROMPT_STEP = 5  # every fifth prompt of the set
ENDPOINT_COLUMNS = {
    "clients": "{clients}",
    "texts": "{texts}",
    "different from AR decoding": "{wrong}",
    "first token p50 / p95 s": "{first_p50_s:.2f} / {first_p95_s:.2f}",
    "each token p50 / p95 ms": "{token_p50_ms:.0f} / {token_p95_ms:.0f}",
    "tokens/s of all": "{tokens_per_second:.0f}",
}
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

    def add_refusal(self) -> None:
        with self._lock:
            self.texts += 1
            self.failed += 1


def ar_texts(recipe: Recipe, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the tokens of each prompt's text by AR decoding."""
    pool = ModelPool()
    texts = [traced(recipe, prompt.text, pool).tokens for prompt in prompts]
    pool.clear()
    return texts


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    return run_study(endpoint, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
